"""`tables`: what the benchmark prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isnan
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from benchmark.contenders import ALPHAS, COPY_ALPHAS, SAMPLING, copy_name, guessed_without_cache
from benchmark.engines.textCheck import verdict
from benchmark.records import OWN_COPY, BenchmarkRecord, ForwardLine, Prediction, StepLine
from benchmark.stepTimes import LARGE, PROMPT
from experiments import theory
from experiments.intervals import Interval, interval, speedup, summarize
from experiments.speed import TimedText
from inputs.commandLine import counted
from inputs.files import gigabytes
from report.tables import Cell, Table, median, notation, plain, span

STEP_NOTES = (
    "MB: bytes that a forward must read. of one: over the time of one token. of the target's one: over that of the "
    "target for one token. % limit: the time to read as many bytes "
    "over that of the forward. of the first: over the time in the first row. draft step: one guess. scoring: all "
    "guesses scored at once, and verified. round: all of it. sampling: its filters, draws and verification alone."
)


def tables(record: BenchmarkRecord) -> Iterator[RenderableType]:
    """Everything that is printed."""
    yield plain(heading(record))
    speed, *steps = shown = (
        speed_table(record),
        forwards_table(record),
        *([copy_table(record)] if copy_lines(record) else []),
        prefill_table(record),
        growth_table(record),
        round_table(record),
    )
    yield speed
    method, share = longest_prefill(record["speed"])
    yield Text(
        "TTFT: time to the first token. TPOT: time for each token after it. The first token took at most "
        f"{100 * share:.1f} % of a row's time ({method}). alpha: share of the tested guesses that were accepted. "
        "tokens/round: tokens for one forward of the target."
    )
    yield from (Text(note) for note in notes_of_rows(record))
    if texts_of(record):
        yield Text(
            "difference: whether the tests of test.py --lossless tell a row's sampled text from the target's own, "
            "computed in float32. Quantised weights are another model."
        )
        yield from (Text(f"{method}: {words}") for method, words in texts_of(record).items() if ": " in words)
    if record["flags"]["shapes"]:
        yield synthetic_table(record)
        yield Text(
            "synthetic: each guess is accepted with probability alpha, by a coin. theory: theorem 3.8 of Leviathan et "
            "al., with the measured costs. c: the time of a draft step. "
            "scoring: the time to score gamma + 1 tokens at once. Both in units of a plain step, sampling included."
        )
    for table in steps:
        yield table
        if table is steps[0]:
            yield Text(bandwidths(record))
    yield Text(STEP_NOTES)
    peak = gigabytes(record["peak_memory"])
    seconds = [value for value in record.get("compile_seconds") or () if value is not None]
    compiled = f" Compiling took {sum(seconds):.2g} s." if seconds else ""
    yield Text(f"Medians{notation(*shown)}, all measured in turn. Peak memory of the process: {peak}.{compiled}")


def heading(record: BenchmarkRecord) -> str:
    """Models, dtype, machine and libraries, in one line."""
    flags, machine = record["flags"], record["machine"]
    return (
        f"{flags['target']} and {flags['draft']}"
        + (", random weights" if flags["shapes"] else "")
        + f", {record['dtype']}; {machine['processor']}, {counted(machine['threads'], 'thread')}, {record['device']}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )


def ratio(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Median and interval of the ratios of two lists that were measured in turn."""
    return interval([a / b for a, b in zip(upper, lower)])


def longest_prefill(lines: Sequence[TimedText]) -> tuple[str, float]:
    """The row whose first token takes the largest share of its time, and that share."""
    shares = {
        method: interval([line["ttft"] / line["seconds"] for line in lines if line["method"] == method])[0]
        for method in dict.fromkeys(line["method"] for line in lines)
    }
    return max(shares.items(), key=lambda share: share[1])


def texts_of(record: BenchmarkRecord) -> dict[str, str]:
    """{row: what is known of its text}. Quantised weights are another model, whatever the tests say. Old records have
    texts of other engines alone."""
    timed = {line["method"] for line in record["speed"]}
    quantised = {peer["method"] for peer in record["peers"] if peer["quantised"]}
    lines: dict[str, Any] = {peer["method"]: peer for peer in record.get("peers", ())}
    said = {}
    for row, line in record.get("texts", lines).items():
        said[row] = "another model" if row in quantised else verdict(line["lossless"])
        if line["failed"]:
            said[row] = f"{'wrong' if row in timed else 'left out'}: {line['failed']}"
    return said


def best_plain(record: BenchmarkRecord) -> str:
    """This project's best plain decoding: compiled, if it was."""
    return f"plain, {variants_of(record['forwards'])[-1]}"


