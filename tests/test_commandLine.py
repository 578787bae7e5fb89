"""Exit codes, and one line for everything that is wrong."""

from dataclasses import dataclass

import pytest
from conftest import refused

from inputs.commandLine import Parser, add_flags, as_command, choice, counted, filled, flag, number, switch, text, whole
from utils import UserError


@pytest.mark.parametrize(
    "error, code, said",
    [
        (None, 0, ""),
        (UserError("a name\nof two lines"), 2, "x.py: error: a name of two lines\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted. All is kept.\n"),
    ],
)
def test_what_stops_a_script(error, code, said, capsys):
    def work():
        if error:
            raise error

    assert as_command("x.py", work, "All is kept.") == code
    assert capsys.readouterr().err == said


def test_what_is_no_users_error_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        as_command("x.py", lambda: 1 / 0, "")


def test_a_wrong_flag_is_a_users_error():
    with refused("--unknown"):
        Parser(prog="x.py").parse_args(["--unknown"])


def soft():
    """Says it softly. And more."""


@dataclass(frozen=True)
class Voice:
    """How to speak.

    More of it.
    """

    how_loud: int | None = flag(whole(1, 9), first=True)
    """How loud: {scale}."""
    top_p: float = flag(number(0, 1), 0.5, "P")
    """A share."""
    words: tuple[str, ...] = flag(text, (), "WORD", name="word", action="append")
    """What to say. Default: nothing."""
    manner: str = choice({"soft": soft}, "soft")
    """The manner."""
    quick: bool = switch()
    """Speak
    quickly."""
    derived: int = 3


def test_a_field_is_a_flag_and_its_docstring_the_help():
    parser = Parser(prog="x")
    add_flags(parser, parser.add_argument_group("first"), Voice, scale="1 to 9")
    groups = {group.title: [action.dest for action in group._group_actions] for group in parser._action_groups}
    assert groups["first"] == ["howLoud"] and groups["how to speak"] == ["top_p", "word", "manner", "quick"]
    assert {action.dest: action.help for action in parser._actions if action.dest != "help"} == {
        "howLoud": "How loud: 1 to 9.",
        "top_p": "A share. Default: 0.5.",
        "word": "What to say. Default: nothing.",
        "manner": "The manner. soft: Says it softly. Default: soft.",
        "quick": "Speak quickly.",
    }
    assert filled(Voice, vars(parser.parse_args([]))) == Voice(None, 0.5, (), "soft", False)
    args = parser.parse_args(["--howLoud", "2", "--top_p", "1", "--word", "a", "--word", "b", "--quick"])
    assert filled(Voice, vars(args)) == Voice(2, 1.0, ("a", "b"), "soft", True)
    with refused("--howLoud", "from 1 to 9"):
        parser.parse_args(["--howLoud", "0"])


@pytest.mark.parametrize("count, words", [(0, "0 texts"), (1, "1 text"), (2, "2 texts"), (25_600, "25,600 texts")])
def test_one_thing_is_no_plural(count, words):
    assert counted(count, "text") == words
