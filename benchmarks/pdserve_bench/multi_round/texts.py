"""What users say: words that are a token each in the vocabularies of most models, so that a prompt of so many words has
about so many tokens."""

from random import Random

_VOCABULARY = """
about after again all also and another answer are ask at because before behind between big black blue boat
book box bread bridge bright but by came car chair child city clean clock cold come computer could cup dark
day door down each eight empty evening every eye fast field fire first fish five for forest found four
friend from full game garden gave get give glass go gold good great green had hand happy has have he head
heard heart help her here hill him his horse house how if in into is it just key know lake last learn left
letter life light like live long look lost made make man many market may me milk moon more morning most
mountain much my name near need never new next night nine no not now number of off often old on one only
open or other our out over paper part people picture place please quick quiet rain read red remember river
road room run said saw say school sea see seven she ship shop short should silver six slow small snow so
some song soon star still stone story strong summer sun table tell ten than thank that the their them then
there they thing think this three time to today together took tower town train tree try two under up use
very village voice wall want warm was watched water way we week well went were what when where which while
white why will wind window winter with wood word work world would write year yellow yes you young your
"""
_WORDS = _VOCABULARY.split()


class Texts:
    """The texts of one run. The same seed makes the same texts; another seed makes others from the first word on, so
    that a server's prefix cache that has seen a run does not know the next."""

    def __init__(self, shared: int, history: int, seed: int) -> None:
        """So many words of the system prompt that all users share, and of each user's own history."""
        self._seed, self._history = seed, history
        self._shared = self._words("shared", shared)

    def first(self, user: int) -> str:
        """What a user's first message begins with: the prompt that all share, then what is its own."""
        history = self._words(f"user {user}", self._history)
        return f"{self._shared}. I am user {user}, and this is what we spoke about: {history}. "

    def question(self, number: int) -> str:
        return f"Question {number}: can you tell me another long story with a happy end?"

    def warm_up(self, number: int) -> str:
        return f"Warm-up {number}: {self._words(f'warm-up {number}', 100)}."

    def _words(self, purpose: str, count: int) -> str:
        return " ".join(Random(f"{self._seed} {purpose}").choices(_WORDS, k=count))
