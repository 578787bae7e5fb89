"""What the scripts' command lines share: the types of flags, text that is fit to be shown, errors of one line, and exit
codes."""

import argparse
import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from utils import UserError, out_of_memory


class Parser(argparse.ArgumentParser):
    """argparse's parser, but a wrong flag raises a UserError of one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The type of a flag that takes a whole number from `least` to `most`."""

    def convert(given: str) -> int:  # `int` alone also takes 1_000, other scripts' digits, and numbers of any length.
        if not re.fullmatch("[+-]?[0-9]{1,30}", given) or not least <= int(given) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {given[:40]!r}")
        return int(given)

    return convert


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of a flag that takes a number from `least` to `most`, not nan."""

    def convert(given: str) -> float:
        decimal = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", given)
        if not decimal or not least <= float(given) <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {given[:40]!r}")
        return float(given)

    return convert


def text(given: str) -> str:
    """The type of a flag that takes a name. An unset shell variable gives "", which is refused."""
    if not given:
        raise argparse.ArgumentTypeError("must not be empty")
    return given


def path(given: str) -> Path:
    """The type of a flag that takes a path."""
    return Path(text(given))


def visible(text: str, keep: str = "\n") -> str:
    """`text` with every character escaped that is not printable, not a kind of space and not in `keep`. So text of
    models, files and users cannot move the cursor, colour the screen or hide."""
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def one_line(error: BaseException) -> str:
    """An exception's text on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


def as_command(script: str, work: Callable[[], int | None], kept: str, smaller: str = "use smaller models") -> int:
    """Run `work()` as a command and return the exit code.

    The code is what `work` returns, or 0; 2 after one line that says what stopped it; 130 after Ctrl-C; 1 if nobody
    reads the output any longer. An error that is a bug is raised.
    kept: says what is not lost. smaller: what to do when memory is full.
    """
    for stream in sys.stdout, sys.stderr:  # A character that the screen cannot show must not stop the script.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = work()
        print(end="", flush=True)  # While an error of the output, such as a full disk, can still be reported.
        return code or 0
    except UserError as error:
        wrong = str(error)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more as it exits.
        return 1
    except Exception as error:
        if out_of_memory(error):
            wrong = f"out of memory; {smaller}, or close other programs. {kept}"
        elif isinstance(error, OSError):
            wrong = (f"{error.filename}: " if error.filename else "") + f"{error.strerror or error}. {kept}"
        else:
            raise
    print(f"{script}: error:", visible(" ".join(wrong.split())), file=sys.stderr)  # A name may hold any character.
    return 2
