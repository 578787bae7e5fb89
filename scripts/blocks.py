"""The contents of the documentation's blocks: tables as they are printed of a record, and single figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from html import escape
from io import StringIO
from math import isnan
from textwrap import wrap
from typing import Any, cast

from experiments.intervals import speedup, summarize
from experiments.lines import CostsLine, GreedyLine, SpeedLine, TextPerplexityLine, of_kind
from experiments.sweep import predict
from inputs.commandLine import visible
from playback.trace import summary
from report.losslessReport import verdict
from report.results import report, show
from report.runTables import swept
from report.sources import POST, POST_FIGURES, SPEED_UP
from report.tables import Measured, Table, markdown, median, notation, span
from report.textTables import text_table, training_table
from scripts import codeBlocks
from scripts.courseReport import CACHED, NO_CACHE, Column, beside_report, perplexities_beside, speeds_beside
from scripts.keepRecord import Records, command_of, source
from utils import Sampling, UserError

PAIR, SHAPES, REAL = BENCHMARKS = "benchmark", "benchmark-pythia", "benchmark-SmolLM2"  # runs of `python -m benchmark`
HEADS, ABLATION = ("head-bundled-target", "head-SmolLM2-135M-Instruct"), "ablation-bundled-target"
TRAININGS = *HEADS, ABLATION  # what `python -m scripts.trainHead` writes
CATEGORIES = "categories", "categories-SmolLM2", "categories-head"  # runs with prompts of several categories
COMPILED = CACHED | {"speculative": "fixed"}
OWN = r"(?!.*:|.*no cache).*"  # this project's rows, with a KV cache
BEST = r"self|fixed|lookup|head|target alone|(llama|open|ctrans|vllm).*|generate:(plain|compiled|assisted)"
EAGER = (  # rows of the table of all methods
    *("fixed", "block", "lookup", "lookup first", "self", "head", "cascade", "additive", "draft confidence"),
    *("target confidence", "cost aware", "tree", "contrastive", "spec. contrastive"),
)


@cache
def pieces_of(name: str, records: Records) -> tuple[Mapping[str, Any], list[Any]]:
    """(the record of a run, everything that is printed of it)."""
    run, lines = records.run(name)
    return run, [*report(run, lines)]


def printed(
    name: str, titles: str, records: Records, columns: str = "", rows: str = "", by: str = "", notes: bool = False
) -> str:
    """The tables of a record whose titles match a pattern, and a line on how they were measured.

    columns, rows: see `markdown`. by: the column by which rows are sorted. notes: with the sentences under the tables.
    """
    record, pieces = pieces_of(name, records)
    parts, taken = [], False
    for piece in pieces:
        if isinstance(piece, Table):
            if taken := bool(re.match(titles, piece.title)):
                parts.append(with_title(sorted_by(piece, by), columns, rows))
                parts += [piece.notes] if notes and piece.notes else []
        elif taken and notes and not re.match("Figure:|Medians|$", str(piece)):
            parts.append(str(piece))
    if not parts:
        raise UserError(f"no table of {name} has a title like {titles!r}")
    return "\n\n".join([*parts, source(record, dtype_of(records.run(name)[1]))])


def sorted_by(table: Table, title: str) -> Table:
    """A table with the largest figure of a column first; as it is without a title."""
    at = table.titles().index(title) if title else 0
    return replace(table, rows=sorted(table.rows, key=lambda row: -cast(Measured, row[at]).value)) if title else table


def with_title(table: Table, columns: str = "", rows: str = "") -> str:
    """A table, and its title below it."""
    medians = f"; medians{notation(table)}" if notation(table) and "medians" not in table.title else ""
    return f"{markdown(table, columns, rows)}\n\n{table.title}{medians}."


def all_tables(name: str, records: Records) -> str:
    """All tables that are printed of a run."""
    record, pieces = pieces_of(name, records)
    tables = [f"## {piece.title}\n\n{markdown(piece)}" for piece in pieces if isinstance(piece, Table)]
    return "\n\n".join([source(record, dtype_of(records.run(name)[1])), *tables])


def excerpt(records: Records) -> str:
    """What `make run` prints, without the notes and without the perplexity of whole corpora."""
    run, lines = records.run("first")
    buffer = StringIO()
    shown_lines = [line for line in lines if line.get("of") != "corpus"]
    show(run, shown_lines, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
    text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip("= \n"))
    text = re.sub(r"\nAcceptance.*?\n(?=Perplexity)", "\n[...]\n", text, flags=re.S)
    return f"```text\n{re.sub(r'speculative: .*', '', text, flags=re.S)}[...]\n```"


def lossless_verdict(records: Records) -> str:
    """The verdict of `--lossless`."""
    run, lines = records.run("lossless")
    text = wrap(verdict(lines)[1], 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", f"$ {command_of(run)}", *text, "```"])


def chat(records: Records) -> str:
    """A conversation round by round: accepted guesses are bold, rejected ones struck out."""
    record, paragraphs = records.file("chat"), []
    for turn in record["turns"]:
        answer = ""
        for kinds in turn["rounds"]:
            for tag, keep, pieces in zip(("<b>", "<del>", ""), ("\n", "", "\n"), kinds):
                text = escape(visible("".join(pieces), keep), quote=False)
                answer += f"{tag}{text}{tag.replace('<', '</')}" if text else ""
        for line in escape(visible(turn["prompt"].strip()), quote=False), answer, summary(turn["rounds"]):
            paragraphs.append(f"<p>{line}</p>".replace("\n", "<br>"))  # A blank line would end the HTML.
    return "\n\n".join([*paragraphs, source(record, record["dtype"])])


def trainings(names: Sequence[str], records: Records) -> str:
    """The costs and the acceptance of trained heads."""
    training_records, sources = [records.file(name) for name in names], []
    for record in training_records:
        target, written = record["models"]["target"]["name"], record["written"]
        texts = f"{target}: {written['tokens']:,} tokens, written and read in {written['seconds'] / 60:.0f} min"
        sources.append(f"Texts of {texts}. {source(record, record['dtype'])}")
    return "\n\n".join([markdown(training_table(training_records)), *sources])


def one_experiment(records: Records) -> dict[str, Any]:
    """The runs of the bundled pair beside the report: with a KV cache, without, and compiled. Raises UserError if they
    are not one experiment: if models of the same role, gamma or code differ, or the code was not recorded."""
    runs = {name: records.run(name) for name in ("first", "compare", "head")}
    first = {"code": runs["first"][0].get("code"), "gamma": runs["first"][0]["flags"].get("gamma")}
    versions: dict[str, str] = {}
    for name, (run, _) in runs.items():
        models = {role: model["version"] for role, model in run["models"].items()}
        settings = {"code": run.get("code"), "gamma": run["flags"].get("gamma"), **models}
        wanted = first | {role: versions.setdefault(role, version) for role, version in models.items()}
        differ = [what for what in wanted if settings[what] != wanted[what]]
        if differ := differ or ["code, which was not recorded"] * (settings["code"] is None):
            raise UserError(f"first and {name} are not one experiment: they differ in {', '.join(differ)}")
    return runs


def dtype_of(lines: Sequence[Any]) -> str:
    """The dtype of timed texts; "" without any."""
    return next((line["dtype"] for line in of_kind(lines, SpeedLine)), "")


def columns_of(records: Records) -> list[Column]:
    """The bundled pair beside the report."""
    lines = {name: of_kind(lines, SpeedLine) for name, (_, lines) in one_experiment(records).items()}
    return [
        Column("bundled pair, no KV cache, eager", lines["compare"], NO_CACHE),
        Column("bundled pair, KV cache, eager", lines["first"], CACHED),
        Column("bundled pair, KV cache, compiled", lines["head"], COMPILED),
    ]


def beside_the_report(records: Records) -> str:
    """The course report beside the bundled pair, and in a table of its own beside random weights of Pythia's shapes."""
    runs, (shapes, measured) = one_experiment(records), records.run(SHAPES)
    title = "Pythia's shapes, random weights, KV cache, compiled; 60 % of guesses accepted (synthetic)"
    random_weights = [Column(title, of_kind(measured, SpeedLine), COMPILED)]
    sources = " ".join(source(run, dtype_of(lines)) for run, lines in runs.values())
    perplexities = perplexities_beside(of_kind(runs["first"][1], TextPerplexityLine), False)
    tables = markdown(speeds_beside(columns_of(records))), sources, markdown(perplexities)
    return "\n\n".join([*tables, markdown(speeds_beside(random_weights)), source(shapes, dtype_of(measured))])


