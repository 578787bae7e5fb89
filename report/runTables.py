"""The tables of what a run measured: speed, speed over gamma beside theory, diversity, and perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from experiments.acceptance import expected
from experiments.diversity import FIGURES
from experiments.lines import (
    CorpusPerplexityLine,
    CostsLine,
    DiversityLine,
    Line,
    OverlapLine,
    RunLine,
    SpeedLine,
    TextPerplexityLine,
    of_kind,
)
from experiments.speed import interval, paired_ratios, summarize
from experiments.sweep import predict
from report.sources import ARTICLE, REPORT, REPORTED_SPEEDUP
from report.tableFormat import give_or_take, grid, median, name_of, number, plain, span, table_of

Summary = dict[str, Any]  # the figures of one method, a row of `speed.summarize`
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
    "compile": False,
}
OVERLAPS = (
    "of expected: tokens a round, over those that follow from the mean sum of min(p, q) at each position of a round."
)
OF_TREES = " In a tree, the sum is that of first siblings, and later ones add what they accept after the earlier ones."
TREES = "tree", "topDown"
ALONE = "draft", "mid", "target"  # methods without guesses
DIVERSITY_TITLES = "entropy\n1", "entropy\n2", "entropy\n3", "distinct\n1", "distinct\n2", "repeated", "perplexity"
DIVERSITY_NOTES = (
    "Means over texts, ± half of the 95 % bootstrap interval. Entropy in bits, distinct-n and repeated "
    "4-grams of prompt and text, split at white space; perplexity under the target of the text after "
    "the prompt. The article: GPT-2 large, GPT-2."
)
PERPLEXITIES = "draft", "target", "speculative", "relative\ndifference"


def mode_of(line: SpeedLine) -> str:
    """The mode of `test.py` that timed a text. The oldest records have no such field."""
    return line.get("mode", "speed")


def swept(lines: Iterable[Line], cost: CostsLine) -> list[SpeedLine]:
    """The timed texts of `--sweep` at the temperature and prompt length of `cost`."""
    return [
        line
        for line in of_kind(lines, SpeedLine)
        if mode_of(line) == "sweep"
        and line["temperature"] == cost["temperature"]
        and line["promptLen"] == cost["promptLen"]
    ]


def conditions(run: RunLine, lines: Sequence[SpeedLine]) -> str:
    """How many prompts were timed, the flags that matter for the times, and the dtype."""
    first: Mapping[str, Any] = lines[0]
    flags, lengths = run["flags"], [line["prompt_tokens"] for line in lines]
    values = {name: first.get(name, flags.get(name, default)) for name, default in SHOWN.items()}
    shown = "".join(f"{name} {value}, " for name, value in values.items() if value not in (SHOWN[name], None))
    low, high = min(lengths), max(lengths)
    tokens = low if low == high else f"{low} to {high}"
    return f"{len({line['prompt'] for line in lines})} prompts of {tokens} tokens, {shown}{first['dtype']}"


def speed_tables(
    run: RunLine, lines: Sequence[SpeedLine], overlaps: Sequence[OverlapLine] = ()
) -> Iterator[RenderableType]:
    """The methods of one mode and one prompt length, and how acceptance depends on the position."""
    rows = summarize(lines)
    yield speed_table(run, lines, rows)
    yield from map(Text, trees_beside_chains(lines, rows))
    if overlaps:
        yield theory_table(rows, {line["method"]: line for line in overlaps})
        note = "sum of min(p, q): the mean over contexts visited; so often one guess is accepted. " + OVERLAPS
        yield Text(note + (OF_TREES if any(line["method"] in TREES for line in overlaps) else ""))
    for row in rows:
        if row["method"] == "speculative" and row["acceptance_by_position"]:
            rates = ", ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
            yield Text(f"Acceptance by position in the round: {rates}.")


def speed_table(run: RunLine, lines: Sequence[SpeedLine], rows: Iterable[Summary]) -> Table:
    """One row for each method. `--speed` adds the course report's time per token; the other modes add counts of
    guesses, and have no room for every interval."""
    of_report = mode_of(lines[0]) == "speed"
    brief = span if of_report else median

    def guesses(row: Summary) -> bool:
        return row["method"] not in ALONE and bool(row["acceptance_by_position"])

    columns: dict[str, Callable[[Summary], str]] = {
        "": lambda row: name_of(row["method"]),
        "TTFT\nms": lambda row: brief(row["ttft"], 1e3),
        "TPOT\nms": lambda row: brief(row["tpot"], 1e3),
        "tokens/s": lambda row: span(row["throughput"]),
        "speed-up": lambda row: span(row["speedup"]),
        "alpha": lambda row: f"{row['alpha']:.3f}" if guesses(row) else "",
        "tokens/\nround": lambda row: brief(row["tokens_per_round"]) if guesses(row) else "",
    }
    if of_report:
        columns["total/n\nms"] = lambda row: median(row["report_tpot"], 1e3)
    else:
        columns["rounds"] = lambda row: f"{row['rounds']:,.0f}"
        columns["drafted"] = lambda row: f"{row['drafted']:,.0f}"
        columns["kept"] = lambda row: f"{row['accepted']:,.0f}"
    return table_of("Speed: " + conditions(run, lines), columns, rows)


def trees_beside_chains(lines: Sequence[SpeedLine], rows: Sequence[Summary]) -> Iterator[str]:
    """A sentence for each method that guesses trees: its speed over that of the fastest method that guesses chains."""
    speed = {row["method"]: row["throughput"][0] for row in rows if row["method"] not in (*TREES, *ALONE)}
    for tree in [row["method"] for row in rows if row["method"] in TREES] if speed else []:
        fastest = max(speed, key=speed.__getitem__)
        ratio, low, high = interval(paired_ratios(lines, tree, fastest))
        names = f"{name_of(tree)} over {name_of(fastest)}"
        yield f"{names}, the fastest of the others: {ratio:.3f} [{low:.3f}, {high:.3f}] (paired)."


def theory_table(rows: Iterable[Summary], overlaps: Mapping[str, OverlapLine]) -> Table:
    """Tokens a round beside those expected. overlaps: {method: its line}."""
    table = grid("Beside theory", ["", "sum of min(p, q)", "tokens/round", "expected", "of expected"])
    for row in rows:
        if line := overlaps.get(row["method"]):
            overlap, tokens, wanted = beside_theory(row, line)
            counts = (f"{figure:.2f}" for figure in (tokens, wanted, tokens / wanted))
            table.add_row(name_of(row["method"]), f"{overlap:.3f}", *counts)
    return table


def beside_theory(row: Summary, line: OverlapLine) -> tuple[float, float, float]:
    """The mean sum of min(p, q) of a method, its tokens a round, and those expected.

    The tokens are counted in the texts in which overlaps were measured: the shapes and lengths of a method that follows
    the clock differ in other texts. Old lines do not count them.
    """
    theory = expected(line["overlap_by_position"])
    tokens = 1 + line["accepted"] / line["rounds"] if line.get("rounds") else tokens_a_round(row)
    return theory["overlap"], tokens, theory["tokens"]


def tokens_a_round(row: Summary) -> float:
    """The mean over all rounds of a method; the column "tokens/round" is the median of texts."""
    return 1 + float(row["accepted"] / row["rounds"]) if row["rounds"] else float("nan")


def speed_notes(lines: Sequence[SpeedLine], pythia: bool) -> str:
    """The text under the tables of speed. pythia: the models are those of the course report."""
    repeats = len({line["repeat"] for line in lines})
    return (
        f"Medians over prompts and {repeats} interleaved repeats [95 % bootstrap interval]; speed-up: median of "
        "paired throughput ratios to the target alone."
        + (" total/n: the report's time per token." if any(line.get("mode") == "speed" for line in lines) else "")
        + (f"\nThe report measured a speed-up of {REPORTED_SPEEDUP} (without a KV cache)." if pythia else "")
    )


def sweep_tables(run: RunLine, lines: Sequence[Line], costs: Iterable[CostsLine]) -> Iterator[RenderableType]:
    """For each temperature: speed over gamma, and the alpha and the costs that theory was given."""
    for cost in costs:
        timed = swept(lines, cost)
        if "target" not in {line["method"] for line in timed}:  # The run was stopped before it.
            continue
        prediction = predict(timed, cost)
        yield sweep_table(run, timed, prediction)
        yield Text(sweep_notes(cost, prediction))


def sweep_table(run: RunLine, lines: Sequence[SpeedLine], prediction: Prediction) -> Table:
    """One row for plain decoding, and one for each gamma."""
    columns: dict[str, Callable[[Summary], str]] = {
        "gamma": lambda row: str(row["gamma"]),
        "s a text": lambda row: span(row["seconds"]),
        "tokens/s": lambda row: span(row["throughput"]),
        "speed-up": lambda row: span(row["speedup"]),
        "theory": lambda row: f"{row['theory']:.2f}",
        "measured/\ntheory": lambda row: f"{row['speedup'][0] / row['theory']:.2f}",
        "the paper's": lambda row: f"{row['paper']:.2f}",
        "alpha": lambda row: f"{row['alpha']:.3f}",
        "tokens/\nround": lambda row: f"{row['tokens_per_round'][0]:.2f}",
    }
    if any(row["expected"] == row["expected"] for row in prediction["rows"]):  # The overlaps were measured.
        columns["of ex-\npected"] = lambda row: f"{tokens_a_round(row) / row['expected']:.2f}"
    table, target = grid("Speed over gamma: " + conditions(run, lines), columns), prediction["plain"]
    table.add_row("plain", span(target["seconds"]), span(target["throughput"]), "1")
    for row in prediction["rows"]:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def sweep_notes(cost: CostsLine, prediction: Prediction) -> str:
    """The text under a table of speed over gamma."""
    scoring = ", ".join(f"{v:.2f}" for v in cost["scoring"])
    overlap = float("nan") if cost["alpha"] is None else cost["alpha"]
    return (
        f"alpha: {prediction['alpha']:.3f} by counting, {overlap:.3f} as the mean of the sum of min(p, q). c: "
        f"{prediction['c']:.3f}. Scoring 1, 2, 3 ... tokens costs {scoring} times as much as one. theory: expected "
        "tokens per round / (gamma c + the cost of scoring gamma + 1 tokens). the paper's: the same with a cost of 1; "
        f"by it, gamma {prediction['best']} is best." + (" " + OVERLAPS if cost.get("overlap_by_position") else "")
    )


def diversity_table(lines: Sequence[DiversityLine]) -> Table:
    """One row for each method, and below them the article's figures."""
    first = lines[0]
    table = grid(
        f"Diversity: {first['prompts']} prompts, maxLen {first['maxLen']}, "
        f"temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}",
        ["", "texts", *DIVERSITY_TITLES],
    )
    for line in lines:
        figures = (give_or_take([text[name] for text in line["each"]]) for name in FIGURES)
        table.add_row(name_of(line["method"]), str(line["texts"]), *figures)
    for method, values in ARTICLE.items():
        table.add_row(f"article, {method}", "5", *(f"{value:.3g}" for value in values))
    return table


