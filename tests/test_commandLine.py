"""Exit codes, and one line for everything that is wrong. (Flags: test_flags.py.)"""

import pytest

from inputs.commandLine import as_command, counted
from utils import UserError


def stops_with(error):
    raise error


@pytest.mark.parametrize(
    "error, code, said",
    [
        (UserError("a name\nof two lines"), 2, "x.py: error: a name of two lines\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted. All is kept.\n"),
    ],
)
def test_what_stops_a_script(error, code, said, capsys):
    assert as_command("x.py", lambda: stops_with(error), "All is kept.") == code
    assert capsys.readouterr().err == said
    with pytest.raises(ZeroDivisionError):  # What is no user's error is not hidden.
        as_command("x.py", lambda: stops_with(ZeroDivisionError()), "")


@pytest.mark.parametrize("count, words", [(0, "0 texts"), (1, "1 text"), (2, "2 texts"), (25_600, "25,600 texts")])
def test_one_thing_is_no_plural(count, words):
    assert counted(count, "text") == words
