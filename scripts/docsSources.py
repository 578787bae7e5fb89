"""Blocks of the documentation that show the figures of the sources beside measured ones: the course report, a post, an
article."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.diversity import FIGURES
from experiments.lines import Run, TextPerplexityLine, TimedText
from experiments.speed import summarize
from report.runTables import swept, text_table
from report.sources import ARTICLE, POST, POST_FIGURES, REPORT, REPORT_SPEED, SPEED_UP
from report.tableFormat import give_or_take, median
from scripts.docsBenchmark import SHAPES, refuse_mixed
from scripts.docsTables import Render, Words, cell, cells_of, command_of, of_kind, source, table
from scripts.keepRecord import Records

Methods = dict[str, str]  # {role in the report: the method that has it here}
NO_CACHE: Methods = {"target": "noCache", "speculative": "speculativeNoCache"}
CACHED: Methods = {"draft": "draft", "target": "target", "speculative": "speculative"}
COMPILED = CACHED | {"speculative": "fixed"}


class Column(NamedTuple):
    """Measured figures beside the course report's. lines: timed texts. methods: which row is which."""

    title: str
    lines: Sequence[TimedText]
    methods: Methods


def speeds_beside(columns: Sequence[Column], words: Words) -> str:
    """The speeds of the course report, a column for each of `columns` beside them. A figure that was not measured is an
    empty cell."""
    say = say_in(words)
    titles = "figure", "the report, group one: best of several runs", "group two: typical", *(c.title for c in columns)
    body = [[f"{say(f.role)}{say(': ')}{say(f.words)}", f.best, f.typical] for f in REPORT_SPEED]
    for column in columns:
        for row, figure in zip(body, beside(column)):
            row.append(figure)
    return table(" | ".join(map(say, titles)), body)


def beside(column: Column) -> list[str]:
    """What was measured of each figure of `REPORT_SPEED`."""
    rows = {row["method"]: row for row in summarize(column.lines, column.methods["target"])}
    found = [(rows.get(column.methods.get(figure.role, "")), figure) for figure in REPORT_SPEED]
    return [cell(row[figure.field], figure.scale) if row else "" for row, figure in found]


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


def one_experiment(records: Records) -> dict[str, Run]:
    """The runs of the bundled pair beside the report: with a KV cache, without, and compiled. Raises UserError if they
    are not one experiment."""
    runs = {name: records.run(name) for name in ("first", "compare", "head")}
    refuse_mixed({name: run for name, (run, _) in runs.items()})
    return runs


def report(records: Records, words: Words) -> str:
    """The course report beside the bundled pair, and in a table of its own beside random weights of Pythia's shapes."""
    runs = one_experiment(records)
    speed = {name: of_kind(lines, "speed") for name, (_, lines) in runs.items()}
    shapes = records.benchmark(SHAPES)
    columns = (
        Column("bundled pair, no KV cache, eager", speed["compare"], NO_CACHE),
        Column("bundled pair, KV cache, eager", speed["first"], CACHED),
        Column("bundled pair, KV cache, compiled", speed["head"], COMPILED),
    )
    random_weights = [
        Column(
            f"Pythia's shapes, random weights, KV cache, {variant}; 60 % of guesses accepted (synthetic)",
            shapes["speed"],
            {"target": f"plain, {variant}", "speculative": f"synthetic 0.6, {variant}"},
        )
        for variant in ("eager", "compiled")
    ]
    pieces = [
        speeds_beside(columns, words),
        " ".join(source(run, speed[name][0]["dtype"], words) for name, (run, _) in runs.items()),
        perplexities_beside(of_kind(runs["first"][1], "ppl_text"), False, words),
        speeds_beside(random_weights, words),
        source(shapes, shapes["dtype"], words),
    ]
    return "\n\n".join(pieces)


