"""Words of commands in shell scripts, and words whose value the script does not set."""

import pytest

from pdserve.convert.shell import Unset, commands_of
from pdserve.util.errors import ConfigError


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a b#c --d '#e' # f", ["a", "b#c", "--d", "#e"]),
        ("a \\\n  --b \\  \n  c", ["a", "--b", "c"]),
        ('a "b \\"c\\" d" \'{\n "e": 1}\'', ["a", 'b "c" d', '{\n "e": 1}']),
        ("a b&\n", ["a", "b"]),
        ("a >> log 2>&1 --b <<EOF\n", ["a", "--b"]),
        ("M=x/y\nexport N=$M\na $N ${M} '$M'", ["a", "x/y", "x/y", "$M"]),
        ('M=${M:-x/y}\na "${M}" ${P:-80} ${Q:-"r"}', ["a", "x/y", "80", "r"]),
        ("V=\na ${V:+--v $V} ${W:+--w} ${V:-d} b", ["a", "d", "b"]),
        ('V=v\na ${V:+--v "$V w"}', ["a", "--v", "v w"]),
        ('F="--b 1 --c"\na $F "$F"', ["a", "--b", "1", "--c", "--b 1 --c"]),
        ('A=(--b  # why\n  1)\nA+=(--c)\na "${A[@]}"', ["a", "--b", "1", "--c"]),
        ("A=(a b)", ["a", "b"]),
        ("a ${A:-${B:-${C:-${D:-x}}}}", ["a", "x"]),
        ("D=x\ncase $1 in --m) D=$2 ;; esac\na $D", ["a", "x"]),
        ("x='it''s'\na $x", ["a", "its"]),
        ("sudo bash -lc 'a \"b c\" && true'", ["a", "b c"]),
        ("[Service]\nExecStart=/opt/a b\\\n c", ["/opt/a", "b", "c"]),
    ],
)
def test_commands_are_split_into_words(script: str, words: list[str]) -> None:
    assert words in list(commands_of(script))


@pytest.mark.parametrize(
    ("word", "missing"),
    [
        ('"$1"', "$1"),
        ("$MODEL", "$MODEL"),
        ('"a-${NAME}-$X"', "${NAME} $X"),
        ('"$(basename "$M")"', "$(...) $M"),
        ("$((N * 8))", "$((N * 8))"),
        ("`hostname`", "`hostname`"),
        ("<your-model>", "<your-model>"),
        ('"$@"', "$@"),
    ],
)
def test_a_word_without_a_value_says_what_is_missing(word: str, missing: str) -> None:
    found = [each for words in commands_of(f"a --b {word}\n") for each in words if isinstance(each, Unset)]
    assert " ".join(each.missing for each in found) == missing


@pytest.mark.parametrize(
    "script", ["a 'b", 'a "b', "a ${b", "a $(b", "A=(b", "a `b", "'" * 501, "${" * 9999, "$( \n" * 9999, "\\"]
)
def test_parsing_an_unfinished_script_ends(script: str) -> None:
    assert all(isinstance(word, str) for words in commands_of(script) for word in words)


@pytest.mark.parametrize("line", ["A=$A$A$A$A$A$A$A$A", 'A=("${A[@]}" "${A[@]}" "${A[@]}" "${A[@]}")'])
def test_a_variable_that_grows_without_end_is_an_error(line: str) -> None:
    with pytest.raises(ConfigError, match="grows beyond"):
        list(commands_of("A=(xxxx)\n" + f"{line}\n" * 30))