def notes_of_rows(record: BenchmarkRecord) -> Iterator[str]:
    """What is to be known of the rows without a KV cache, and of the library's."""
    guessed = guessed_without_cache(bool(record["flags"]["shapes"]))
    ratio_of_two = span(speedup(record["speed"], guessed, "plain, no cache"))
    if not isnan(ratio_of_two.value):
        yield (
            "no cache: without a KV cache, as in the course report's code: each forward reads the whole text. There "
            f"{guessed.split(',')[0]} decoding is {ratio_of_two} times as fast as plain."
        )
    for row, seconds in record.get("library_compile_seconds", {}).items():
        yield f"{row}: generate was asked to compile its forward, which took {seconds:.0f} s."
    if record["device"] == "cpu":
        yield "On a CPU, generate compiles nothing unless it is asked to: the other rows of transformers are eager."


def speed_table(record: BenchmarkRecord) -> Table:
    """One row for each sampler."""
    flags, lines, texts = record["flags"], record["speed"], texts_of(record)
    divisor = best_plain(record)
    columns = ["", "tokens/s", "of " + divisor.replace(" ", "\n"), "of\ngenerate", "TTFT\nms", "TPOT\nms", "alpha"]
    columns += ["tokens/\nround", "difference"] if texts else ["tokens/\nround"]
    of_library = {row["method"]: row["speedup"] for row in summarize(lines, "transformers")}
    rows: list[list[Cell]] = []
    for row in summarize(lines, divisor):
        guesses = row["acceptance_by_position"]
        cells: list[Cell] = [row["method"], *map(span, (row["throughput"], row["speedup"], of_library[row["method"]]))]
        cells += [span(row["ttft"], 1e3), span(row["tpot"], 1e3)]
        cells += [f"{row['alpha']:.3f}", median(row["tokens_per_round"])] if guesses else ["", ""]
        cells += [texts.get(row["method"], "").split(":")[0]] if texts else []
        rows.append(cells)
    for row_name, words in texts.items():
        if words.startswith("left out"):
            rows.append([row_name, *[""] * (len(columns) - 2), "left out"])
    title = (
        f"Tokens per second: {counted(flags['prompts'], 'prompt')} of {PROMPT} tokens, maxLen {flags['maxLen']}, "
        f"{gammas(record)}, temperature {SAMPLING.temperature}, top_p {SAMPLING.top_p}"
    )
    return Table(title, columns, rows)


def gammas(record: BenchmarkRecord) -> str:
    """gamma, and that of the target's own copy, if it guesses."""
    flags = record["flags"]
    return f"gamma {flags['gamma']}" + (f" (own copy: {flags['gammaCopy']})" if copy_lines(record) else "")


def variants_of(lines: Sequence[StepLine]) -> list[str]:
    """ "eager", and "compiled" if it was measured."""
    return list(dict.fromkeys(line["variant"] for line in lines))


def predict(record: BenchmarkRecord) -> list[Prediction]:
    """Measured and predicted speed-ups, one line for each variant and alpha."""
    seconds = part_seconds(record)
    lines: list[Prediction] = []
    for variant in variants_of(record["parts"]):
        step = seconds[variant, "plain step"]
        c, scoring = (ratio(seconds[variant, part], step)[0] for part in ("draft step", "scoring"))
        kind, alphas, prefix = variant.removesuffix(OWN_COPY), ALPHAS, ""
        if kind != variant:
            alphas, prefix = COPY_ALPHAS, f"{copy_name(record['flags']['draftBits'])}, "
        for alpha in alphas:
            lines.append(
                {
                    "variant": variant,
                    "alpha": alpha,
                    "c": c,
                    "scoring": scoring,
                    "theory": theory.improvement(alpha, gamma_of(record, variant), c, scoring),
                    "measured": speedup(record["speed"], f"{prefix}synthetic {alpha}, {kind}", f"plain, {kind}"),
                }
            )
    return lines


def gamma_of(record: BenchmarkRecord, variant: str) -> int:
    """The guesses in a round of a variant."""
    return record["flags"]["gammaCopy" if variant.endswith(OWN_COPY) else "gamma"]


def part_seconds(record: BenchmarkRecord) -> dict[tuple[str, str], list[float]]:
    """{(variant, part of a round): seconds}."""
    return {(line["variant"], line["part"]): line["seconds"] for line in record["parts"]}


def synthetic_table(record: BenchmarkRecord) -> Table:
    """One row for each variant and alpha."""
    rows: list[list[Cell]] = [
        [
            line["variant"],
            str(line["alpha"]),
            span(line["measured"]),
            f"{line['theory']:.2f}",
            f"{line['c']:.3f}",
            f"{line['scoring']:.2f}",
        ]
        for line in predict(record)
    ]
    columns = ["", "alpha", "measured", "theory", "c", "scoring"]
    return Table("Synthetic acceptance: speed-up over plain decoding of the same kind", columns, rows)


def by_variant(variants: Sequence[str], *figures: str) -> list[str]:
    """The columns of figures that stand in the table once for each variant."""
    return [f"{variant}\n{figure}" for variant in variants for figure in figures]