def in_short(records: Records) -> str:
    """The README's table: the course report's main figures beside those of the bundled pair."""
    table, runs = Table("", ["figure", "the report", "here, bundled pair", "command"]), one_experiment(records)
    for column, name in zip(columns_of(records), ("compare", "first", "head")):
        there = f"{SPEED_UP.typical} typical, {SPEED_UP.best} best" if name == "compare" else ""
        what = column.title.replace("bundled pair", "speed-up")
        table.add(what, there, beside_report(column)[-1], f"`{command_of(runs[name][0])}`")
    run, lines = runs["first"]
    here, report_ = text_table(of_kind(lines, TextPerplexityLine)[:1], True).rows
    names = "perplexity, draft", "perplexity, target", "perplexity, speculative", "relative difference of the last two"
    for what, ours, theirs in zip(names, here[3:], report_[3:]):
        table.add(what, theirs, ours, f"`{command_of(run)}`")
    return markdown(table)


def post(records: Records) -> str:
    """Clay's figures of SmolLM2 beside those of the same draft-length rules on the bundled pair."""
    run, lines = records.run("compare")
    rows, table = {row["method"]: row for row in summarize(of_kind(lines, SpeedLine))}, Table("", ["", *POST_FIGURES])
    for name, figures in POST.items():
        row = rows[name]
        speeds = map(span, (rows["target"]["throughput"], row["throughput"], row["speedup"]))
        shares = [Measured(row["accepted"] / row["drafted"], digits=2), Measured(row["alpha"], digits=2)]
        table.add(f"`{name}`, the post", *figures)
        table.add(f"`{name}`, here", *speeds, median(row["tokens_per_round"]), *shares)
    return f"{markdown(table)}\n\n{source(run, dtype_of(lines))}"


