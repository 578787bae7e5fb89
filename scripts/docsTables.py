"""Blocks of the documentation that show runs of test.py: Markdown tables, quoted output and single figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from io import StringIO
from math import isnan
from pathlib import Path
from textwrap import wrap
from typing import Any, cast

from rich.table import Table

from benchmark.records import BenchmarkRecord
from experiments.batchSweep import predict as predict_batches
from experiments.categories import by_category
from experiments.diversity import FIGURES
from experiments.lines import CostsLine, Line, RunLine, SpeedLine
from experiments.speed import FEW, summarize
from experiments.sweep import predict
from inputs.commandLine import visible
from lossless.evidence import BINS
from playback.trace import summary
from report.losslessReport import power_table, sampled_table, verdict
from report.results import show
from report.runTables import (
    Prediction,
    batch_tables,
    category_table,
    diversity_table,
    order_note,
    prompt_lengths,
    ranked,
    speed_table,
    sweep_table,
    swept,
    theory_table,
)
from report.tableFormat import counted, notation, span, title_of
from scripts.keepRecord import Records
from utils import Sampling, UserError

Words = dict[str, str]  # {English words: the same in the language of a text}; empty for English
Render = Callable[[Records, Words], str]  # what a block holds
CHINESE: Words = json.loads(Path(__file__).with_name("chinese.json").read_text(encoding="utf-8"))


def table(titles: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with the titles "a | b | c"; columns of numbers are aligned right."""
    filled = [[cell for cell in column if cell] for column in zip(*rows)]
    numbers = [bool(column) and all(re.match(r"[-+]?\d", cell) for cell in column) for column in filled]
    lines = ["---:" if is_number else "---" for is_number in numbers], *rows
    return "\n".join([f"| {titles} |", *(f"| {' | '.join(cells)} |" for cells in lines)])


def cells_of(printed: Table, titles: str = "") -> list[list[str]]:
    """The rows of a table of the report, each cell in one line. titles: which columns, "a | b | c"; none: all."""
    columns = {title_of(column.header): column for column in printed.columns}
    chosen = [columns[title] for title in titles.split(" | ")] if titles else printed.columns
    return [[str(cell).replace("\n", " ") for cell in row] for row in zip(*(column.cells for column in chosen))]


def cell(triple: Sequence[float], scale: float = 1.0, show: Callable[[Sequence[float], float], str] = span) -> str:
    """A median and its interval in one line, or the `median` alone; nothing if there is no figure."""
    return "" if isnan(triple[0]) else show(triple, scale).replace("\n", " ")


def of_kind(lines: Iterable[Line], kind: str) -> list[Any]:
    """The lines of one kind. Raises UserError if there are none."""
    chosen = [line for line in lines if line["kind"] == kind]
    if not chosen:
        raise UserError(f"the record holds no line of kind {kind!r}")
    return chosen


def command_of(record: Mapping[str, Any]) -> str:
    """The command line of a run, of a benchmark, or of the program that a record names."""
    program = record.get("program") or ("test.py" if "run" in record else "-m benchmark")
    return f"python {program} {record['command']}".rstrip()


def source(record: RunLine | BenchmarkRecord, dtype: str, words: Words | None = None) -> str:
    """The line under a table: how, with what and where its figures were measured."""
    machine, threads = record["machine"], record["machine"]["threads"]
    say = (words or {}).get
    unit = " thread" if threads == 1 else " threads"
    place = say(", ", ", ").join([machine["processor"], f"{threads}{say(unit, unit)}", record["device"]])
    models = say(", between names", ", ").join(model["name"] for model in record["models"].values())
    models = re.sub(r" in (\d) bits", say(" in N bits", r" in \1 bits"), models)
    parts = f"`{command_of(record)}`", place, models, dtype, f"torch {machine['torch']}", record["time"][:10]
    return say("; ", "; ").join(parts) + say(".", ".")