def text_table(lines: Sequence[TextPerplexityLine], pythia: bool) -> Table:
    """Perplexity per text, one row for each corpus; if the models are the course report's, its figures below."""
    limit, dtype = lines[0]["sentenceLimit"], lines[0]["dtype"]
    title = f"Perplexity per text (mean over texts of at least {limit} characters), {dtype}"
    table = grid(title, ["", "texts", "tokens", *PERPLEXITIES])
    for line in lines:
        table.add_row(plain(line["corpus"]), str(line["texts"]), f"{line['tokens']:,}", *perplexities(line["ppl"]))
    if pythia:
        table.add_row("the report (WikiText-2)", "", "", *perplexities(REPORT))
    return table


def corpus_table(lines: Sequence[CorpusPerplexityLine]) -> Table:
    """Perplexity of each whole corpus, per token, word and byte."""
    window, stride, dtype = lines[0]["window"], lines[0]["stride"], lines[0]["dtype"]
    title = f"Perplexity of the corpus (windows of {window} tokens, stride {stride}), {dtype}"
    table = grid(title, ["", "tokens", "per", *PERPLEXITIES])
    for line in lines:
        for unit in ("token", "word", "byte"):
            corpus = (plain(line["corpus"]), f"{line['tokens']:,}") if unit == "token" else ("", "")
            table.add_row(*corpus, unit, *perplexities({role: ppl[unit] for role, ppl in line["ppl"].items()}))
    return table


def perplexities(ppl: Mapping[str, float]) -> tuple[str, ...]:
    """The cells of PERPLEXITIES."""
    return number(ppl["draft"], 4), number(ppl["target"], 6), number(ppl["speculative"], 6), difference(ppl)


def difference(ppl: Mapping[str, float]) -> str:
    """How far the speculative perplexity is from the target's, relative to it."""
    return f"{abs(ppl['speculative'] / ppl['target'] - 1):.1e}"
