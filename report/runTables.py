"""The tables of the speed that a run measured: by method, by category, over gamma beside theory, and over batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from experiments.acceptance import expectations
from experiments.categories import by_category, categories
from experiments.intervals import Interval, Range, speedup, summarize
from experiments.lines import CostsLine, EngineLine, Line, OverlapLine, QueueLine, RunLine, SpeedLine, of_kind
from experiments.sweep import predict, predict_batches
from inputs.commandLine import counted
from report.sources import SPEED_UP
from report.stepTables import said_of
from report.tables import Cell, Measured, Table, median, name_of, notation, plain, span, table_of

Timed = Sequence[SpeedLine] | Sequence[QueueLine]
Summary = dict[str, Any]  # the figures of one method, a row of `intervals.summarize`
Prediction = dict[str, Any]  # what `sweep.predict` returns

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
    "acceptance": None,
    "compile": False,
    "batch": 1,
}
# The legend of the tables of speed: {title of a column: its entry}.
LEGEND = {
    "TTFT ms": "TTFT: time to the first token",
    "TPOT ms": "TPOT: time for each token after it",
    "tokens/s": "tokens/s: throughput, prefill included",
    "s a text": "s a text: seconds for a text",
    "speed-up": "speed-up: median of paired throughput ratios to the target alone",
    "alpha": "alpha: share of the tested guesses that were accepted",
    "gamma": "gamma: guesses in a round",
    "tokens/round": "tokens/round: tokens for one forward of the target",
    "rounds": "rounds, drafted, kept: forwards after prefill, guesses, and accepted guesses of a text, means",
    "total/n ms": "total/n: the course report's time per token",
    "alpha by position": "alpha by position: the share at position 1, 2, ... of a round, where it was tested",
    "Spec-Bench's": "Spec-Bench's: the speed-up as Spec-Bench defines it, the ratio of two mean speeds over questions",
}
BATCH_NOTES = (
    "batch: texts that are decoded at a time. A cell is a queue of texts, prefill included: medians over repeats. "
    "plain tokens/s: throughput of plain decoding. gamma: guesses in a round. costAware: the rule chooses gamma "
    "itself, for each row of the batch. its share of the best: of the fastest cell beside it, plain decoding included."
)
POSITIONS = 4  # of a round, whose acceptance a table by category shows
OVERLAPS = (
    "expected: tokens a round that follow from the mean sum of min(p, q) at each position of a round; of expected: "
    "tokens a round over these."
)
OF_TREES = " In a tree, the sum is that of first siblings, and later ones add what they accept after the earlier ones."
TREES = "tree", "topDown"
ALONE = "draft", "mid", "target", "noCache"  # methods without guesses


def swept(lines: Iterable[Line], cost: CostsLine) -> list[SpeedLine]:
    """The timed texts of `--sweep` at the temperature and prompt length of `cost`."""
    return [
        line
        for line in of_kind(lines, SpeedLine)
        if line["mode"] == "sweep"
        and line["temperature"] == cost["temperature"]
        and line["promptLen"] == cost["promptLen"]
    ]


def conditions(run: RunLine, lines: Sequence[SpeedLine]) -> str:
    """How many prompts were timed, the flags that matter for the times, and the dtype."""
    first: Mapping[str, Any] = lines[0]
    flags = run["flags"]
    values = {name: first.get(name, flags.get(name, default)) for name, default in SHOWN.items()}
    ran = {role: model["compiled"] for role, model in run["models"].items() if "compiled" in model}
    if values["compile"] and ran and not all(ran.values()):  # The dtype that ran, not the flag's.
        eager = ", ".join(role for role, is_compiled in ran.items() if not is_compiled)
        values["compile"] = (
            f"but for {eager}, which stayed eager" if any(ran.values()) else "requested, but all stayed eager"
        )
    shown = "".join(f"{name} {value}, " for name, value in values.items() if value not in (SHOWN[name], None))
    prompts = counted(len({line["prompt"] for line in lines}), "prompt")
    return f"{prompts} of {prompt_lengths(lines)} tokens, {shown}{first['dtype']}"


def prompt_lengths(lines: Sequence[SpeedLine]) -> str:
    """How many tokens the prompts have: "64", or "12 to 64"."""
    lengths = {line["prompt_tokens"] for line in lines}
    return " to ".join(str(length) for length in sorted({min(lengths), max(lengths)}))


def speed_tables(
    run: RunLine,
    lines: Sequence[SpeedLine],
    overlaps: Sequence[OverlapLine] = (),
    queues: Sequence[QueueLine] = (),
    engines: Sequence[EngineLine] = (),
) -> Iterator[RenderableType]:
    """The methods of one mode and one prompt length, and how acceptance depends on the position. queues: of the
    texts. engines: what is known of the methods of other programs."""
    rows, timed = summarize(lines, queues=queues), queues or lines
    rows = ranked(rows) if lines[0]["mode"] == "compare" else rows
    yield speed_table(run, lines, rows, engines)
    if categories(lines):
        yield category_table(lines)
        if queues:
            yield Text("By category, the speed-up is that of single texts, from their rows of the batch.")
    yield from map(Text, trees_beside_chains(timed, rows))
    yield from map(Text, gain_without_cache(timed))
    if overlaps:
        yield theory_table(rows, {line["method"]: line for line in overlaps})
        note = "sum of min(p, q): the mean over contexts visited; so often one guess is accepted. " + OVERLAPS
        yield Text(note + (OF_TREES if any(line["method"] in TREES for line in overlaps) else ""))
    for row in rows:
        if row["method"] == "speculative" and row["acceptance_by_position"]:
            rates = ", ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
            yield Text(f"Acceptance by position in the round: {rates}.")


def ranked(rows: Iterable[Summary]) -> list[Summary]:
    """Plain decoding first, then the methods with guesses, from the greatest speed-up to the least."""

    def rank(row: Summary) -> tuple[bool, float]:
        alone, ratio = row["method"] in ALONE, row["speedup"][0]
        return not alone, 0.0 if alone or ratio != ratio else -ratio

    return sorted(rows, key=rank)


def speed_table(
    run: RunLine, lines: Sequence[SpeedLine], rows: Iterable[Summary], engines: Sequence[EngineLine] = ()
) -> Table:
    """One row for each method. `--speed` adds the course report's time per token; the other modes add counts of
    guesses, and have no room for every interval."""
    of_report = lines[0]["mode"] == "speed"
    brief = span if of_report else median

    def guesses(row: Summary) -> bool:
        return row["method"] not in ALONE and bool(row["acceptance_by_position"])

    columns: dict[str, Callable[[Summary], Cell]] = {
        "": lambda row: name_of(row["method"]),
        "TTFT\nms": lambda row: brief(row["ttft"], 1e3),
        "TPOT\nms": lambda row: brief(row["tpot"], 1e3),
        "tokens/s": lambda row: span(row["throughput"]),
        "speed-up": lambda row: span(row["speedup"]),
        "alpha": lambda row: f"{row['alpha']:.3f}" if guesses(row) else "",
        "tokens/\nround": lambda row: median(row["tokens_per_round"]) if guesses(row) else "",
    }
    if of_report:
        columns["total/n\nms"] = lambda row: median(row["report_tpot"], 1e3)
    elif engines:
        texts = {line["method"]: said_of(line).split(":")[0] for line in engines}
        columns["sampled\ntext"] = lambda row: texts.get(row["method"], "")
    else:
        columns["rounds"] = lambda row: f"{row['rounds']:,.0f}"
        columns["drafted"] = lambda row: f"{row['drafted']:,.0f}"
        columns["kept"] = lambda row: f"{row['accepted']:,.0f}"
    return table_of("Speed: " + conditions(run, lines), columns, rows)


def category_table(lines: Sequence[SpeedLine]) -> Table:
    """One row for each category and method, and at last the methods on all prompts."""
    columns: dict[str, Callable[[Summary], Cell]] = {
        "": lambda row: name_of(row["method"]),
        "TPOT\nms": lambda row: median(row["tpot"], 1e3),
        "tokens/\nround": lambda row: median(row["tokens_per_round"]) if row["acceptance_by_position"] else "",
        "alpha by\nposition": lambda row: " ".join(f"{r:.2f}" for r in row["acceptance_by_position"][:POSITIONS]),
        "speed-up": lambda row: span(row["speedup"]),
        "Spec-Bench's": lambda row: span(row["specBench"]),
    }
    table = Table("Speed by category", ["category", *columns], left=(1, 4))
    for category, rows in by_category(lines).items():
        for first, row in zip(itertools.chain([category], itertools.repeat("")), ranked(rows)):
            table.add(plain(first), *(cell(row) for cell in columns.values()))
    return table


def trees_beside_chains(lines: Timed, rows: Sequence[Summary]) -> Iterator[str]:
    """A sentence for each method that guesses trees: its speed over that of the method with the greatest speed-up among
    those that guess chains."""
    speed = {row["method"]: row["speedup"][0] for row in rows if row["method"] not in (*TREES, *ALONE)}
    for tree in [row["method"] for row in rows if row["method"] in TREES] if speed else []:
        fastest = max(speed, key=speed.__getitem__)
        ratio = with_ends(speedup(lines, tree, fastest))
        yield f"{name_of(tree)} over {name_of(fastest)}, the fastest of the others: {ratio}, paired."


def gain_without_cache(lines: Timed) -> Iterator[str]:
    """A sentence with the figure that the course report gives: speculative over plain, both without a KV cache."""
    ratio = speedup(lines, "speculativeNoCache", "noCache")
    if not isnan(ratio.middle):
        yield (
            "Both without a KV cache, as in the course report's code, speculative over plain: "
            f"{with_ends(ratio)} (paired)."
        )


def with_ends(figures: Interval) -> str:
    """A median, and its interval or range."""
    ratio, low, high = figures
    return f"{ratio:.3f} " + (f"({low:.3f}–{high:.3f})" if isinstance(figures, Range) else f"[{low:.3f}, {high:.3f}]")


def theory_table(rows: Iterable[Summary], overlaps: Mapping[str, OverlapLine]) -> Table:
    """Tokens a round beside those expected. overlaps: {method: its line}."""
    table = Table("Beside theory", ["", "sum of min(p, q)", "tokens/round", "expected", "of expected"])
    for row in rows:
        if line := overlaps.get(row["method"]):
            overlap, tokens, wanted = beside_theory(row, line)
            counts = (f"{figure:.2f}" for figure in (tokens, wanted, tokens / wanted))
            table.add(name_of(row["method"]), f"{overlap:.3f}", *counts)
    return table


def beside_theory(row: Summary, line: OverlapLine) -> tuple[float, float, float]:
    """The mean sum of min(p, q) of a method, its tokens a round, and those expected.

    The tokens are counted in the texts in which overlaps were measured: a method that depends on measured times has
    other shapes and lengths in other texts. Old lines do not count them.
    """
    theory = expectations(line["overlap_by_position"])
    tokens = 1 + line["accepted"] / line["rounds"] if line.get("rounds") else tokens_a_round(row)
    return theory["overlap"], tokens, theory["tokens"]


def tokens_a_round(row: Summary) -> float:
    """The mean over all rounds of a method; the column "tokens/round" is the median of texts."""
    return 1 + float(row["accepted"] / row["rounds"]) if row["rounds"] else float("nan")


def legend(tables: Iterable[Table]) -> str:
    """The legend of the columns of these tables."""
    titles = dict.fromkeys(title for table in tables for title in table.titles())
    return "; ".join(LEGEND[title] for title in titles if title in LEGEND)


def speed_notes(lines: Sequence[SpeedLine], tables: Sequence[Table], pythia: bool) -> str:
    """The text under the tables of speed. pythia: the models are those of the course report."""
    repeats = len({line["repeat"] for line in lines})
    times = "repeat" if repeats == 1 else "interleaved repeats"
    batch = (
        "tokens/s and speed-up are of all prompts together, decoded as a queue; the other columns are of single texts. "
        "TTFT: from the moment a text gets its row of the batch. "
        if any("batch" in line for line in lines)
        else ""
    )
    return f"Medians over prompts and {repeats} {times}{notation(*tables)}. {batch}{legend(tables)}." + (
        f"\nThe report's speed-up, without a KV cache: {SPEED_UP.typical}, at best {SPEED_UP.best}." if pythia else ""
    )


def sweep_tables(run: RunLine, lines: Sequence[Line], costs: Iterable[CostsLine]) -> Iterator[Table]:
    """For each temperature: speed over gamma, and the alpha and the costs used by theory."""
    for cost in costs:
        timed = swept(lines, cost)
        if "target" not in {line["method"] for line in timed}:  # The run was stopped before it.
            continue
        prediction = predict(timed, cost)
        yield replace(sweep_table(run, timed, prediction), notes=sweep_notes(cost, prediction))


def sweep_table(run: RunLine, lines: Sequence[SpeedLine], prediction: Prediction) -> Table:
    """One row for plain decoding, and one for each gamma."""
    columns: dict[str, Callable[[Summary], Cell]] = {
        "gamma": lambda row: str(row["gamma"]),
        "s a\ntext": lambda row: median(row["seconds"]),
        "tokens/s": lambda row: span(row["throughput"]),
        "speed-up": lambda row: span(row["speedup"]),
        "theory": lambda row: Measured(row["theory"], digits=2),
        "measured\n/ theory": lambda row: Measured(row["speedup"][0] / row["theory"], digits=2),
        "the\npaper's": lambda row: Measured(row["paper"], digits=2),
        "alpha": lambda row: Measured(row["alpha"], digits=3),
        "tokens/\nround": lambda row: Measured(row["tokens_per_round"][0], digits=2),
    }
    if any(row["expected"] == row["expected"] for row in prediction["rows"]):  # The overlaps were measured.
        columns["of\nexpected"] = lambda row: Measured(tokens_a_round(row) / row["expected"], digits=2)
    table, target = Table("Speed over gamma: " + conditions(run, lines), list(columns)), prediction["plain"]
    table.add("plain", median(target["seconds"]), span(target["throughput"]), "1")
    for row in prediction["rows"]:
        table.add(*(cell(row) for cell in columns.values()))
    return table


def batch_table(lines: Sequence[Line]) -> Table:
    """The map of `--sweep batch`: a row for each batch."""
    rows, first = predict_batches(lines), of_kind(lines, QueueLine)[0]
    gammas = dict.fromkeys(row["gamma"] for prediction in rows.values() for row in prediction["rows"])
    title = (
        f"Speed-up over plain decoding of the same batch: queues of texts of {first['maxLen']} tokens after prompts of "
        f"{first['promptLen']}, temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}"
    )
    fixed = [gamma for gamma in gammas if gamma != "costAware"]
    titles = [
        "batch",
        "plain\ntokens/s",
        *(f"gamma\n{gamma}" for gamma in fixed),
        "costAware",
        "its share\nof the best",
    ]
    table = Table(title, titles, notes=BATCH_NOTES)
    for batch, prediction in rows.items():
        cell: dict[Any, Cell] = {row["gamma"]: Measured(row["speedup"][0], digits=2) for row in prediction["rows"]}
        chosen = [cell.get(gamma, "") for gamma in (*fixed, "costAware")]
        table.add(str(batch), median(prediction["plain"]), *chosen, span(prediction["controller"]))
    return table


def sweep_notes(cost: CostsLine, prediction: Prediction) -> str:
    """The text under a table of speed over gamma."""
    scoring = ", ".join(f"{v:.2f}" for v in cost["scoring"])
    shown = "-" if cost["alpha"] is None else f"{cost['alpha']:.3f}"
    return (
        f"alpha: {prediction['alpha']:.3f} by counting, {shown} as the mean of the sum of min(p, q). c: "
        f"{prediction['c']:.3f}. Scoring 1, 2, 3 ... tokens costs {scoring} times as much as one. theory: expected "
        "tokens per round / (gamma c + the cost of scoring gamma + 1 tokens), where c is the time of a draft step over "
        "that of a plain step. the paper's: the same with a cost of 1; "
        f"by it, gamma {prediction['best']} is best." + (" " + OVERLAPS if cost.get("overlap_by_position") else "")
    )