def ratio(method: str, baseline: str, records: Records) -> str:
    """The throughput of a row of the bundled pair's benchmark over that of another."""
    figures = speedup(of_kind(records.run(PAIR)[1], SpeedLine), method, baseline)
    if isnan(figures.middle):
        raise UserError(f"the benchmark's record has no rows {method!r} and {baseline!r}")
    return str(span(figures))


def eager(row: str, records: Records) -> str:
    """The speed-up in a row of the table of all methods."""
    table = printed("compare", "Speed:", records, columns=" | speed-up", rows=row)
    return table.splitlines()[2].split("|")[2].strip()


def overall(name: str, records: Records) -> str:
    """The table of speeds by category of prompt, with the rows over all prompts alone."""
    head, rule, *rows = printed(name, "Speed by category", records).splitlines()
    first = next(at for at, row in enumerate(rows) if row.startswith("| overall"))
    return "\n".join([head, rule, *rows[first:]])


def draft_cost(records: Records) -> str:
    """c of the sweep, at the usual temperature."""
    _, lines = records.run("sweep")
    costs = next(cost for cost in of_kind(lines, CostsLine) if cost["temperature"] == Sampling().temperature)
    return f"{predict(swept(lines, costs), costs)['c']:.3f}"


def greedy_differ(records: Records) -> str:
    """How many greedy texts in a 16-bit dtype differ from plain decoding's."""
    lines = of_kind(records.run("lossless")[1], GreedyLine)
    short = [m for m in lines if m["dtype"] != "float32" and m["method"] != "target"]
    if not short:
        raise UserError("the record holds no greedy texts in a 16-bit dtype")
    differing, texts = sum(m["differing"] for m in short), sum(m["texts"] for m in short)
    return f"{differing:,} of {texts:,} in {short[0]['dtype']} ({differing / texts:.0%})"


