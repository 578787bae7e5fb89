"""`in_turn`: times functions side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from engine.progress import Bar
from experiments.speed import quiet, synchronize

Key = TypeVar("Key", bound=Hashable)
Work = Callable[[], object]

TURNS, BUDGET = (5, 40), 20.0  # The least and the most turns; seconds after which no new turn begins.
WARM, LONG = 0.005, 0.5  # seconds; a function that takes LONG fills the caches itself


@torch.inference_mode()
def in_turn(works: Mapping[Key, Work], device: torch.device | str, what: str) -> dict[Key, list[float]]:
    """{name: [seconds, ...]} of the functions `works`, called in turn (A B C A B C ...). what: for the
    progress bar.

    A function that returns a float has timed itself. Before each call that counts, the function is called for WARM
    seconds: in decoding, a forward follows others of its own model, but here the function before it has filled the
    processor's caches. A function that takes LONG is not called for that: what was in the caches is soon read again.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in works}
    began, took = 0.0, dict.fromkeys(works, 0.0)
    with quiet(device), Bar(what, TURNS[1]) as bar:
        for turn in range(-2, TURNS[1]):  # The first two turns warm up.
            if turn == 0:
                began = time.perf_counter()
            for name, work in works.items():
                start = time.perf_counter()
                while took[name] < LONG and time.perf_counter() - start < WARM:
                    work()
                    synchronize(device)
                start = time.perf_counter()
                own = work()
                synchronize(device)
                took[name] = time.perf_counter() - start
                if turn >= 0:
                    seconds[name].append(own if isinstance(own, float) else took[name])
            if turn >= 0:
                bar.update()
            if turn + 1 >= TURNS[0] and time.perf_counter() - began > BUDGET:
                break
    return seconds
