"""Blocks of the documentation that show the figures of the sources beside measured ones: the course report, a post, an
article."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.diversity import FIGURES
from experiments.lines import TextPerplexityLine, TimedText
from experiments.speed import summarize
from report.runTables import text_table
from report.sources import ARTICLE, POST, REPORT, REPORT_SPEED, Reported
from report.tableFormat import give_or_take
from scripts.docsBenchmark import SHAPES, refuse_mixed
from scripts.docsTables import Render, Words, cell, cells_of, command_of, of_kind, source, table
from scripts.keepRecord import Records

NO_CACHE = "noCache", "speculativeNoCache"  # plain and speculative decoding without a KV cache
CACHED = "target", "speculative"
MISSING = "not in this record"


class Column(NamedTuple):
    """Measured figures beside the course report's.

    lines: timed texts. methods: which are plain and which speculative decoding. ratio: whether they are divided by the
    report's in another column.
    """

    title: str
    lines: Sequence[TimedText]
    methods: tuple[str, str]
    ratio: bool = False


def speeds_beside(columns: Sequence[Column], words: Words) -> str:
    """The speeds of the course report, a column for each of `columns` beside them."""
    say = say_in(words)
    titles = [say("figure"), say("the report")]
    cells: list[list[list[str]]] = []
    for column in columns:
        titles += [say(column.title), *([say("of the report")] if column.ratio else [])]
        rows = {row["method"]: row for row in summarize(column.lines, column.methods[0])}
        cells.append([beside(figure, rows, column, say(MISSING)) for figure in REPORT_SPEED])
    body = [
        [say(figure.words), "; ".join(figure.values), *(text for texts in row for text in texts)]
        for figure, *row in zip(REPORT_SPEED, *cells)
    ]
    return table(" | ".join(titles), body)


def beside(figure: Reported, rows: dict[str, dict[str, Any]], column: Column, missing: str) -> list[str]:
    """What was measured, and if the column has ratios, those to the report's values. rows: {method: its figures}."""
    row = rows.get(column.methods[not figure.plain])
    measured = row[figure.field] if row else (float("nan"),) * 3
    ratios = "; ".join(f"{measured[0] * figure.scale / float(value):.3g}" for value in figure.values)
    shown = cell(measured, figure.scale)
    return [shown or missing, *([ratios if shown else ""] if column.ratio else [])]


def perplexities_beside(lines: Sequence[TextPerplexityLine], pythia: bool, words: Words) -> str:
    """Perplexities per text, and those of the course report. pythia: the models are the report's, so that its
    target's perplexity of WikiText-2 can be compared."""
    say, rows = say_in(words), cells_of(text_table(lines, True))
    titles = ["corpus", "texts", "tokens", "draft", "target", "speculative", "relative difference"]
    if pythia:
        ratios = [f"{m['ppl']['target'] / REPORT['target']:.3f}" if m["corpus"] == "wikitext" else "" for m in lines]
        titles, rows = [*titles, "of the report"], [[*row, ratio] for row, ratio in zip(rows, [*ratios, "1"])]
    return table(" | ".join(map(say, titles)), [[say(name), *cells] for name, *cells in rows])


def say_in(words: Words) -> Callable[[str], str]:
    """f(English words) -> the same in the language of a text; English ones where no others are known."""
    return lambda english: words.get(english, english)


def report(records: Records, words: Words) -> str:
    """The course report beside the bundled pair, and in a table of its own beside random weights of Pythia's shapes."""
    (first, lines), (compare, compared) = records.run("first"), records.run("compare")
    refuse_mixed({"first": first, "compare": compare})
    shapes, speed, without = records.benchmark(SHAPES), of_kind(lines, "speed"), of_kind(compared, "speed")
    columns = Column("bundled pair, no KV cache", without, NO_CACHE), Column("bundled pair, KV cache", speed, CACHED)
    random_weights = Column(
        "Pythia's shapes, random weights, KV cache; speculative: 60 % of guesses accepted (synthetic)",
        shapes["speed"],
        ("plain, eager", "synthetic 0.6, eager"),
    )
    pieces = [
        speeds_beside(columns, words),
        perplexities_beside(of_kind(lines, "ppl_text"), False, words),
        f"{source(compare, without[0]['dtype'], words)} {source(first, speed[0]['dtype'], words)}",
        speeds_beside([random_weights], words),
        source(shapes, shapes["dtype"], words),
    ]
    return "\n\n".join(pieces)


