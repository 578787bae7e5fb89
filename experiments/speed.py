"""Timing methods side by side: in turn, in an order drawn anew for each prompt and repeat.

TTFT: from the call to the first token on the host. TPOT: (t_last - t_first) / (n - 1). Throughput: n / t_last. The
course report divides the total time, prefill included, by n; that figure is kept beside them as `report_tpot`.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator

from decoding.record import Record
from decoding.rows import EndOfText
from experiments.lines import QueueFigures, TimedText

Written = tuple[Sequence[Sequence[int]], Sequence[Record]]  # new tokens and records, one of each for each prompt
WARM = 8  # tokens of the text that each method writes untimed, right before a timed one
STALLED = 8  # A round that takes so many times the row's median is the machine's fault: the text is timed again.
AGAIN = 2  # times at most


class Timed(Protocol):
    """A method that can be timed: it continues one prompt."""

    def __call__(self, prompt: list[int], generator: Generator, first: int | None = None) -> Written:
        """The new tokens and their record, each in a list of one. first: end after that many tokens, or a few more,
        with a KV cache as large as ever."""


class TimedQueue(Protocol):
    """A method that can be timed: it continues a queue of prompts, `batch` at a time."""

    def __call__(
        self, prompts: Sequence[list[int]], generators: Sequence[Generator], batch: int, first: int | None = None
    ) -> Written:
        """The new tokens and the record of each text. first: as in `ends_after`."""


def ends_after(count: int, batch: int = 1) -> EndOfText:
    """`end_of_text` of `Rows` that ends a text at its `count`-th token. Of `batch` texts it ends half there, half of
    the others at twice as many, and so on: the batch has each size that it may have at the end of a queue."""
    numbers: dict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))
    return lambda text, token: next(numbers[text]) >= count * (batch // (text + 1)).bit_length()


@contextmanager
def quiet(device: torch.device | str) -> Iterator[None]:
    """A timed stretch: without garbage collection, and with an empty device queue at both ends."""
    gc.collect()
    gc.disable()
    try:
        synchronize(device)
        yield
        synchronize(device)
    finally:
        gc.enable()


def synchronize(device: torch.device | str) -> None:
    """Wait until a GPU has done all work it was given."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def digest(tokens: Sequence[Any]) -> str:
    """16 hexadecimal digits that identify token ids or texts."""
    return hashlib.sha256(repr(tokens).encode(errors="surrogatepass")).hexdigest()[:16]


def measure(
    methods: Mapping[str, Timed],
    prompts: Sequence[list[int]],
    repeats: int,
    seed: int,
    device: torch.device | str,
    warm_up: int = 2,
    numbers: Sequence[int] | None = None,
) -> Iterator[TimedText]:
    """Time every method on every prompt, `repeats` times, in turn: for the first text in the order of `methods`,
    which is that of the tables, then for each prompt and repeat in an order drawn anew. In one fixed order, a machine
    that slows down in the course of each prompt would slow the last method most.

    methods: {name: method}. warm_up: calls of each method that come first and do not count. numbers: of the prompts
        that are timed; None: all.
    Right before each timed text, the method writes its first WARM tokens untimed. Otherwise the first token pays for
    what ran before: after another engine's process, this one's threads sleep and the processor's caches hold other
    weights, and the row that came next had twice the TTFT of the others.
    A text with a round of more than STALLED times the median of all its method's rounds is timed again, and says how
    often.
    The generator's seed depends only on the prompt and the repeat, so a method's tokens do not depend on which other
    methods run.
    """
    numbers = range(len(prompts)) if numbers is None else numbers
    for _ in range(warm_up if numbers else 0):
        for method in methods.values():
            method(prompts[0], generator_of(seed, device))
    rounds: dict[str, list[float]] = defaultdict(list)
    with frozen_heap():
        for repeat in range(repeats):
            for index in numbers:
                prompt = prompts[index]
                for name in in_turn(methods, seed, repeat, index):
                    for stalled in itertools.count():
                        warming, generator = (generator_of(seed, device, repeat, index) for _ in range(2))
                        with quiet(device):
                            methods[name](prompt, warming, WARM)
                            synchronize(device)
                            (tokens,), (record,) = methods[name](prompt, generator)
                        took = np.diff(record.times).tolist()
                        rounds[name] += took
                        if stalled == AGAIN or max(took, default=0) <= STALLED * np.median(rounds[name] or [0]):
                            break
                    yield timed_text(name, index, repeat, prompt, tokens, record) | {"stalled": stalled}


