"""`tables`: what the benchmark prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmark.engines.textCheck import verdict
from benchmark.peers import SAMPLING
from benchmark.samplers import ALPHAS
from benchmark.stepTimes import LARGE, PROMPT
from experiments import theory
from experiments.speed import Interval, interval, paired_ratios, summarize
from inputs.files import gigabytes
from report.tables import grid, plain, span

Record = dict[str, Any]  # as benchmark.json holds it

SPEED_COLUMNS = [
    "",
    "tokens/s",
    "of plain,\neager",
    "of trans-\nformers",
    "TTFT\nms",
    "TPOT\nms",
    "alpha",
    "tokens/\nround",
]


def tables(record: Record) -> Iterator[RenderableType]:
    """Everything that is printed."""
    yield plain(heading(record))
    yield speed_table(record)
    method, share = longest_prefill(record["speed"])
    yield Text(
        "TTFT: time to the first token. TPOT: time for each token after it. The first token took at most "
        f"{100 * share:.1f} % of a row's time ({method})."
    )
    if record["peers"]:
        yield Text(
            "text: whether an engine's sampled text is distributed as the target's own, by the tests of test.py "
            "--lossless, and which of them told."
        )
        yield from (Text(f"{method}: {words}") for method, words in texts_of(record).items() if " " in words)
    if record["flags"]["shapes"]:
        yield synthetic_table(record)
        yield Text(
            "synthetic: each guess is accepted with probability alpha, by a coin. c: the time of a draft step. "
            f"scoring: the time to score {record['flags']['gamma'] + 1} tokens at once. Both in units of a plain step, "
            "sampling included."
        )
    yield forwards_table(record)
    yield Text(bandwidths(record))
    yield prefill_table(record)
    yield growth_table(record)
    yield round_table(record)
    peak = gigabytes(record["peak_memory"])
    yield Text(f"Medians [95 % bootstrap interval], all measured in turn. Peak memory of the process: {peak}.")


def heading(record: Record) -> str:
    """Models, dtype, machine and libraries, in one line."""
    flags, machine = record["flags"], record["machine"]
    return (
        f"{flags['target']} and {flags['draft']}"
        + (", random weights" if flags["shapes"] else "")
        + f", {record['dtype']}; {machine['processor']}, {machine['threads']} threads, {record['device']}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )


def ratio(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Median and interval of the ratios of two lists that were measured in turn."""
    return interval([a / b for a, b in zip(upper, lower)])


def cell(figures: Interval, scale: float = 1.0) -> str:
    """`span`, or nothing if there is no figure."""
    return span(figures, scale) if figures[0] == figures[0] else ""


def longest_prefill(lines: Sequence[dict[str, Any]]) -> tuple[str, float]:
    """The row whose first token takes the largest share of its time, and that share."""
    shares = {
        method: interval([m["ttft"] / m["seconds"] for m in lines if m["method"] == method])[0]
        for method in dict.fromkeys(m["method"] for m in lines)
    }
    return max(shares.items(), key=lambda each: each[1])


def texts_of(record: Record) -> dict[str, str]:
    """{row: what is known of its text} of the other engines' rows."""
    return {
        peer["method"]: f"left out: {peer['failed']}" if peer["failed"] else verdict(peer["lossless"])
        for peer in record.get("peers", ())
    }


def speed_table(record: Record) -> Table:
    """One row for each sampler."""
    flags, lines, texts = record["flags"], record["speed"], texts_of(record)
    table = grid(
        f"Tokens per second: {flags['prompts']} prompts of {PROMPT} tokens, maxLen {flags['maxLen']}, gamma "
        f"{flags['gamma']}, temperature {SAMPLING.temperature}, top_p {SAMPLING.top_p}",
        SPEED_COLUMNS + ["text"] * bool(texts),
    )
    beside_library = {row["method"]: row["speedup"] for row in summarize(lines, "transformers")}
    for row in summarize(lines, "plain, eager"):
        guesses = row["acceptance_by_position"]
        table.add_row(
            row["method"],
            span(row["throughput"]),
            span(row["speedup"]),
            span(beside_library[row["method"]]),
            cell(row["ttft"], 1e3),
            cell(row["tpot"], 1e3),
            f"{row['alpha']:.3f}" if guesses else "",
            span(row["tokens_per_round"][:1] * 3) if guesses else "",
            *([texts.get(row["method"], "").split(":")[0]] if texts else []),
        )
    for method in (peer["method"] for peer in record["peers"] if peer["failed"]):
        table.add_row(method, *[""] * (len(SPEED_COLUMNS) - 1), "left out")
    return table


def variants_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    """ "eager", and "compiled" if it was measured."""
    return list(dict.fromkeys(line["variant"] for line in lines))


