"""`Bar` and `followed`: progress bars."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
PAUSE = 30.0  # seconds between two lines


class Bar(tqdm):
    """A progress bar on a terminal. Elsewhere a line on stderr every PAUSE seconds, so that a log shows it too. Of
    several processes (`accelerate launch`) only the first shows it. total: the steps of the work; None if unknown."""

    def __init__(self, what: str, total: int | None, unit: str = "") -> None:
        self.what, self.end = what, f"{unit}{f' of {total:,}' if total is not None else ''}"
        self.done: float = 0
        self.shown = os.environ.get("RANK", "0") == "0"
        scale: dict[str, Any] = {"unit": unit or "it", "unit_scale": bool(unit)}
        super().__init__(total=total, desc=what, disable=None if self.shown else True, leave=False, **scale)
        self.last = time.monotonic()  # when the last line was printed, or the work began

    def update(self, n: float | None = 1) -> bool | None:
        """Advance by `n` steps."""
        self.done += n or 0
        now = time.monotonic()
        if self.shown and self.disable and now - self.last >= PAUSE:
            print(f"{self.what}: {self.done:,}{self.end}", file=sys.stderr, flush=True)
            self.last = now
        return super().update(n)


def followed(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, with a `Bar` that advances when the next one is requested."""
    with Bar(what, total) as bar:
        for item in items:
            yield item
            bar.update()
