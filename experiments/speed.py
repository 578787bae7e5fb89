"""The one timer: everything that is compared is timed interleaved, in an order drawn anew for each turn.

TTFT: from the call to the first token on the host. TPOT: (t_last - t_first) / (n - 1). Throughput: n / t_last. The
course report divides the total time, prefill included, by n; that figure is kept beside them as `report_tpot`.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Generator

from decoding.rows import EndOfText, Record
from engine.cudaModel import no_captures
from experiments.schema import QueueFigures, TimedText

Written = tuple[Sequence[Sequence[int]], Sequence[Record]]  # new tokens and records, one of each for each prompt
# A method that can be timed, f(prompts, generators, batch, first=None): it continues prompts, `batch` at a time. first:
# stop after this many tokens or slightly more; the KV cache has its full size (`ends_after`).
Timed = Callable[..., Written]
Key = TypeVar("Key", bound=Hashable)
Turn = TypeVar("Turn", bound=Hashable)
Result = TypeVar("Result")
Step = Callable[[], object]
WARM = 8  # tokens of the text that each method writes untimed, right before a timed one
WARM_SECONDS, LONG = 0.005, 0.5  # of a step; one that takes LONG fills the processor's caches itself
STALLED = 8  # A round that takes this many times the row's median is a stall of the machine: the text is timed again.
AGAIN = 2  # times at most


def in_turns(
    methods: Mapping[Key, Callable[[Turn, bool], Result]],
    turns: Iterable[Turn],
    device: torch.device | str,
    rounds_of: Callable[[Result], Sequence[float]],
) -> Iterator[tuple[Key, Turn, Result, int]]:
    """Time every method in every turn: (method, turn, result, how often it was timed again).

    methods: {key: f(turn, warming) -> measurement}. rounds_of: the seconds of its rounds.
    Each turn has an order drawn anew, which no seed fixes: it is another in each process. In one fixed order, a machine
    that slows down in the course of each turn would slow the last method most.
    Right before each call that counts, the method is called with `warming`. Otherwise it pays for what ran before:
    after another engine's process, this one's threads sleep and the processor's caches hold other weights, and the row
    that came next had twice the TTFT of the others.
    A measurement with a round of more than STALLED times the median of all the method's rounds is timed again.
    """
    rounds: dict[Key, list[float]] = defaultdict(list)
    gc.collect()
    gc.freeze()  # Otherwise each garbage collection between measurements takes a quarter of a second.
    try:
        for turn in turns:
            for key in random.sample(list(methods), len(methods)):
                for stalled in itertools.count():
                    result = time_call(partial(methods[key], turn), device)
                    took = rounds_of(result)
                    rounds[key] += took
                    if stalled == AGAIN or max(took, default=0) <= STALLED * np.median(rounds[key] or [0]):
                        break
                yield key, turn, result, stalled
    finally:
        gc.unfreeze()


def time_call(call: Callable[[bool], Result], device: torch.device | str) -> Result:
    """The result of `call(False)` in a timed stretch, right after `call(True)`. If steps had to be computed eagerly, as
    no CUDA graph had been captured for them, it is called untimed, which captures them, and timed again."""
    for _ in range(AGAIN + 1):  # A method that depends on measured times may use other steps each time.
        with quiet(device):
            call(True)
            synchronize(device)
            with no_captures() as missed:
                result = call(False)
        if not missed:
            break
        call(False)
    return result


def time_texts(
    methods: Mapping[str, Timed],
    prompts: Sequence[list[int]],
    repeats: int,
    seed: int,
    device: torch.device | str,
    batch: int | None = None,
    warm_up: int = 2,
    numbers: Sequence[int] | None = None,
) -> Iterator[tuple[list[TimedText], QueueFigures | None]]:
    """Time every method on every prompt, `repeats` times, interleaved: the figures of a text, and None. With `batch`
    each call is a queue of all prompts, `batch` at a time: the figures of its texts, and of the queue.

    warm_up: calls of each method that come first and do not count. numbers: of the prompts that are timed one by one;
        None: all.
    The generator's seed depends only on the prompt and the repeat, so a method's tokens do not depend on which other
    methods run, nor on the batch.
    """
    singles = range(len(prompts)) if numbers is None else numbers
    turns = [(repeat, index) for repeat in range(repeats) for index in ([-1] if batch else singles)]
    size, long = batch or 1, [max(prompts, key=len), *prompts]

    def generators(repeat: int, numbers: Iterable[int]) -> list[Generator]:
        return [Generator(device).manual_seed(seed + 1_000_003 * repeat + number) for number in numbers]

    def call(method: Timed, turn: tuple[int, int], warming: bool) -> Written:
        repeat, index = turn
        texts = (long[:size] if warming else prompts) if batch else [prompts[index]]
        seeded = generators(repeat, range(len(texts)) if batch else [index])
        return method(texts, seeded, size, WARM if warming else None)

    for _ in range(warm_up if turns else 0):
        for method in methods.values():  # The longest prompts: the KV caches grow no more.
            method(long[:size], generators(0, range(len(long[:size]))), size)

    def rounds_of(written: Written) -> list[float]:
        """The seconds of all rounds but the first, in which a draft reads the prompt: that is no stall. In a queue any
        round may last longer, where the next prompt is read."""
        return [] if batch else [seconds for record in written[1] for seconds in np.diff(record.times[1:]).tolist()]

    calls = {name: partial(call, method) for name, method in methods.items()}
    for name, (repeat, index), (texts, records), stalled in in_turns(calls, turns, device, rounds_of):
        timed = []
        for number, tokens, record in zip(itertools.count(0 if batch else index), texts, records):
            text = timed_text(name, number, repeat, prompts[number], tokens, record)
            if batch:
                text["batch"] = batch
            else:
                text["stalled"] = stalled
            timed.append(text)
        yield timed, queue_figures(name, repeat, batch, records) if batch else None


def time_steps(
    steps: Mapping[Key, Step], turns: Iterable[Hashable], device: torch.device | str
) -> dict[Key, list[float]]:
    """{key: [seconds, ...]} of steps that are timed interleaved: one figure a turn. A step that returns a float has
    timed itself.

    Before each call that counts, a step is called for WARM_SECONDS: in decoding, a forward follows others of its own
    model. A step that takes LONG is not called for that.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in steps}
    latest = dict.fromkeys(steps, 0.0)

    def call(key: Key, turn: Hashable, warming: bool) -> list[float]:
        start = time.perf_counter()
        while warming and latest[key] < LONG and time.perf_counter() - start < WARM_SECONDS:
            steps[key]()
            synchronize(device)
        if warming:
            return []
        start = time.perf_counter()
        result = steps[key]()
        synchronize(device)
        latest[key] = time.perf_counter() - start
        return [result if isinstance(result, float) else latest[key]]

    for key, _, took, _ in in_turns({key: partial(call, key) for key in steps}, turns, device, list):
        seconds[key] += took
    return seconds


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


def queue_figures(method: str, repeat: int, batch: int, records: Sequence[Record]) -> QueueFigures:
    """The figures of a queue. records: of its texts."""
    seconds = max(record.times[-1] for record in records)
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
