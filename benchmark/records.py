"""`BenchmarkRecord`: what a run of the benchmark writes as JSON, and the lines of measurements in it.

In these lines, `variant` is "eager" or "compiled", `role` is "target", "draft" or "copy" (the target's own copy in few
bits, compiled alone), and `seconds` has one number a turn. Older records have no copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from typing_extensions import NotRequired

from benchmark.options import Options
from experiments.intervals import Interval
from experiments.speed import TimedText
from inputs.models import default_pair
from utils import UserError

Written = TypeVar("Written")

OWN_COPY = ", own copy"  # the end of the variant of a round in which the target's own copy guesses


class StepLine(TypedDict):
    """The times of one step."""

    variant: str
    seconds: list[float]


class ForwardLine(StepLine):
    """Forwards of `tokens` tokens at once. share: the time to read `bytes` bytes at the limit (stepTimes.py), over
    the time of the forward."""

    role: str
    tokens: int
    bytes: int
    share: list[float]


class PartLine(StepLine):
    """A part of a round: "plain step", "draft step", "scoring", "sampling" or "round". With OWN_COPY at the end of its
    variant, "draft step" is a step of the copy, and the guesses of a round are `gammaCopy`."""

    part: str


class PrefillLine(StepLine):
    """The first token after a prompt of `tokens` tokens."""

    tokens: int


class GrowthLine(StepLine):
    """A token of the target after `context` tokens."""

    context: int


class PeerLine(TypedDict):
    """A row of another engine: the fields of its `Row`, its name, what it was told, and what its checks showed
    (engines/textCheck.py). draft: older records lack it. greedy, lossless: `GreedyAuditFigures` and `AuditFigures`."""

    engine: str
    module: str
    precision: str
    stored: float
    draft: NotRequired[str | None]
    speculative: bool
    alpha: float | None
    method: str
    quantised: bool
    version: str | None
    settings: NotRequired[dict[str, Any]]
    failed: str | None
    greedy: dict[str, Any] | None
    lossless: dict[str, Any] | None


class TextLine(TypedDict):
    """What the checks of a row's texts showed (engines/textCheck.py). failed: why it is left out or its greedy text is
    wrong; None if neither."""

    failed: str | None
    greedy: dict[str, Any] | None
    lossless: dict[str, Any] | None


class StepRecord(TypedDict):
    """What the steps of decoding cost. bandwidth: {what was read: bytes per second, one number a turn}."""

    forwards: list[ForwardLine]
    bandwidth: dict[str, list[float]]
    parts: list[PartLine]
    prefill: list[PrefillLine]
    growth: list[GrowthLine]


class BenchmarkRecord(StepRecord):
    """A run.

    code: the digest of the source, which the oldest records lack. compile_seconds: of each step of compiling, None
    where it failed. library_compile_seconds: {row: seconds} of the rows that the library compiles, at their first call.
    texts: {row: what is known of its text}, of rows that are left out too; rows with synthetic acceptance or random
    weights have none. peak_memory: bytes.
    """

    time: str
    command: str
    flags: dict[str, Any]
    device: str
    code: NotRequired[str]
    machine: dict[str, Any]
    models: dict[str, dict[str, Any]]
    dtype: str
    compile_seconds: list[float | None] | None
    library_compile_seconds: dict[str, float]
    texts: dict[str, TextLine]
    speed: list[TimedText]
    peers: list[PeerLine]
    peak_memory: int


class Prediction(TypedDict):
    """What `benchmark.tables.predict` gives: a speed-up with synthetic acceptance, and that of theorem 3.8 with the
    measured costs of drafting and scoring, c and scoring, in units of a plain step."""

    variant: str
    alpha: float
    c: float
    scoring: float
    theory: float
    measured: Interval


def write_record(
    record: Written, options: Options, kind: str, draw: Callable[[Written, Path], object] | None = None
) -> None:
    """Write a record as JSON, and its figure. The name of another target than the default one is in theirs."""
    name = kind if options.target == default_pair()[0] else f"{kind}-{Path(options.target).name}"
    what = "results"
    try:
        valid = json.loads(json.dumps(record), parse_constant=lambda _: None)  # JSON has no nan.
        (options.out / f"{name}.json").write_text(json.dumps(valid, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"Written to {name}.json.")
        what = "figure"
        if draw:
            draw(record, options.out / "figures" / f"{name}.png")
            print(f"Drawn as figures/{name}.png.")
    except OSError as error:
        raise UserError(f"the {what} cannot be written to {options.out} ({error.strerror or error})") from None
