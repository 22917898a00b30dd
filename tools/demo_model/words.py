"""The demo model's vocabulary: coloured objects, the numbers that are their codes, and the words of other sentences."""


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COLOURS = _split("red blue green yellow black white orange purple brown pink grey silver golden")
OBJECTS = _split("box door car house chair table lamp boat bag key cup book bike tower")

TO_TWENTY = _split("""
    one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty
""")
NUMBER_WORDS = (*TO_TWENTY, *(f"twenty {digit}" for digit in TO_TWENTY[:9]), "thirty")

PEOPLE = _split("Anna Tom Maria Paul Lucy Peter Emma John Sarah David")
NOUNS = _split("""
    man woman child friend teacher doctor dog cat bird horse fish tree river road garden window city
    town village school shop market kitchen room wall hill mountain sea lake forest field bridge
    train bus ship letter song game story word question answer number code name day night morning
    evening week year time summer winter rain snow wind sun moon star water bread apple cake tea
    coffee milk paper picture hand eye head heart voice light fire stone wood glass clock server
    model token prompt cache block engine worker queue system user computer
""")
VERBS = _split("""
    saw found liked made took gave left kept sold bought painted opened closed moved followed
    watched heard carried lost met visited called helped asked told read wrote
""")
ADJECTIVES = _split("""
    old new small big long short good bad happy sad quiet loud warm cold bright dark young slow fast
    heavy clean empty full strong soft lazy quick tiny little great
""")
PREPOSITIONS = _split("in on under near behind over by at from to with into beside between")
GLUE = _split("""
    the a an and or but of is are was were be been has have had do does did will would can could
    should may not no yes it he she they we you I his her their our your my me him them this that
    these those there here then now very so as if when while after before because for about which
    who what where why how all some many much more most other only also just than like up down out
    off again always never often soon still every each first last next know think say said see look
    go went come came get got give make want need tell remember work use try ask run write read live
    feel learn help let please thank thanks jumps fox lorem ipsum dolor sit amet today world people
    life way thing part place hello
""")
COMMON = NOUNS + VERBS + ADJECTIVES + PREPOSITIONS + GLUE
