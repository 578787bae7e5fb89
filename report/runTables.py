"""Tables of speed: the methods of one mode, and speculative sampling over gamma beside theory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from experiments.acceptance import expected
from experiments.speed import interval, paired_ratios, summarize
from experiments.sweep import predict
from report.lines import Line, mode_of, swept
from report.tableFormat import grid, median, name_of, span

# Flags named above a table of speeds, each with the value at which it is not mentioned.
SHOWN = {
    "maxLen": None,
    "gamma": None,
    "draftLength": "fixed",
    "verification": "token",
    "draftVocab": None,
    "temperature": None,
    "top_p": 1,
    "top_k": 0,
    "repetition_penalty": 1,
    "compile": False,
}
COLUMNS = ["", "TTFT\nms", "TPOT\nms", "tokens/s", "speed-up", "alpha", "tokens/\nround"]
SWEEP_COLUMNS = [
    "gamma",
    "s a text",
    "tokens/s",
    "speed-up",
    "theory",
    "measured/\ntheory",
    "the paper's",
    "alpha",
    "tokens/\nround",
]
OF_EXPECTED = "of ex-\npected"  # A column where the overlaps of p and q were measured.
THEORY_COLUMNS = ["", "sum of min(p, q)", "tokens/round", "expected", "of expected"]
OVERLAPS = (
    "of expected: tokens a round, over those that follow from the mean sum of min(p, q) at each position of a round."
)
OF_TREES = " In a tree, the sum is that of first siblings, and later ones add what they accept after the earlier ones."
TREES = "tree", "topDown"
REPORTED_SPEEDUP = "1.8 - 2.5"  # what the course report prints for Pythia-70m and Pythia-2.8b, without a KV cache


def conditions(run: Line, lines: Sequence[Line]) -> str:
    """How many prompts were timed, the flags that matter for the times, and the dtype."""
    first, flags = lines[0], run["flags"]
    low, high = (f(line["prompt_tokens"] for line in lines) for f in (min, max))
    values = {name: first.get(name, flags.get(name, off)) for name, off in SHOWN.items()}
    shown = "".join(f"{name} {value}, " for name, value in values.items() if value not in (SHOWN[name], None))
    tokens = low if low == high else f"{low} to {high}"
    return f"{len({line['prompt'] for line in lines})} prompts of {tokens} tokens, {shown}{first['dtype']}"


def speed_tables(run: Line, lines: Sequence[Line], overlaps: Sequence[Line] = ()) -> Iterator[RenderableType]:
    """The methods of one mode and one prompt length, and how acceptance depends on the position. overlaps: their lines
    of kind "overlap"."""
    rows = summarize(lines)
    yield speed_table(run, lines, rows)
    yield from map(Text, trees_beside_chains(lines, rows))
    if overlaps:
        yield theory_table(rows, {line["method"]: line for line in overlaps})
        note = "sum of min(p, q): the mean over contexts visited; so often one guess is accepted. " + OVERLAPS
        yield Text(note + OF_TREES * any(line["method"] in TREES for line in overlaps))
    for row in rows:
        if row["method"] == "speculative" and row["acceptance_by_position"]:
            rates = ", ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
            yield Text(f"Acceptance by position in the round: {rates}.")


def speed_table(run: Line, lines: Sequence[Line], rows: Iterable[Line]) -> Table:
    """One row for each method. `--speed` adds the course report's time per token; the other modes add counts of
    guesses, and have no room for every interval."""
    of_report = mode_of(lines[0]) == "speed"
    more = ["total/n\nms"] if of_report else ["rounds", "drafted", "kept"]
    table = grid("Speed: " + conditions(run, lines), [*COLUMNS, *more])
    brief = span if of_report else median
    for row in rows:
        guesses = row["method"] not in ("draft", "mid", "target") and row["acceptance_by_position"]
        counts = [f"{row[name]:,.0f}" for name in ("rounds", "drafted", "accepted")]
        table.add_row(
            name_of(row["method"]),
            brief(row["ttft"], 1e3),
            brief(row["tpot"], 1e3),
            span(row["throughput"]),
            span(row["speedup"]),
            f"{row['alpha']:.3f}" if guesses else "",
            brief(row["tokens_per_round"]) if guesses else "",
            *([median(row["report_tpot"], 1e3)] if of_report else counts),
        )
    return table


def trees_beside_chains(lines: Sequence[Line], rows: Sequence[Line]) -> Iterator[str]:
    """A sentence for each method that guesses trees: its speed over that of the fastest method that guesses chains."""
    alone = "draft", "mid", "target"
    speed = {row["method"]: row["throughput"][0] for row in rows if row["method"] not in (*TREES, *alone)}
    for tree in [row["method"] for row in rows if row["method"] in TREES] if speed else []:
        fastest = max(speed, key=speed.__getitem__)
        ratio, low, high = interval(paired_ratios(lines, tree, fastest))
        names = f"{name_of(tree)} over {name_of(fastest)}"
        yield f"{names}, the fastest of the others: {ratio:.3f} [{low:.3f}, {high:.3f}] (paired)."


def theory_table(rows: Iterable[Line], overlaps: Mapping[str, Line]) -> Table:
    """Tokens a round beside those expected. rows: of `summarize`. overlaps: {method: its line of kind "overlap"}."""
    table = grid("Beside theory", THEORY_COLUMNS)
    for row in rows:
        if line := overlaps.get(row["method"]):
            overlap, tokens, wanted = beside_theory(row, line)
            table.add_row(
                name_of(row["method"]), f"{overlap:.3f}", f"{tokens:.2f}", f"{wanted:.2f}", f"{tokens / wanted:.2f}"
            )
    return table


def beside_theory(row: Line, line: Line) -> tuple[float, float, float]:
    """The mean sum of min(p, q), the tokens a round, and those expected. row: of `summarize`. line: of kind "overlap".

    The tokens are counted in the texts in which overlaps were measured: the shapes and lengths of a method that follows
    the clock differ in other texts. Old lines do not count them.
    """
    found = expected(line["overlap_by_position"])
    tokens = 1 + line["accepted"] / line["rounds"] if line.get("rounds") else tokens_a_round(row)
    return found["overlap"], tokens, found["tokens"]


def tokens_a_round(row: Line) -> float:
    """The mean over all rounds, of a row of `summarize`; the column "tokens/round" is the median of texts."""
    return 1 + float(row["accepted"] / row["rounds"]) if row["rounds"] else float("nan")


def speed_notes(lines: Sequence[Line], pythia: bool) -> str:
    """The text under the tables of speed. pythia: the models are those of the course report."""
    repeats = len({line["repeat"] for line in lines})
    return (
        f"Medians over prompts and {repeats} interleaved repeats [95 % bootstrap interval]; speed-up: median of "
        "paired throughput ratios to the target alone."
        + (" total/n: the report's time per token." if any(line.get("mode") == "speed" for line in lines) else "")
        + (f"\nThe report measured a speed-up of {REPORTED_SPEEDUP} (without a KV cache)." if pythia else "")
    )


def sweep_tables(run: Line, lines: Sequence[Line], costs: Iterable[Line]) -> Iterator[RenderableType]:
    """For each temperature: speed over gamma, and the alpha and the costs that theory was given."""
    for cost in costs:
        chosen = swept(lines, cost)
        if "target" not in {line["method"] for line in chosen}:  # The run was stopped before it.
            continue
        found = predict(chosen, cost)
        yield sweep_table(run, chosen, found)
        yield Text(sweep_notes(cost, found))


def sweep_table(run: Line, lines: Sequence[Line], found: Line) -> Table:
    """One row for each gamma. found: what `sweep.predict` returns."""
    known = any(row["expected"] == row["expected"] for row in found["rows"])
    columns = [*SWEEP_COLUMNS, *[OF_EXPECTED] * known]
    table = grid("Speed over gamma: " + conditions(run, lines), columns)
    target = found["plain"]
    table.add_row("plain", span(target["seconds"]), span(target["throughput"]), "1", *[""] * (len(columns) - 4))
    for row in found["rows"]:
        table.add_row(
            str(row["gamma"]),
            span(row["seconds"]),
            span(row["throughput"]),
            span(row["speedup"]),
            f"{row['theory']:.2f}",
            f"{row['speedup'][0] / row['theory']:.2f}",
            f"{row['paper']:.2f}",
            f"{row['alpha']:.3f}",
            f"{row['tokens_per_round'][0]:.2f}",
            *[f"{tokens_a_round(row) / row['expected']:.2f}"] * known,
        )
    return table


def sweep_notes(cost: Line, found: Line) -> str:
    """The text under a table of speed over gamma."""
    scoring = ", ".join(f"{v:.2f}" for v in cost["scoring"])
    overlap = float("nan") if cost["alpha"] is None else cost["alpha"]
    return (
        f"alpha: {found['alpha']:.3f} by counting, {overlap:.3f} as the mean of the sum of min(p, q). c: "
        f"{found['c']:.3f}. Scoring 1, 2, 3 ... tokens costs {scoring} times as much as one. theory: expected tokens "
        "per round / (gamma c + the cost of scoring gamma + 1 tokens). the paper's: the same with a cost of 1; by it, "
        f"gamma {found['best']} is best." + (" " + OVERLAPS if cost.get("overlap_by_position") else "")
    )
