"""Exit codes, and one line for everything that is wrong."""

import pytest
from conftest import refused

from inputs.commandLine import Parser, as_command, counted
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


@pytest.mark.parametrize("count, words", [(0, "0 texts"), (1, "1 text"), (2, "2 texts"), (25_600, "25,600 texts")])
def test_one_thing_is_no_plural(count, words):
    assert counted(count, "text") == words
