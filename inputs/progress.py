"""`Bar` and `followed`: progress bars."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
PAUSE = 30.0  # seconds between two lines


class Bar:
    """A progress bar on a terminal. Elsewhere a line on stderr every PAUSE seconds, so that a log shows it too.

    total: the steps of the work; None if unknown. Of several processes (`accelerate launch`) only the first shows
    anything.
    """

    def __init__(self, what: str, total: int | None, unit: str = "") -> None:
        self.what, self.end, self.done = what, f"{unit}{f' of {total:,}' if total is not None else ''}", 0
        self.shown = os.environ.get("RANK", "0") == "0"
        scale = {"unit": unit or "it", "unit_scale": bool(unit)}
        self.bar = tqdm(total=total, desc=what, disable=None if self.shown else True, leave=False, **scale)
        self.last = time.monotonic()  # when the last line was printed, or the work began

    def update(self, steps: int = 1) -> None:
        """Advance by `steps`."""
        self.done += steps
        self.bar.update(steps)
        now = time.monotonic()
        if self.shown and self.bar.disable and now - self.last >= PAUSE:
            print(f"{self.what}: {self.done:,}{self.end}", file=sys.stderr, flush=True)
            self.last = now

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self.bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def followed(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, with a `Bar` that advances when the next one is requested."""
    with Bar(what, total) as bar:
        for item in items:
            yield item
            bar.update()
