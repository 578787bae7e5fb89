"""What the scripts' command lines share: what a flag's value may be, one line for whatever is wrong, and exit codes."""

import argparse
import io
import os
import re
import sys
from pathlib import Path

from inputs.escape import visible
from utils import UserError, out_of_memory


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag gets one line."""

    def error(self, message):
        raise UserError(message)


def whole(least, most=10**9):
    """The type of a flag that takes a whole number from `least` to `most`."""

    def convert(given):  # int() would also take 1_000, the digits of other scripts, and numbers of any length
        if not re.fullmatch("[+-]?[0-9]{1,30}", given) or not least <= int(given) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, not {given[:40]!r}")
        return int(given)

    return convert


def number(least, most):
    """The type of a flag that takes a number from `least` to `most`; nan is none."""

    def convert(given):
        decimal = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", given)
        if not decimal or not least <= float(given) <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least:g} to {most:g}, not {given[:40]!r}")
        return float(given)

    return convert


def text(given):
    """The type of a flag that takes a name or a path: "" is what a shell makes of a variable that is not set."""
    if not given:
        raise argparse.ArgumentTypeError("must not be empty")
    return given


def path(given):
    return Path(text(given))


def as_command(script, work, kept, smaller="use smaller models"):
    """Run `work()` and return the exit code: what it returns, or 0; 2 after one line for what stopped it; 130 after
    Ctrl-C; 1 where nobody reads the screen any longer.

    kept: says what is not lost. smaller: what to do where memory is full."""
    for stream in sys.stdout, sys.stderr:  # no character is worth stopping for that a screen or a file cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = work()
        print(end="", flush=True)  # while it can still be told that nobody reads, or that the disk is full
        return code or 0
    except UserError as error:
        wrong = str(error)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes there once more at its end
        return 1
    except Exception as error:
        if out_of_memory(error):
            wrong = f"out of memory; {smaller}, or close other programs. {kept}"
        elif isinstance(error, OSError):
            wrong = (f"{error.filename}: " if error.filename else "") + f"{error.strerror or error}. {kept}"
        else:
            raise
    print(f"{script}: error:", visible(" ".join(wrong.split())), file=sys.stderr)  # whatever a file's name holds
    return 2