def report_short(records: Records, words: Words) -> str:
    """The README's table: the course report's main figures beside those of the bundled pair."""
    say, (run, lines), (other, compared) = say_in(words), records.run("first"), records.run("compare")
    refuse_mixed({"first": run, "compare": other})
    speedup = next(figure for figure in REPORT_SPEED if figure.field == "speedup")
    rows = []
    for what, record, timed, methods in (
        ("speed-up, no KV cache", other, compared, NO_CACHE),
        ("speed-up, KV cache", run, lines, CACHED),
    ):
        column = Column("", of_kind(timed, "speed"), methods)
        figures = {row["method"]: row for row in summarize(column.lines, methods[0])}
        printed = "; ".join(speedup.values) if methods is NO_CACHE else ""
        rows.append([say(what), printed, *beside(speedup, figures, column, say(MISSING)), f"`{command_of(record)}`"])
    here, there = cells_of(text_table(of_kind(lines, "ppl_text")[:1], True))
    for what, ours, theirs in zip(("draft", "target", "speculative", "relative difference"), here[3:], there[3:]):
        name = "relative difference of the last two" if what == "relative difference" else f"perplexity, {what}"
        rows.append([say(name), theirs, ours, f"`{command_of(run)}`"])
    return table(" | ".join(map(say, ("figure", "the report", "here, bundled pair", "command"))), rows)


def post(records: Records, words: Words) -> str:
    """Clay's figures of SmolLM2 beside those of the same draft-length rule on the bundled pair."""
    say, (run, lines) = say_in(words), records.run("compare")
    speed = of_kind(lines, "speed")
    rows = {row["method"]: row for row in summarize(speed)}
    names = [name for name in ("targetConfidence", "fixed") if name in rows]
    chosen = [rows[name] for name in names]
    body = [
        [say("plain decoding: tokens/s"), POST["plain"], *(cell(rows["target"]["throughput"]) for _ in names)],
        [say("speculative decoding: tokens/s"), POST["tokens/s"], *(cell(row["throughput"]) for row in chosen)],
        [say("speed-up"), POST["speed-up"], *(cell(row["speedup"]) for row in chosen)],
        [
            say("accepted, of the drafted tokens"),
            POST["accepted"],
            *(f"{row['accepted'] / row['drafted']:.2f}" for row in chosen),
        ],
        [say("alpha: accepted, of the tested guesses"), "", *(f"{row['alpha']:.2f}" for row in chosen)],
    ]
    titles = " | ".join([say("figure"), say("the post"), *(f"{say('here')}, `{name}`" for name in names)])
    return f"{table(titles, body)}\n\n{source(run, speed[0]['dtype'], words)}"


def article(records: Records, words: Words) -> str:
    """Gadgil's figures of diversity beside those of the bundled pair."""
    say, (run, lines) = say_in(words), records.run("diversity")
    measured = {line["method"]: line for line in of_kind(lines, "diversity")}
    body = []
    for index, figure in enumerate(FIGURES[:5]):
        row = [say(figure.replace("_", " "))]
        for method, printed in ARTICLE.items():
            here = give_or_take([text[figure] for text in measured[method]["each"]]) if method in measured else ""
            row += [f"{printed[index]:.4g}", here.replace("\n", " ") or say(MISSING)]
        body.append(row)
    titles = [f"{say(method)}, {say(where)}" for method in ARTICLE for where in ("the article", "here")]
    dtype = next(iter(measured.values()))["dtype"]
    return f"{table(' | '.join([say('figure'), *titles]), body)}\n\n{source(run, dtype, words)}"


BLOCKS: dict[str, Render] = {
    "reproduction-report": report,
    "reproduction-short": report_short,
    "reproduction-post": post,
    "reproduction-article": article,
}
