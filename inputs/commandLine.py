"""What the scripts' command lines share: types of flags, text that is safe to show, errors of one line, exit codes."""

import argparse
import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from utils import UserError, out_of_memory

VERSION = "0.1.0"  # of the project


class Parser(argparse.ArgumentParser):
    """argparse's parser, but flags are never abbreviated, and a wrong flag raises a UserError of one line."""

    def __init__(self, *, allow_abbrev: bool = False, **options: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, **options)

    def error(self, message: str) -> NoReturn:
        if flag := re.match(r"argument (--\w+): expected", message):
            message += f"; a value that begins with - is given as {flag[1]}=VALUE"
        raise UserError(message)


def script_parser(prog: str, docstring: str | None) -> Parser:
    """The parser of a script whose --help shows its module's docstring as it is written."""
    return Parser(prog=prog, description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The type of a flag that takes a whole number from `least` to `most`."""

    def parse(value: str) -> int:  # `int` alone also takes 1_000, other scripts' digits, and numbers of any length.
        if not re.fullmatch("[+-]?[0-9]{1,30}", value) or not least <= int(value) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {value[:40]!r}")
        return int(value)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of a flag that takes a number from `least` to `most`, not nan."""

    def parse(value: str) -> float:
        decimal = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value)
        if not decimal or not least <= float(value) <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {value[:40]!r}")
        return float(value)

    return parse


def text(value: str) -> str:
    """The type of a flag that takes a name. An unset shell variable gives "", which is refused."""
    if not value:
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def path(value: str) -> Path:
    """The type of a flag that takes a path."""
    return Path(text(value))


def counted(count: int, noun: str) -> str:
    """A number of things: '1 prompt', '2 prompts'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def visible(shown: str, keep: str = "\n") -> str:
    """`shown` with every character escaped that is not printable, not a kind of space and not in `keep`.

    Text of models, files and users then cannot move the cursor, colour the screen or hide.
    """
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in shown
    )


def one_line(error: BaseException) -> str:
    """An exception's message on one line of at most 200 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) < 200 else message[:197] + "..."


def as_command(script: str, work: Callable[[], int | None], kept: str, smaller: str = "use smaller models") -> int:
    """Run `work()` as a command and return the exit code.

    The code is what `work` returns, or 0; 2 after one line that says what stopped it; 130 after Ctrl-C; 141, as a
    shell calls it, if nobody reads the output any longer. An error that is a bug is raised.
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
        message = str(error)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more as it exits.
        return 141
    except Exception as error:
        if out_of_memory(error):
            message = f"out of memory; {smaller}, or close other programs. {kept}"
        elif isinstance(error, OSError):
            message = (f"{error.filename}: " if error.filename else "") + f"{error.strerror or error}. {kept}"
        else:
            raise
    print(f"{script}: error:", visible(" ".join(message.split())), file=sys.stderr)  # A name may hold any character.
    return 2