def excerpt(records: Records, words: Words) -> str:
    """What `make run` prints, without the notes and without the perplexity of whole corpora."""
    run, lines = records.run("first")
    buffer = StringIO()
    kept = [line for line in lines if line["kind"] != "ppl_corpus"]
    show(run, kept, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
    text = [line.rstrip() for line in buffer.getvalue().splitlines() if line.strip("= \n")]
    notes = next((i for i, line in enumerate(text) if line.startswith("Acceptance")), 0)
    tables = next((i for i, line in enumerate(text) if line.startswith("Perplexity")), 0)
    del text[next((i for i, line in enumerate(text) if line.startswith("speculative: ")), len(text)) :]
    if 0 < notes < tables:
        text[notes:tables] = ["[...]"]
    return "\n".join(["```text", *text, "[...]", "```"])


def chat(records: Records, words: Words) -> str:
    """A conversation round by round: accepted guesses are bold, rejected ones struck out."""
    record, paragraphs = records.file("chat"), []
    for turn in record["turns"]:
        answer = ""
        for round in turn["rounds"]:
            for tag, keep, pieces in zip(("<b>", "<del>", ""), ("\n", "", "\n"), round):
                text = escape(visible("".join(pieces), keep), quote=False)
                answer += f"{tag}{text}{tag.replace('<', '</')}" if text else ""
        for line in escape(visible(turn["prompt"].strip()), quote=False), answer, summary(turn["rounds"]):
            paragraphs.append(f"<p>{line}</p>".replace("\n", "<br>"))  # A blank line would end the HTML.
    return "\n\n".join([*paragraphs, source(cast(RunLine, record), record["dtype"])])


def timed(run: RunLine, speed: Sequence[SpeedLine], body: str) -> str:
    """What was timed, and where. body: the table above it."""
    first, count, repeats = speed[0], len({m["prompt"] for m in speed}), len({m["repeat"] for m in speed})
    return (
        f"{count} prompts of {prompt_lengths(speed)} tokens, {repeats} times each, at most {first['maxLen']} new "
        f"tokens, temperature {first['temperature']}, top-p {first['top_p']}; medians{notation(body)}. "
        f"{source(run, first['dtype'])}"
    )


def compare(records: Records, words: Words) -> str:
    """Every method, side by side."""
    run, lines = records.run("compare")
    speed, overlaps = of_kind(lines, "speed"), {m["method"]: m for m in lines if m["kind"] == "overlap"}
    methods = ranked(summarize(speed))
    columns = " | TTFT ms | TPOT ms | tokens/s | speed-up | alpha | tokens/round"
    printed = cells_of(speed_table(run, speed, methods), columns)
    beside = cells_of(theory_table(methods, overlaps), " | sum of min(p, q) | of expected")
    theory = {name: cells for name, *cells in beside}
    rows = [[f"`{m['method']}`", *cells, *theory.get(name, ["", ""])] for m, (name, *cells) in zip(methods, printed)]
    titles = "method | TTFT, ms | TPOT, ms | tokens/s | speed-up | alpha | tokens per round | sum min(p, q)"
    body = table(f"{titles} | of expected", rows)
    notes = "".join(f" {note}" for note in order_note(methods))
    return f"{body}\n\n{timed(run, speed, body)}{notes}"


CATEGORIES = "categories", "categories-SmolLM2", "categories-head"  # names of records
# {name of a record of --sweep batch: what it measured}.
MAPS = {
    "batch-copy": "SmolLM2-135M, its own copy guesses",
    "batch-lookup": "SmolLM2-135M, the text so far guesses",
    "batch-bundled": "the bundled pair",
}


def batch_map(name: str, records: Records, words: Words) -> str:
    """Speed by batch and gamma."""
    run, lines = records.run(name)
    printed, first = next(iter(batch_tables(lines))), of_kind(lines, "queue")[0]
    assert isinstance(printed, Table)
    titles = " | ".join(title_of(column.header) for column in printed.columns)
    body = table(titles, cells_of(printed))
    models = ", ".join(model["name"] for model in run["models"].values())
    return (
        f"{body}\n\n{models}; prompts of {first['promptLen']} tokens, texts of {first['maxLen']}, temperature "
        f"{first['temperature']}, top_p {first['top_p']}, {first['dtype']}; `{command_of(run)}`; "
        f"{run['machine']['processor']}, {counted(run['machine']['threads'], 'thread')}; {run['time'][:10]}."
    )


def batch_shares(records: Records, words: Words) -> str:
    """What many texts at once gain, and how near costAware comes to the best cell."""
    rows = []
    for name, what in MAPS.items():
        found = predict_batches(records.run(name)[1])
        auto = {
            batch: next(row["throughput"][0] for row in of["rows"] if row["gamma"] == "costAware")
            for batch, of in found.items()
        }
        plain = {batch: of["plain"][0] for batch, of in found.items()}
        least, most = min(found), max(found)
        shares = {
            kind: min((of["controller"][kind][0], batch) for batch, of in found.items()) for kind in ("best", "plain")
        }
        worst = [f"{share:.2f} (batch {batch})" for share, batch in shares.values()]
        grown = [f"{speed[most] / speed[least]:.1f}" for speed in (plain, auto)]
        rows.append([what, f"{plain[least]:.0f}", f"{plain[most]:.0f}", *grown, *worst])
    titles = (
        "models | plain, batch 1, tokens/s | plain, batch 32 | gain of plain | gain of costAware | "
        "costAware over the best cell, least | over plain, least"
    )
    return table(titles, rows)


def categories(name: str, records: Records, words: Words) -> str:
    """Speed by category of prompt."""
    run, lines = records.run(name)
    speed = of_kind(lines, "speed")
    methods = [f"`{row['method']}`" for rows in by_category(speed).values() for row in ranked(rows)]
    rows = [[first, method, *cells] for method, (first, _, *cells) in zip(methods, cells_of(category_table(speed)))]
    titles = "category | method | TPOT, ms | tokens per round | alpha by position | speed-up | Spec-Bench's speed-up"
    body = table(titles, rows)
    return f"{body}\n\n{timed(run, speed, body)}"


def sweep_of(records: Records) -> tuple[RunLine, list[SpeedLine], CostsLine, Prediction]:
    """(the run, the speed lines at the usual temperature, or else the first, its costs, theory beside them)."""
    run, lines = records.run("sweep")
    first, *others = of_kind(lines, "costs")
    costs = next((cost for cost in (first, *others) if cost["temperature"] == Sampling().temperature), first)
    speed = swept(lines, costs)
    return run, speed, costs, predict(speed, costs)


def sweep(records: Records, words: Words) -> str:
    """Speed over gamma, beside theory."""
    run, speed, _, theory = sweep_of(records)
    columns = "gamma | tokens/s | speed-up | theory | measured / theory | the paper's | alpha | tokens/round"
    rows = cells_of(sweep_table(run, speed, theory), f"{columns} | of expected")
    titles = "gamma | tokens/s | speed-up | theory | measured / theory | the paper's theory | alpha | tokens per round"
    body = table(f"{titles} | of expected", rows)
    return f"{body}\n\n{timed(run, speed, body)}"


def sweep_figure(name: str, records: Records, words: Words) -> str:
    """One figure of the sweep, for the running text."""
    _, _, costs, theory = sweep_of(records)
    ratios = [row["speedup"][0] / row["theory"] for row in theory["rows"]]
    figures = {
        "alpha": f"{theory['alpha']:.3f}",  # by counting
        "overlap": f"{costs['alpha']:.3f}",  # alpha as the mean overlap of p and q
        "c": f"{theory['c']:.3f}",
        "scoring": f"{costs['scoring'][-1]:.2f}",  # the cost of the longest block, in units of one token
        "range": f"{min(ratios):.2f} to {max(ratios):.2f}",  # measured over theory
    }
    return figures[name]


def diversity(records: Records, words: Words) -> str:
    """How varied the texts of each method are, and the article's figures."""
    run, lines = records.run("diversity")
    measured = of_kind(lines, "diversity")
    first, rows = measured[0], cells_of(diversity_table(measured))
    names = [f"`{m['method']}`" for m in measured] + [f"the {name}" for name, *_ in rows[len(measured) :]]
    titles = " | ".join(["", "texts", *(name.replace("_", " ") for name in FIGURES)])
    body = table(titles, [[name, *cells] for name, (_, *cells) in zip(names, rows)])
    return (
        f"{body}\n\n{first['prompts']} prompts, at most {first['maxLen']} new tokens, temperature "
        f"{first['temperature']}, top-p {first['top_p']}; means ± half of the 95 % bootstrap interval, or "
        f"(range of fewer than {FEW} values). "
        f"{source(run, first['dtype'])}"
    )


def lossless_verdict(records: Records, words: Words) -> str:
    """The sentence that `--lossless` prints."""
    run, lines = records.run("lossless")
    text = wrap(verdict(lines)[1], 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["```text", f"$ {command_of(run)}", *text, "```"])


def lossless_tests(records: Records, words: Words) -> str:
    """The tests of drawn texts, a row for each method."""
    run, lines = records.run("lossless")
    sampled = of_kind(lines, "lossless")
    columns = f"tokens | {BINS} bins p | K-S p | serial p |  p | surprise z | guesses p | PPL of text | PPL of p"
    printed = cells_of(sampled_table(sampled), f"{columns} | p=0")
    titles = (
        f"method | dtype | tokens | u in {BINS} bins: p | u, Kolmogorov-Smirnov: p | neighbours of u: p | "
        "surprise: p | surprise: z | guesses: p | perplexity of the text | expected | impossible tokens"
    )
    dtypes = " and ".join(dict.fromkeys(m["dtype"] for m in sampled))
    return (
        table(titles, [[f"`{m['method']}`", m["dtype"], *cells] for m, cells in zip(sampled, printed)])
        + f"\n\nThe answer is no if a p-value is below {sampled[0]['limit']:.1e} or a token is impossible. Temperature "
        f"{sampled[0]['temperature']}, top-p {sampled[0]['top_p']}. {source(run, dtypes)}"
    )


def lossless_greedy(records: Records, words: Words) -> str:
    """Greedy texts beside plain decoding's, in each dtype."""
    run, lines = records.run("lossless")
    greedy = of_kind(lines, "greedy")
    dtypes = list(dict.fromkeys(m["dtype"] for m in greedy))
    rows = {m["method"]: [f"`{m['method']}`"] for m in greedy}
    for m in sorted(greedy, key=lambda m: dtypes.index(m["dtype"])):
        counts = f"{m['differing']:,} of {m['texts']:,}", f"{m['near_ties']:,} of {m['tokens']:,}", f"{m['beyond']:,}"
        rows[m["method"]] += counts
    titles = ("texts that differ", "near-ties", "beyond rounding")
    columns = " | ".join(["method", *(f"{dtype}: {title}" for dtype in dtypes for title in titles)])
    return f"{table(columns, list(rows.values()))}\n\n{source(run, ' and '.join(dtypes))}"


def lossless_mistakes(records: Records, words: Words) -> str:
    """The planted mistakes, and after how many tokens each is caught."""
    run, lines = records.run("lossless")
    rows = cells_of(power_table(of_kind(lines, "power")))
    body = table("planted mistake | planted in | what is wrong | seen in | seen after tokens | by", rows)
    return f"{body}\n\n{source(run, of_kind(lines, 'lossless')[0]['dtype'])}"


def greedy_differ(records: Records, words: Words) -> str:
    """How many greedy texts in a 16-bit dtype differ from plain decoding's."""
    _, lines = records.run("lossless")
    short = [m for m in of_kind(lines, "greedy") if m["dtype"] != "float32" and m["method"] != "target"]
    if not short:
        raise UserError("the record holds no greedy texts in a 16-bit dtype")
    differing, texts = sum(m["differing"] for m in short), sum(m["texts"] for m in short)
    english = "{differing:,} of {texts:,} in {dtype} ({share:.0%})"
    shown = words.get(english, english)
    return shown.format(differing=differing, texts=texts, dtype=short[0]["dtype"], share=differing / texts)


BLOCKS: dict[str, Render] = {
    "results": excerpt,
    "greedy-differ": greedy_differ,
    "chat": chat,
    "compare": compare,
    "sweep": sweep,
    **{name: partial(batch_map, name) for name in MAPS},
    "batch-shares": batch_shares,
    **{name: partial(categories, name) for name in CATEGORIES},
    **{f"sweep-{name}": partial(sweep_figure, name) for name in ("alpha", "overlap", "c", "scoring", "range")},
    "diversity": diversity,
    "lossless-verdict": lossless_verdict,
    "lossless-tests": lossless_tests,
    "lossless-greedy": lossless_greedy,
    "lossless-mistakes": lossless_mistakes,
}