def records_table(records: Records) -> str:
    """The table of docs/records/README.md: every record, its command and its machine."""
    entries = [(name, f"run `{run}` in results.jsonl", records.run(name)[0]) for name, run in records.index.items()]
    files = records.files()
    table = Table("", ["name", "record", "made by", "machine", "on"])
    for name, place, record in [*entries, *((name, f"{name}.json", record) for name, record in files.items())]:
        made_on = record["machine"] | {"device": record["device"]}
        machine = "{processor}, threads: {threads}, {device}; torch {torch}".format_map(made_on)
        table.add(f"`{name}`", place, f"`{command_of(record)}`", machine, record["time"][:10])
    return markdown(table)


OF_GAMMA, SPEED = "Speed over gamma: .*temperature ", " | tokens/s | TTFT ms | TPOT ms"
OF_PLAIN = f"{SPEED} | speed-up"
BLOCKS: dict[str, Callable[[Records], str]] = codeBlocks.BLOCKS | {
    "records": records_table,
    "results": excerpt,
    "chat": chat,
    "compare": partial(printed, "compare", "Speed|Beside theory", notes=True),
    **{f"eager-{row.replace(' ', '-')}": partial(eager, row) for row in EAGER},
    "head": partial(printed, "head", "Speed:"),
    "head-tree": partial(printed, "head-tree", "Speed:"),
    "heads": partial(trainings, HEADS),
    "head-ablation": partial(trainings, (ABLATION,)),
    "sweep": partial(printed, "sweep", OF_GAMMA + "0.85", notes=True),
    "sweep-c": draft_cost,
    **{name: partial(printed, name, "Speed-up over") for name in ("batch-copy", "batch-lookup", "batch-bundled")},
    **{name: partial(printed, name, "Speed by category") for name in CATEGORIES},
    "overall-head": partial(overall, "categories-head"),
    "diversity": partial(printed, "diversity", "Diversity", notes=True),
    "lossless-verdict": lossless_verdict,
    "lossless-tests": partial(printed, "lossless", "Drawn texts"),
    "lossless-greedy": partial(printed, "lossless", "Greedy texts"),
    "lossless-mistakes": partial(printed, "lossless", "Planted mistakes"),
    "greedy-differ": greedy_differ,
    "kinds": partial(printed, PAIR, "Speed:", columns=OF_PLAIN, rows=OWN),
    "scoring": partial(printed, PAIR, "Forwards"),
    "prefill": partial(printed, PAIR, "Time to the first token"),
    "round": partial(printed, PAIR, "A round"),
    "over-plain": partial(ratio, "fixed", "target"),
    "over-plain-block": partial(ratio, "block", "target"),
    "over-assisted": partial(ratio, "fixed", "generate:assisted"),
    "over-no-cache": partial(ratio, "fixed", "speculativeNoCache"),
    "real-best": partial(printed, REAL, "Speed:", columns=f"{OF_PLAIN} | sampled text", rows=BEST, by="tokens/s"),
    "real-kinds": partial(printed, REAL, "Speed:", columns=OF_PLAIN, rows=OWN),
    "real-scoring": partial(printed, REAL, "Forwards"),
    "real-prefill": partial(printed, REAL, "Time to the first token"),
    "pythia-best": partial(printed, SHAPES, "Speed:", columns=f"{OF_PLAIN} | sampled text", rows=BEST, by="tokens/s"),
    "pythia-theory": partial(printed, SHAPES, "A round"),
    **{f"{name}-tables": partial(all_tables, name) for name in BENCHMARKS},
    "reproduction-report": beside_the_report,
    "reproduction-short": in_short,
    "reproduction-post": post,
    "reproduction-article": partial(printed, "diversity", "Div", rows="naive|contrastive|article.*", notes=True),
    "reproduction-article-times": partial(printed, "sweep", OF_GAMMA + "1.0", columns="gamma | tokens/s | speed-up"),
}