def forwards_table(record: BenchmarkRecord) -> Table:
    """One row for each model and number of tokens."""
    lines = {(line["role"], line["variant"], line["tokens"]): line for line in record["forwards"]}
    variants = variants_of(record["forwards"])
    rows: list[list[Cell]] = []
    for role in ("target", "draft"):
        for n in sorted({tokens for named, _, tokens in lines if named == role}):
            row: list[Cell] = [role, str(n), f"{lines[role, variants[0], n]['bytes'] / 1e6:,.0f}"]
            for variant in variants:
                line, one = lines[role, variant, n], lines[role, variant, 1]
                of_one = ratio(line["seconds"], one["seconds"])[0]
                row += [span(interval(line["seconds"]), 1e3), f"{of_one:.2f}", span(interval(line["share"]), 100)]
            rows.append(row)
    columns = ["", "tokens", "MB", *by_variant(variants, "ms", "of one", "% limit")]
    return Table("Forwards beside the time to read as many bytes", columns, rows)


def copy_lines(record: BenchmarkRecord) -> list[ForwardLine]:
    """The forwards of the target's own copy, in the order of their tokens; none in an older record."""
    return sorted((line for line in record["forwards"] if line["role"] == "copy"), key=lambda line: line["tokens"])


def copy_table(record: BenchmarkRecord) -> Table:
    """One row for each number of tokens."""
    lines = copy_lines(record)
    rows: list[list[Cell]] = []
    for line in lines:
        (plain_step,) = (
            other["seconds"]
            for other in record["forwards"]
            if (other["role"], other["variant"], other["tokens"]) == ("target", line["variant"], 1)
        )
        of_plain, of_one = (ratio(line["seconds"], other) for other in (plain_step, lines[0]["seconds"]))
        row: list[Cell] = [str(line["tokens"]), f"{line['bytes'] / 1e6:,.0f}", span(interval(line["seconds"]), 1e3)]
        rows.append([*row, span(of_plain), f"{of_one.middle:.2f}", span(interval(line["share"]), 100)])
    columns = ["tokens", "MB", "ms", "of the\ntarget's one", "of one", "% limit"]
    return Table(f"Forwards of the target's own copy in {record['flags']['draftBits']} bits", columns, rows)


def bandwidths(record: BenchmarkRecord) -> str:
    """What reading alone achieved."""
    speeds = {
        name: f"{interval(turns)[0] / 1e9:.1f} (best {max(turns) / 1e9:.1f})"
        for name, turns in record["bandwidth"].items()
    }
    copy = f"{speeds['copy']} for its copy's, " if "copy" in speeds else ""
    return (
        f"GB/s read: {speeds['target']} for as many bytes as the target's weights, {copy}{speeds['draft']} for the "
        f"draft's, {speeds['memory']} for a buffer of {LARGE >> 20} MB. The limit of a forward is the fastest that as "
        "many bytes, or more, were read in any turn, by reading alone or by a forward. A small model's weights may "
        "stay in the processor's cache, so reading fewer bytes does not count."
    )


def prefill_table(record: BenchmarkRecord) -> Table:
    """One row for each length of the prompt."""
    took = {(line["variant"], line["tokens"]): interval(line["seconds"]) for line in record["prefill"]}
    variants = variants_of(record["prefill"])
    rows: list[list[Cell]] = []
    for n in sorted({tokens for _, tokens in took}):
        cells = [(span(took[variant, n], 1e3), median(took[variant, n], 1e3 / n)) for variant in variants]
        rows.append([str(n), *chain(*cells)])
    columns = ["prompt", *by_variant(variants, "ms", "ms a token")]
    return Table("Time to the first token after a prompt of so many tokens", columns, rows)


def growth_table(record: BenchmarkRecord) -> Table:
    """One row for each context."""
    seconds = {(line["variant"], line["context"]): line["seconds"] for line in record["growth"]}
    contexts = sorted({context for _, context in seconds})
    variants = variants_of(record["growth"])
    rows: list[list[Cell]] = []
    for n in contexts:
        pairs = [(seconds[variant, n], seconds[variant, contexts[0]]) for variant in variants]
        rows.append([str(n), *chain(*((span(interval(took), 1e3), span(ratio(took, first))) for took, first in pairs))])
    columns = ["context", *by_variant(variants, "ms", "of the first")]
    return Table("A token of the target after a context of so many tokens", columns, rows)


def round_table(record: BenchmarkRecord) -> Table:
    """One row for each variant."""
    seconds = part_seconds(record)
    parts = ("draft step", "scoring", "round", "sampling")
    rows: list[list[Cell]] = []
    for variant in variants_of(record["parts"]):
        share = ratio(seconds[variant, "sampling"], seconds[variant, "round"])
        rows.append([variant, *(span(interval(seconds[variant, part]), 1e3) for part in parts), span(share, 100)])
    columns = ["", *(f"{part}\nms" for part in parts), "share of\nround, %"]
    title = "A round in which all guesses are accepted, and its filters, draws and verification (sampling)"
    return Table(title, columns, rows)
