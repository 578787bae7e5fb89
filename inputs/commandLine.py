"""The scripts' command lines: types of flags, text that is safe to show, errors of one line, exit codes."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, field, fields
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from traceback import format_exception
from typing import Any, NoReturn

from utils import UserError, out_of_memory

VERSION = "0.1.0"  # of the project


class Parser(argparse.ArgumentParser):
    """argparse's parser, but flags are never abbreviated, and a wrong flag raises a UserError of one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        if flag := re.match(r"argument (--\w+): expected", message):
            message += f"; a value that begins with - is given as {flag[1]}=VALUE"
        elif flag := re.match(r"argument (--\w+): invalid choice: '(.*?)'", message):
            message += did_you_mean(flag[2], map(str, self._option_string_actions[flag[1]].choices or ()))
        elif unknown := re.match(r"unrecognized arguments: ([^\s=]+)", message):
            message += did_you_mean(unknown[1], self._option_string_actions)
        raise UserError(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's line for a name that is not `known`: '; did you mean X?', or "" if no known one is near."""
    spelled = {one.lower().strip("-"): one for one in known}
    near = difflib.get_close_matches(name.lower().strip("-"), spelled, 1, 0.7)
    return f"; did you mean {spelled[near[0]]}?" if near and spelled[near[0]] != name else ""


def script_parser(prog: str, docstring: str | None) -> Parser:
    """The parser of a script whose --help shows its module's docstring as it is written."""
    return Parser(prog=prog, description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


# What `int` and `float` may read: they alone also take 1_000, other scripts' digits, nan, and any length.
DIGITS = {int: "[+-]?[0-9]{1,30}", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}


def bounded(value: str, kind: type, least: float, most: float) -> Any:
    """`value` as a number of type `kind`. Raises ArgumentTypeError unless it is one from `least` to `most`."""
    if not re.fullmatch(DIGITS[kind], value) or not least <= kind(value) <= most:
        what = f"a whole number from {least} to {most}" if kind is int else f"a number from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(f"must be {what}, not {value[:40]!r}")
    return kind(value)


def whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The type of a flag that takes a whole number from `least` to `most`."""
    return partial(bounded, kind=int, least=least, most=most)


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of a flag that takes a number from `least` to `most`, not nan."""
    return partial(bounded, kind=float, least=least, most=most)


def text(value: str) -> str:
    """The type of a flag that takes a name. An unset shell variable gives "", which is refused."""
    if not value:
        raise argparse.ArgumentTypeError("must not be empty")
    return value


def path(value: str) -> Path:
    """The type of a flag that takes a path."""
    return Path(text(value)).expanduser()  # A shell leaves the ~ of --out=~/FOLDER.


# Flags that are fields of a dataclass. The docstring below the field is the flag's help.
OWN = {"name", "first", "only"}  # options of `flag` that argparse does not know


def flag(kind: Callable[[str], Any], default: Any = None, metavar: str | None = "N", **options: Any) -> Any:
    """A field that is a flag with a value of type `kind`. default None: no default, or one that depends on other flags.

    options: those of `add_argument`, and name: the flag's name, if it is not the field's; first: whether it is among
    the flags that most people need; only: (the purpose, f(settings) -> whether it is used) of a flag that has no
    effect otherwise.
    """
    return field(default=default, metadata={"type": kind, "metavar": metavar, **options})


def choice(values: Iterable[str], default: str | None = None, **options: Any) -> Any:
    """A field that is a flag with one of `values`. These may be {word: function}: then the help ends with the
    first sentence of each function's docstring."""
    return flag(str, default, None, choices=values, **options)


def switch(**options: Any) -> Any:
    """A field that is a flag without a value."""
    return field(default=False, metadata={"action": "store_true", **options})


def flags_of(part: Any) -> dict[str, Field[Any]]:
    """{name of a flag: its field} of a dataclass: `draftLength` for the field `draft_length`."""
    names = {f: re.sub("_([a-z])(?=[a-z])", lambda letter: letter[1].upper(), f.name) for f in fields(part)}
    return {f.metadata.get("name", name): f for f, name in names.items() if f.metadata}


def add_flags(parser: Parser, first: Any, part: type, **lists: str) -> None:
    """Add the flags of a dataclass to a parser, as a group with the first line of its docstring as title. first: the
    group of the flags that most people need. lists: what the helps name in braces."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(part)).body if isinstance(node, ast.ClassDef))
    helps = {  # {field: the docstring below it}
        above.target.id: " ".join(below.value.value.split())
        for above, below in pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
    title = (part.__doc__ or "").partition("\n")[0].rstrip(".")
    group = parser.add_argument_group(title[0].lower() + title[1:])
    for name, declared in flags_of(part).items():
        options: dict[str, Any] = {key: value for key, value in declared.metadata.items() if key not in OWN}
        text, default, words = helps[declared.name].format(**lists), declared.default, options.get("choices")
        for word, rule in words.items() if isinstance(words, Mapping) else ():
            sentence = " ".join((rule.__doc__ or "").split()).partition(". ")[0].rstrip(".")
            text += f" {word}: {sentence}."
        if isinstance(default, (int, float, str)) and not isinstance(default, bool):
            text += f" Default: {default if isinstance(default, str) else format(default, 'g')}."
        options |= {"choices": tuple(words)} if words else {}
        chosen = first if declared.metadata.get("first") else group
        chosen.add_argument(f"--{name}", default=None if default == () else default, help=text, **options)


def filled(part: type, values: Mapping[str, Any]) -> Any:
    """A dataclass with the values of its flags, {name of a flag: value}. None leaves the field's default."""
    pairs = ((f.name, values[name]) for name, f in flags_of(part).items() if values[name] is not None)
    return part(**{name: tuple(value) if isinstance(value, list) else value for name, value in pairs})


def counted(count: int, noun: str) -> str:
    """A number of things: '1 prompt', '2 prompts'."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def visible(shown: str, keep: str = "\n") -> str:
    """`shown` with every character escaped that is not printable, not a kind of space and not in `keep`. Text of models
    and users then cannot move the cursor, colour the screen or hide."""
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in shown
    )


def one_line(error: BaseException | str) -> str:
    """An exception's message, or words, on one line of at most 200 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) < 200 else message[:197] + "..."


def as_command(script: str, work: Callable[[], int | None], kept: str, smaller: str = "use smaller models") -> int:
    """Run `work()` as a command and return the exit code.

    The code is the result of `work`, or 0; 2 after an error of one line; 130 after Ctrl-C; 141, as a
    shell calls it, if nobody reads the output any longer. An error that is a bug is raised.
    kept: a sentence on what is not lost. smaller: the remedy when memory is full.
    """
    # A character that the screen cannot show, or that is not in the input's encoding, must not stop the script.
    for stream, errors in (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"), (sys.stdin, "replace"):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        code = work()
        print(end="", flush=True)  # While an error of the output, such as a full disk, can still be reported.
        return code or 0
    except UserError as error:
        message = str(error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more as it exits.
        return 141
    except (KeyboardInterrupt, Exception) as error:
        if "KeyboardInterrupt" in "".join(format_exception(error)):  # A library that is imported may rename it.
            print(f"\nInterrupted. {kept}", file=sys.stderr)
            return 130
        if out_of_memory(error):
            message = f"out of memory; {smaller}, or close other programs. {kept}"
        elif isinstance(error, OSError) and error.filename:
            message = f"{error.filename}: {error.strerror or error}. {kept}"
        elif isinstance(error, OSError) or "(os error " in str(error):  # A full disk, as safetensors says it.
            message = f"{getattr(error, 'strerror', None) or error}. {kept}"
        else:
            raise
    print(f"{script}: error:", visible(" ".join(message.split())), file=sys.stderr)  # A name may hold any character.
    return 2


def as_script(script: str, kept: str, smaller: str = "use smaller models") -> Callable[..., Any]:
    """A decorator: the function is run as a command and returns the exit code. See `as_command`."""

    def decorate(work: Callable[..., int | None]) -> Callable[..., int]:
        return wraps(work)(lambda *args, **options: as_command(script, partial(work, *args, **options), kept, smaller))

    return decorate
