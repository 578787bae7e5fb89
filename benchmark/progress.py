"""`Progress`: shows how far the benchmark is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

PAUSE = 30.0  # seconds between two lines


class Progress:
    """A progress bar on a terminal. Elsewhere a line on stderr, at most every PAUSE seconds."""

    def __init__(self) -> None:
        self.last = -PAUSE  # when the last line was printed

    def say(self, line: str) -> None:
        """Print a line, if there is no terminal and the last line is old enough."""
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self.last >= PAUSE:
            print(line, file=sys.stderr, flush=True)
            self.last = now

    @contextmanager
    def phase(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A part of the benchmark with `total` steps. Yields a function that is called after each of them."""
        done = 0
        with tqdm(total=total, desc=what, disable=None, leave=False) as bar:

            def advance() -> None:
                nonlocal done
                done += 1
                bar.update()
                self.say(f"{what}: {done} of {total}")

            self.say(f"{what}: 0 of {total}")
            yield advance
