"""The report of a run: tables on the screen, and the same in `results.txt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from report import losslessReport
from report.lines import Line, mode_of, of_kind
from report.runTables import speed_notes, speed_tables, sweep_tables
from report.tableFormat import WIDTH, plain
from report.textTables import DIVERSITY_NOTES, corpus_table, diversity_table, text_table


def show(run: Line, lines: Sequence[Line], **options: Any) -> None:
    """Print the report of a run: on the screen, or where the `options` of a `rich` console say."""
    pieces = list(report(run, lines))
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False, **options)
    for piece in pieces:
        console.print(piece)


def report(run: Line, lines: Sequence[Line]) -> Iterator[RenderableType]:
    """Everything shown of a run, as rich renderables. run: its own line. lines: its measurements."""
    yield from heading(run, finished=bool(of_kind(lines, "end")))
    pythia = run["models"]["target"]["name"] == "pythia-2.8b" and run["models"]["draft"]["name"] == "pythia-70m"
    speed, costs = of_kind(lines, "speed"), of_kind(lines, "costs")
    for mode, length in dict.fromkeys((mode_of(line), line.get("promptLen")) for line in speed):
        group = [line for line in speed if (mode_of(line), line.get("promptLen")) == (mode, length)]
        if mode == "sweep":
            yield from sweep_tables(run, group, [cost for cost in costs if cost["promptLen"] == length])
        else:
            beside = [line for line in of_kind(lines, "overlap") if (line["mode"], line["promptLen"]) == (mode, length)]
            yield from speed_tables(run, group, beside)
    yield from losslessReport.report(lines)
    for line in of_kind(lines, "figure"):
        yield plain(f"Figure: {line['file']}")
    if speed:
        yield Text(speed_notes(speed, pythia))
    if diverse := of_kind(lines, "diversity"):
        yield diversity_table(diverse)
        yield Text(DIVERSITY_NOTES)
    if texts := of_kind(lines, "ppl_text"):
        yield text_table(texts, pythia)
    if corpora := of_kind(lines, "ppl_corpus"):
        yield corpus_table(corpora)
    yield Text()


def heading(run: Line, finished: bool) -> Iterator[RenderableType]:
    """The command line, the models and the machine of a run."""
    flags, machine = run["flags"], run["machine"]
    yield Text("=" * WIDTH)
    yield plain(f"Run {run['run']} of {run['time']}" + ("" if finished else ", not finished"))
    yield plain("python test.py " + run["command"])
    for role, model in run["models"].items():
        own = f", on {model['device']} ({model['processor']})" if "device" in model else ""
        yield plain(f"{role}: {model['name']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['version']}{own}")
    yield plain(
        f"{machine['processor']}, {machine['threads']} threads, {run['device']}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; seed {flags['seed']}"
    )
    if processes := run.get("processes"):
        where = [f"{process['host']} {process['device']}" for process in processes]
        counts = [f"{count} on {each}" if (count := where.count(each)) > 1 else each for each in dict.fromkeys(where)]
        yield plain(f"{len(processes)} processes: {', '.join(counts)}")