def measure_queues(
    methods: Mapping[str, TimedQueue],
    prompts: Sequence[list[int]],
    batch: int,
    repeats: int,
    seed: int,
    device: torch.device | str,
    warm_up: int = 1,
) -> Iterator[tuple[list[TimedText], QueueFigures]]:
    """Time every method on the queue of all prompts, `repeats` times, in turn as in `measure`: the figures of each
    text, and of the queue.

    Each text has the seed that it has in `measure`. The warm-up is a batch as large as those of the queue, with KV
    caches as large.
    """
    warming = [max(prompts, key=len), *prompts][:batch]

    def generators(repeat: int, count: int) -> list[Generator]:
        return [generator_of(seed, device, repeat, index) for index in range(count)]

    for _ in range(warm_up):
        for method in methods.values():
            method(warming, generators(0, batch), batch)
    with frozen_heap():
        for repeat in range(repeats):
            for name in in_turn(methods, seed, repeat, 0):
                method = methods[name]
                first, others = generators(repeat, batch), generators(repeat, len(prompts))
                with quiet(device):
                    method(warming, first, batch, WARM)
                    synchronize(device)
                    texts, records = method(prompts, others, batch)
                timed = [
                    timed_text(name, index, repeat, prompt, tokens, record) | {"batch": batch}
                    for index, (prompt, tokens, record) in enumerate(zip(prompts, texts, records))
                ]
                yield timed, queue_figures(name, repeat, batch, records, max(record.times[-1] for record in records))


def in_turn(names: Iterable[str], seed: int, repeat: int, index: int) -> list[str]:
    """The order in which methods write the text of a prompt in a repeat: of the very first text, that of `names`."""
    order = list(names)
    if repeat or index:
        random.Random(f"{seed} {repeat} {index}").shuffle(order)
    return order


def generator_of(seed: int, device: torch.device | str, repeat: int = 0, index: int = 0) -> Generator:
    """The generator of a text: that of the prompt `index` in a repeat."""
    return Generator(device).manual_seed(seed + 1_000_003 * repeat + index)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Otherwise each garbage collection between measurements visits all of torch's objects: a quarter of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def timed_text(
    method: str, number: int, repeat: int, prompt: Sequence[int], tokens: Sequence[int], record: Record
) -> TimedText:
    """The figures of one timed text. number: of the prompt."""
    return {
        "method": method,
        "prompt": number,
        "repeat": repeat,
        "prompt_tokens": len(prompt),
        "tokens": record.tokens,
        "ttft": record.ttft,
        "tpot": record.tpot,
        "throughput": record.throughput,
        "report_tpot": record.seconds / record.tokens,
        "tokens_per_round": record.tokens_per_round,
        "seconds": record.seconds,
        "rounds": len(record.times) - 1,
        "drafted": sum(record.drafted),
        "accepted": sum(record.accepted),
        "acceptance_by_position": record.acceptance_by_position,
        "input": digest(prompt),
        "sha256": digest(tokens),
    }


def queue_figures(method: str, repeat: int, batch: int, records: Sequence[Record], seconds: float) -> QueueFigures:
    """The figures of a queue. records: of its texts."""
    tokens, rounds = sum(record.tokens for record in records), sum(len(record.times) - 1 for record in records)
    return {
        "method": method,
        "repeat": repeat,
        "batch": batch,
        "texts": len(records),
        "tokens": tokens,
        "seconds": seconds,
        "throughput": tokens / seconds,
        "tokens_per_round": (tokens - len(records)) / rounds if rounds else None,
        "drafted_per_round": sum(sum(record.drafted) for record in records) / rounds if rounds else None,
    }