def predict(record: Record) -> list[dict[str, Any]]:
    """[{variant, alpha, c, scoring, theory, measured}]: speed-ups with synthetic acceptance, and those of theorem 3.8
    with the measured costs of drafting and scoring."""
    found, seconds = [], {(line["variant"], line["part"]): line["seconds"] for line in record["parts"]}
    for variant in variants_of(record["parts"]):
        step = seconds[variant, "plain step"]
        c, scoring = (ratio(seconds[variant, part], step)[0] for part in ("draft step", "scoring"))
        for alpha in ALPHAS:
            ratios = paired_ratios(record["speed"], f"synthetic {alpha}, {variant}", f"plain, {variant}")
            predicted = theory.improvement(alpha, record["flags"]["gamma"], c, scoring)
            found.append(
                {
                    "variant": variant,
                    "alpha": alpha,
                    "c": c,
                    "scoring": scoring,
                    "theory": predicted,
                    "measured": interval(ratios),
                }
            )
    return found


def synthetic_table(record: Record) -> Table:
    """One row for each variant and alpha."""
    table = grid(
        "Synthetic acceptance: speed-up over plain decoding of the same kind",
        ["", "alpha", "measured", "theory", "c", "scoring"],
    )
    for row in predict(record):
        table.add_row(
            row["variant"],
            str(row["alpha"]),
            span(row["measured"]),
            f"{row['theory']:.2f}",
            f"{row['c']:.3f}",
            f"{row['scoring']:.2f}",
        )
    return table


def forwards_table(record: Record) -> Table:
    """One row for each model and number of tokens."""
    lines = {(line["role"], line["variant"], line["tokens"]): line for line in record["forwards"]}
    variants = variants_of(record["forwards"])
    table = grid(
        "Forwards beside the time to read as many bytes",
        ["", "tokens", "MB", *(f"{variant}\n{what}" for variant in variants for what in ("ms", "of one", "% limit"))],
    )
    for role in ("target", "draft"):
        for n in sorted({tokens for _, _, tokens in lines}):
            cells = []
            for variant in variants:
                line = lines[role, variant, n]
                of_one = ratio(line["seconds"], lines[role, variant, 1]["seconds"])[0]
                cells += [span(interval(line["seconds"]), 1e3), f"{of_one:.2f}", span(interval(line["share"]), 100)]
            table.add_row(role, str(n), f"{lines[role, variants[0], n]['bytes'] / 1e6:,.0f}", *cells)
    return table


def bandwidths(record: Record) -> str:
    """What reading alone achieved."""
    speeds = {
        what: f"{interval(speeds)[0] / 1e9:.1f} (best {max(speeds) / 1e9:.1f})"
        for what, speeds in record["bandwidth"].items()
    }
    return (
        f"GB/s read: {speeds['target']} for as many bytes as the target's weights, {speeds['draft']} for the draft's, "
        f"{speeds['memory']} for a buffer of {LARGE >> 20} MB. A small model's weights may stay in the processor's "
        "cache, so the limit of a forward is the reading of as many bytes, in the same turn."
    )


def prefill_table(record: Record) -> Table:
    """One row for each length of the prompt."""
    variants = variants_of(record["prefill"])
    table = grid(
        "Time to the first token after a prompt of so many tokens",
        ["prompt", *(f"{variant}\n{what}" for variant in variants for what in ("ms", "ms a token"))],
    )
    seconds = {(line["variant"], line["tokens"]): line["seconds"] for line in record["prefill"]}
    for length in sorted({tokens for _, tokens in seconds}):
        cells = []
        for variant in variants:
            took = interval(seconds[variant, length])
            cells += [span(took, 1e3), span(took[:1] * 3, 1e3 / length)]
        table.add_row(str(length), *cells)
    return table


def growth_table(record: Record) -> Table:
    """One row for each context."""
    variants = variants_of(record["growth"])
    table = grid(
        "A token of the target after a context of so many tokens",
        ["context", *(f"{variant}\n{what}" for variant in variants for what in ("ms", "of the first"))],
    )
    seconds = {(line["variant"], line["context"]): line["seconds"] for line in record["growth"]}
    contexts = sorted({context for _, context in seconds})
    for context in contexts:
        cells = []
        for variant in variants:
            own = seconds[variant, context]
            cells += [span(interval(own), 1e3), span(ratio(own, seconds[variant, contexts[0]]))]
        table.add_row(str(context), *cells)
    return table


def round_table(record: Record) -> Table:
    """One row for each variant."""
    seconds = {(line["variant"], line["part"]): line["seconds"] for line in record["parts"]}
    table = grid(
        "A round in which all guesses are accepted, and its filters, draws and verification (sampling)",
        ["", "draft step\nms", "scoring\nms", "round\nms", "sampling\nms", "share of\nround, %"],
    )
    for variant in variants_of(record["parts"]):
        table.add_row(
            variant,
            *(span(interval(seconds[variant, part]), 1e3) for part in ("draft step", "scoring", "round", "sampling")),
            span(ratio(seconds[variant, "sampling"], seconds[variant, "round"]), 100),
        )
    return table