def report_short(records: Records, words: Words) -> str:
    """The README's table: the course report's main figures beside those of the bundled pair."""
    say, runs, rows = say_in(words), one_experiment(records), []
    for what, name, methods in (
        ("speed-up, no KV cache, eager", "compare", NO_CACHE),
        ("speed-up, KV cache, eager", "first", CACHED),
        ("speed-up, KV cache, compiled", "head", COMPILED),
    ):
        run, lines = runs[name]
        printed = say("{typical} typical, {best} best").format_map(SPEED_UP._asdict()) if methods is NO_CACHE else ""
        measured = beside(Column(what, of_kind(lines, "speed"), methods))[-1]
        rows.append([say(what), printed, measured, f"`{command_of(run)}`"])
    run, lines = runs["first"]
    here, there = cells_of(text_table(of_kind(lines, "ppl_text")[:1], True))
    for what, ours, theirs in zip(("draft", "target", "speculative", "relative difference"), here[3:], there[3:]):
        name = "relative difference of the last two" if what == "relative difference" else f"perplexity, {what}"
        rows.append([say(name), theirs, ours, f"`{command_of(run)}`"])
    return table(" | ".join(map(say, ("figure", "the report", "here, bundled pair", "command"))), rows)


def post(records: Records, words: Words) -> str:
    """Clay's figures of SmolLM2 beside those of the same draft-length rules on the bundled pair."""
    say, (run, lines) = say_in(words), records.run("compare")
    speed = of_kind(lines, "speed")
    rows = {row["method"]: row for row in summarize(speed)}
    columns = []
    for name, printed in POST.items():
        row = rows[name]
        measured = cell(rows["target"]["throughput"]), cell(row["throughput"]), cell(row["speedup"])
        tokens, share = cell(row["tokens_per_round"], show=median), row["accepted"] / row["drafted"]
        columns += [printed, (*measured, tokens, f"{share:.2f}", f"{row['alpha']:.2f}")]
    body = list(zip(map(say, POST_FIGURES), *columns))
    titles = [f"`{name}`{say(', ')}{say(where)}" for name in POST for where in ("the post", "here")]
    return f"{table(' | '.join([say('figure'), *titles]), body)}\n\n{source(run, speed[0]['dtype'], words)}"


def article(records: Records, words: Words) -> str:
    """Gadgil's figures of diversity beside those of the bundled pair."""
    say, (run, lines) = say_in(words), records.run("diversity")
    measured = {line["method"]: line for line in of_kind(lines, "diversity")}
    body = []
    for index, figure in enumerate(FIGURES[:5]):
        row = [say(figure.replace("_", " "))]
        for method, printed in ARTICLE.items():
            here = give_or_take([text[figure] for text in measured[method]["each"]]) if method in measured else ""
            row += [f"{printed[index]:.4g}", here.replace("\n", " ")]
        body.append(row)
    titles = [f"{say(method)}{say(', ')}{say(where)}" for method in ARTICLE for where in ("the article", "here")]
    dtype = next(iter(measured.values()))["dtype"]
    return f"{table(' | '.join([say('figure'), *titles]), body)}\n\n{source(run, dtype, words)}"


def article_times(records: Records, words: Words) -> str:
    """The run time over the number of guesses, as the article draws it: at the temperature nearest to its own."""
    say, (run, lines) = say_in(words), records.run("sweep")
    speed = swept(lines, max(of_kind(lines, "costs"), key=lambda cost: cost["temperature"]))
    rows = [
        [say("plain") if row["method"] == "target" else row["method"].removeprefix("gamma ")]
        + [cell(row["tpot"], 1e3), cell(row["speedup"])]
        for row in summarize(speed)
        if row["method"] != "draft"
    ]
    titles = " | ".join(map(say, ("n_tokens", "TPOT, ms", "speed-up")))
    return f"{table(titles, rows)}\n\n{source(run, speed[0]['dtype'], words)}"


BLOCKS: dict[str, Render] = {
    "reproduction-report": report,
    "reproduction-short": report_short,
    "reproduction-post": post,
    "reproduction-article": article,
    "reproduction-article-times": article_times,
}
