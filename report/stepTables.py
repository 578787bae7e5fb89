"""The tables of other programs' methods and of the steps of decoding (`test.py --steps`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from experiments.acceptance import improvement
from experiments.intervals import Interval, interval
from experiments.lines import EngineLine, StepLine
from lossless.evidence import TESTS
from report.tables import Cell, Measured, Table, median, notation, span

ALPHAS = (0.4, 0.6, 0.8)  # of the speed-ups that the costs of a round allow
ENGINE_NOTES = (
    "Their texts have the full length, and so have all texts beside them. greedy: tokens that are not the target's "
    "argmax, in float32, beyond what rounding explains; a method with any is not timed. sampled: what the tests of "
    "test.py --audit find in {texts} texts. Quantised weights are another model."
)
STEP_NOTES = (
    "MB: bytes that a forward must read. of one: over the time of one token. % limit: the time to read as many bytes "
    "over that of the forward. The limit is the fastest that as many bytes, or more, were read in any turn, by reading "
    "alone or by a forward: {read}. A small model's weights may stay in the processor's cache, so reading fewer bytes "
    "does not count. of the first: over the time in the first row. c: a draft step over a plain step. v: scoring and "
    "verifying a block of gamma + 1 tokens over a plain step. sampling: the filters, draws and verification of a round "
    "alone. by theory: the speed-up of theorem 3.8 of Leviathan et al. at these costs."
)


def said_of(line: EngineLine) -> str:
    """The result of the check of the sampled text of another program's method."""
    if line["failed"]:
        return f"left out: {line['failed']}"
    if line["drawn"] is None:
        return "not tested"
    if line["quantised"]:
        return "another model"
    tests = [TESTS[name] for name in line["drawn"]["seen_by"]]
    if line["drawn"]["impossible"]:
        tests[-1:] = [f"impossible tokens {line['drawn']['impossible'] / line['drawn']['tokens']:.1%}"]
    return f"difference found: {', '.join(tests)}" if tests else "no difference found"


def engine_report(lines: Sequence[EngineLine]) -> Iterator[RenderableType]:
    """The methods of other programs, and the results of the checks of their texts."""
    table = Table("Other programs", ["", "version", "precision", "greedy", "sampled"], left=(1, 2, 4), folded=(4,))
    for line in lines:
        beyond = "" if line["greedy"] is None else f"{line['greedy']['beyond']} of {line['greedy']['tokens']}"
        table.add(line["method"], line["version"] or "", line["precision"], beyond, said_of(line))
    if lines:
        texts = max((line["drawn"]["texts"] for line in lines if line["drawn"]), default=0)
        yield table
        yield Text(ENGINE_NOTES.format(texts=texts or "their"))


def step_tables(lines: Sequence[StepLine]) -> Iterator[RenderableType]:
    """The tables of `--steps`."""
    if not lines:
        return
    tables = [forwards_table(lines), prefill_table(lines), growth_table(lines), round_table(lines)]
    yield from tables
    speeds = {line["role"]: line["bytes"] / min(line["seconds"]) for line in lines if line["what"] == "reading"}
    read = ", ".join(f"{speed / 1e9:.1f} GB/s for the {role}'s bytes" for role, speed in speeds.items())
    note = STEP_NOTES.format(read=read.replace("memory's bytes", "buffer beyond the cache"))
    yield Text(f"Medians{notation(*tables)}, in turn. {note}")


def ratio(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Median and interval of the ratios of two lists that were measured interleaved."""
    return interval([a / b for a, b in zip(upper, lower)])


def limits_of(lines: Sequence[StepLine]) -> Mapping[str, float]:
    """{role: the memory limit of its forwards, in bytes per second}: the fastest that as many bytes, or more, were read
    in any turn, by reading alone or by a forward.

    A pair of the same turn would not do: on a machine whose memory is shared, each of the two may meet another load,
    and the share would be above 1 where the reading was disturbed.
    """
    speeds = [(line["bytes"], line["bytes"] / min(line["seconds"])) for line in lines if "bytes" in line]
    least = {line["role"]: line["bytes"] for line in lines if line["what"] == "reading"}
    return {role: max(speed for size, speed in speeds if size >= read) for role, read in least.items()}


def forwards_table(lines: Sequence[StepLine]) -> Table:
    """One row for each model and number of tokens."""
    limits = limits_of(lines)
    one: dict[str, Sequence[float]] = {}
    table = Table("Forwards beside the time to read as many bytes", ["", "tokens", "MB", "ms", "of one", "% limit"])
    for line in lines:
        if line["what"] == "forward":
            one.setdefault(line["role"], line["seconds"])
            share = interval([line["bytes"] / limits[line["role"]] / seconds for seconds in line["seconds"]])
            of_one = Measured(ratio(line["seconds"], one[line["role"]]).middle, digits=2)
            figures = span(interval(line["seconds"]), 1e3), of_one, span(share, 100)
            table.add(line["role"], str(line["tokens"]), f"{line['bytes'] / 1e6:,.0f}", *figures)
    return table


def prefill_table(lines: Sequence[StepLine]) -> Table:
    """One row for each length of the prompt."""
    table = Table("Time to the first token after a prompt of so many tokens", ["prompt", "ms", "ms a token"])
    for line in lines:
        if line["what"] == "prefill":
            took = interval(line["seconds"])
            table.add(str(line["tokens"]), span(took, 1e3), median(took, 1e3 / line["tokens"]))
    return table


def growth_table(lines: Sequence[StepLine]) -> Table:
    """One row for each context."""
    table = Table("A token of the target after a context of so many tokens", ["context", "ms", "of the first"])
    grown = [line for line in lines if line["what"] == "growth"]
    for line in grown:
        took = span(interval(line["seconds"]), 1e3)
        table.add(str(line["tokens"]), took, span(ratio(line["seconds"], grown[0]["seconds"])))
    return table


def round_table(lines: Sequence[StepLine]) -> Table:
    """The parts of a round in ms and in units of a plain step, and what speed-up they allow."""
    parts = {line["role"]: line for line in lines if line["what"] == "round"}
    gamma, plain_step = parts["round"]["tokens"], parts["plain step"]["seconds"]
    table = Table(f"A round of {gamma} guesses, all accepted, and its parts", ["", "ms", "of a plain step"])
    for name, line in parts.items():
        table.add(name, span(interval(line["seconds"]), 1e3), span(ratio(line["seconds"], plain_step)))
    c = ratio(parts["draft step"]["seconds"], plain_step).middle if "draft step" in parts else 0.0
    scoring = ratio(parts["scoring"]["seconds"], plain_step).middle
    for alpha in ALPHAS:
        cells: list[Cell] = [f"by theory, alpha {alpha}", ""]
        table.add(*cells, Measured(improvement(alpha, gamma, c, scoring), digits=2))
    return table
