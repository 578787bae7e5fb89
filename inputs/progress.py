"""What a terminal shows: `Bar` and `followed`, progress bars, and `Printer`, a console."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import NoReturn, TypeVar

from rich.console import Console
from tqdm import tqdm

T = TypeVar("T")
PAUSE = 30.0  # seconds between two states of a bar in a log


class Bar(tqdm):
    """A progress bar. Where no terminal shows it, a state of it is written every PAUSE seconds. Of several processes
    (`accelerate launch`) only the first shows it. total: the steps of the work; None if unknown."""

    def __init__(self, what: str, total: int | None, unit: str = "", items: Iterable[object] | None = None) -> None:
        rare = {} if sys.stderr.isatty() else {"mininterval": PAUSE, "maxinterval": 2 * PAUSE, "delay": PAUSE}
        is_first = os.environ.get("RANK", "0") == "0"
        options = {"unit": unit or "it", "unit_scale": bool(unit), "leave": False, "disable": not is_first}
        super().__init__(iterable=items, desc=what, total=total, **options, **rare)


def followed(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, with a `Bar` that advances when the next one is requested."""
    return iter(Bar(what, total, items=items))


class Printer(Console):
    """A console that raises BrokenPipeError, as `print` does, if nobody reads it any longer: rich exits with 1 then."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
