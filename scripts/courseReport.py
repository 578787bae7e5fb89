"""The course report's whole protocol by one command: downloads, measures, and writes one page.

    python -m scripts.courseReport                                 Pythia-2.8b with Pythia-70m, as `make report`
    python -m scripts.courseReport TARGET DRAFT --out FOLDER       other models
    python -m scripts.courseReport --flags "--sentences 2"         flags that every step passes to test.py

Each step is a run of test.py that writes to FOLDER/results.jsonl. A step that has a finished run by the same command is
not measured again; so the same command continues after an interruption. FOLDER/report.md has all tables, and
the report's own figures beside them. The exit code is 1 if a step failed or --lossless found a difference.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import downloadData
import downloadModel
from experiments.intervals import FEW, summarize
from experiments.lines import EndLine, LosslessLine, Run, RunLine, SpeedLine, TextPerplexityLine, TimedText, of_kind
from experiments.settings import parse, without_effect
from inputs.commandLine import as_command, path, script_parser, text, whole
from inputs.devices import pick_device
from inputs.files import ROOT, replace_file
from inputs.models import find_model
from inputs.texts import find_texts
from report import losslessReport
from report.results import Results, heading
from report.results import report as shown
from report.sources import REPORT, REPORT_DTYPE, REPORT_PASSAGES, REPORT_PROMPTS, REPORT_SPEED, is_the_reports
from report.tables import Cell, Measured, Table, markdown, span
from report.textTables import text_table
from scripts.keepRecord import source, without_places

PAIR, MID = (downloadModel.PYTHIA[-1], downloadModel.PYTHIA[0]), downloadModel.PYTHIA[1]
DATA = ["wikitext", "pg19"]
OUT, PAGE = Path("courseReport"), "report.md"
SPEED = "Speed with and without a KV cache"
NOTES = """\
- The report's two groups of runs have one configuration. Group one has the best of several runs, "not
  representative" in its words; group two is typical.
- Times are those of two machines, and of two pairs of models unless these are Pythia-2.8b and -70m. No tolerance is
  given for them. total/n: the whole time over the number of tokens. The report's TTFT is that of a separate call: for
  plain decoding the first call of a model, for speculative decoding a later one of 4 tokens or more. Here it is the
  time to the first token.
- The speed-up without a KV cache, as in the report's code, can be compared. It agrees if its interval meets 1.81 to
  2.49.
- Speculative and target perplexity should agree to a relative difference below 1e-6. The report's are means of ten
  texts; its code reads the first 20 of WikiText-2's test split that have 100 characters or more, as here.
- [95 % bootstrap interval]; in round brackets the range of few values."""


Methods = dict[str, str]  # {role in the report: the method that has it here}
NO_CACHE: Methods = {"target": "noCache", "speculative": "speculativeNoCache"}
CACHED: Methods = {"draft": "draft", "target": "target", "speculative": "speculative"}


class Column(NamedTuple):
    """Measured figures beside the course report's. lines: timed texts. methods: {role in the report: row}."""

    title: str
    lines: Sequence[TimedText]
    methods: Methods


class Step(NamedTuple):
    """One run of test.py. command: its flags without --out."""

    title: str
    command: list[str]


def steps_of_setting(plan: Namespace) -> Iterator[Step]:
    """All runs, those of the report's own figures first, in the setting of its code, without the flags of the plan."""
    models = ["--target", plan.target, "--draft", plan.draft]
    mid = ["--mid", plan.mid] if plan.mid else []
    device = parse([*models, *plan.flags, "--out", str(plan.out)]).models.device
    dtype = [] if pick_device(device) == "cpu" else ["--dtype", REPORT_DTYPE]
    first, later = (["--prompt", prompt, *dtype] for prompt in REPORT_PROMPTS)
    rows = ",".join([*CACHED.values(), *NO_CACHE.values()])
    speed = [*first, "--repeats", str(FEW), *models]
    yield Step(SPEED, ["--compare", rows, *speed])
    yield Step(f"{SPEED}, compiled", ["--compare", ",".join(CACHED.values()), "--compile", *speed])
    for data in plan.data:
        texts = ["--dataset", data, "--books", str(plan.books)]
        yield Step(f"Perplexity: {Path(data).name}", ["--ppl", *texts, *REPORT_PASSAGES, *models])
    new = ["--target", plan.target, "--draft", plan.mid or plan.draft]
    yield Step("The additive draft-length rule", ["--speedNew", *later, *new])
    if mid:
        yield Step("A cascade of three models", ["--speedMulti", "--maxLen", "500", *later, *models, *mid])
    name = Path(plan.data[0]).name
    texts = ["--dataset", plan.data[0], "--books", str(plan.books), *models, *mid]
    yield Step(f"Every method: {name}", ["--compare", "all", *texts])
    yield Step(f"Speed over gamma: {name}", ["--sweep", *texts])
    tokens = ["--tokens", str(plan.tokens)] if plan.tokens else []
    yield Step(f"Tests of losslessness: {name}", ["--lossless", "all", *tokens, *texts])


def steps(plan: Namespace) -> Iterator[Step]:
    """All runs. The plan's flags stand last and replace those of the setting; those without effect are left out."""
    for title, command in steps_of_setting(plan):
        idle, kept = without_effect(parse([*command, *plan.flags], again=True), plan.flags), True
        for word in plan.flags:
            kept = word.split("=")[0] not in idle if word.startswith("--") else kept
            command += [word] if kept else []
        yield Step(title, command)


def run_of(step: Step, store: Results) -> Run | None:
    """The newest finished run by the step's command, or None."""
    command = shlex.join(step.command)
    finished = [(run, lines) for run, lines in store.runs() if of_kind(lines, EndLine)]
    return next((pair for pair in reversed(finished) if without_places(pair[0]).get("command") == command), None)


def test_py(words: Sequence[str]) -> int:
    """Run test.py in a process of its own: if it is stopped, the other steps still run. Its tables are on the page,
    so only its stderr is shown. Returns its exit code."""
    return subprocess.run([sys.executable, str(ROOT / "test.py"), *words], stdout=subprocess.DEVNULL).returncode


def download_missing(plan: Namespace) -> bool:
    """Download the models and the data sets that are missing; whether all exist."""
    named = filter(None, (plan.target, plan.draft, plan.mid))
    models = [name for name in named if downloadModel.is_hub_id(name) and not downloadModel.downloaded_folder(name)]
    data = [name for name in plan.data if name in DATA]
    codes = [downloadModel.main(models)] if models else []
    codes += [downloadData.main([*data, "--books", str(plan.books)])] if data else []
    if 130 in codes:
        raise KeyboardInterrupt
    return not any(codes)


def run_steps(plan: Namespace, store: Results) -> list[str]:
    """Run every step that has no finished run, and write the page after it. Returns the titles of those that failed."""
    failed, all_steps = [], list(steps(plan))
    for number, step in enumerate(all_steps, 1):
        place = f"[{number}/{len(all_steps)}] {step.title}"
        if run := run_of(step, store):
            print(f"{place}: measured before, run {run[0]['run']}", flush=True)
            continue
        print(f"{place}: python test.py {shlex.join(step.command)}", flush=True)
        start = time.monotonic()
        code = test_py([*step.command, "--out", str(plan.out)])
        if code == 130:
            raise KeyboardInterrupt
        done = run_of(step, store) is not None
        failed += [] if done else [step.title]
        how = "done" if done else f"FAILED (exit code {code})"
        print(f"{place}: {how}, {time.monotonic() - start:.0f} s", flush=True)
        replace_file(plan.out / PAGE, page(plan, store))
    return failed


def page(plan: Namespace, store: Results) -> str:
    """The page: the report's figures beside those measured, and every table of every step."""
    runs = [(step, run_of(step, store)) for step in steps(plan)]
    measured = [run for _, run in runs if run]
    pieces = ["# The course report's protocol, measured"]
    if measured:  # the models and the machine
        pieces.append("\n".join(["```text", *map(str, list(heading(measured[0][0], True))[3:]), "```"]))
    if differ := differences([run for run, _ in measured]):
        pieces.append(f"**Not one experiment: the runs differ in {', '.join(differ)}.** Measure into another folder.")
    pieces += ["## Beside the report's figures", *beside(runs), NOTES]
    for step, run in runs:
        pieces += [f"## {step.title}", *(tables_of_run(run) if run else ["Not measured."])]
    return "\n\n".join(pieces) + "\n"


def differences(runs: Sequence[RunLine]) -> list[str]:
    """The differences between the runs. A step that was measured before keeps its record."""
    models = {(model["name"], model["version"]) for run in runs for model in run["models"].values()}
    differ = {
        "code": any(run.get("code") != runs[0].get("code") for run in runs),
        "machine": any(run["machine"] != runs[0]["machine"] for run in runs),
        "weights": len(models) != len(dict(models)),  # two versions of one name
    }
    return [name for name, differs in differ.items() if differs]


def beside(runs: Sequence[tuple[Step, Run | None]]) -> Iterator[str]:
    """The report's figures beside those measured."""
    measured = [run for _, run in runs if run]
    eager, compiled = (
        [line for step, run in runs if run and step.title == title for line in of_kind(run[1], SpeedLine)]
        for title in (SPEED, f"{SPEED}, compiled")
    )
    columns = (
        Column("here, no KV cache, eager", eager, NO_CACHE),
        Column("here, KV cache, eager", eager, CACHED),
        Column("here, KV cache, compiled", compiled, CACHED),
    )
    yield f"**Speed**\n\n{markdown(speeds_beside(columns))}"
    if texts := [line for _, lines in measured for line in of_kind(lines, TextPerplexityLine)]:
        pythia = any(is_the_reports(run) for run, _ in measured)
        yield f"**Perplexity per text**\n\n{markdown(perplexities_beside(texts, pythia))}"


def tables_of_run(measured: Run) -> Iterator[str]:
    """All tables, notes and figures of a run in Markdown."""
    run, lines = measured
    dtypes = ", ".join(dict.fromkeys(str(line.get("dtype")) for line in lines if "dtype" in line))
    yield f"{source(without_places(run), dtypes)} Run {run['run']}."
    for piece in list(shown(run, lines))[len(list(heading(run, True))) :]:
        if isinstance(piece, Table):
            yield "\n\n".join(filter(None, [f"**{piece.title}**", markdown(piece), piece.notes]))
        elif words := str(piece):
            yield re.sub(r"^Figure: (.*)", r"![\1](\1)", words)


def speeds_beside(columns: Sequence[Column]) -> Table:
    """The speeds of the course report, a column for each of `columns` beside them. A figure that was not measured is an
    empty cell."""
    titles = "figure", "the report, group one: best of several runs", "group two: typical", *(c.title for c in columns)
    table, measured = Table("", [*titles]), [beside_report(column) for column in columns]
    for figure, *cells in zip(REPORT_SPEED, *measured):
        table.add(f"{figure.role}: {figure.words}", figure.best, figure.typical, *cells)
    return table


def beside_report(column: Column) -> list[Cell]:
    """The measured values of each figure of `REPORT_SPEED`."""
    rows = {row["method"]: row for row in summarize(column.lines, column.methods["target"])}
    pairs = [(rows.get(column.methods.get(figure.role, "")), figure) for figure in REPORT_SPEED]
    return [span(row[figure.field], figure.scale) if row else "" for row, figure in pairs]


def perplexities_beside(lines: Sequence[TextPerplexityLine], pythia: bool) -> Table:
    """Perplexities per text, and those of the course report. pythia: the models are the report's, so that its target's
    perplexity of WikiText-2 can be compared."""
    table = text_table(lines, True)
    if pythia:
        table.heads.append("of the report")
        targets = [line["ppl"]["target"] if line["corpus"] == "wikitext" else math.nan for line in lines]
        for row, target in zip(table.rows, [*targets, REPORT["target"]]):
            row.append(Measured(target / REPORT["target"], digits=3))
    return table


def read_plan(argv: Sequence[str] | None) -> Namespace:
    """What to measure, by the flags. Raises UserError for flags that test.py would reject."""
    parser = script_parser("python -m scripts.courseReport", __doc__)
    parser.add_argument("target", type=text, nargs="?", default=PAIR[0], metavar="TARGET", help=f"({PAIR[0]})")
    parser.add_argument("draft", type=text, nargs="?", default=PAIR[1], metavar="DRAFT", help=f"({PAIR[1]})")
    mid = f"for the cascade ({MID} with the default models, else none)"
    parser.add_argument("--mid", type=text, metavar="MODEL", help=mid)
    parser.add_argument("--data", type=text, nargs="+", default=DATA, metavar="NAME", help=f"({' '.join(DATA)})")
    parser.add_argument("--books", type=whole(1, 100_000), default=2, metavar="N", help="documents of a data set (2)")
    parser.add_argument("--tokens", type=whole(1), metavar="N", help="of each method that --lossless tests (100000)")
    flags = "handed to each test.py that reads them"
    parser.add_argument("--flags", type=shlex.split, default=[], metavar='"FLAGS"', help=flags)
    parser.add_argument("--out", type=path, default=OUT, metavar="FOLDER", help=f"the folder of all results ({OUT})")
    plan = parser.parse_args(argv)
    plan.mid = plan.mid or (MID if (plan.target, plan.draft) == PAIR else None)
    for name in filter(None, (plan.target, plan.draft, plan.mid)):
        if not downloadModel.is_hub_id(name):
            find_model(name)
    for name in plan.data:
        if name not in DATA:
            find_texts(name)
    plan.out.mkdir(parents=True, exist_ok=True)
    for step in steps(plan):
        parse([*step.command, "--out", str(plan.out)])
    return plan


def make_report(argv: Sequence[str] | None) -> int:
    """Download, measure, write the page. Returns the exit code."""
    plan = read_plan(argv)
    store, start = Results(plan.out), time.monotonic()
    complete = download_missing(plan)
    failed = run_steps(plan, store)
    replace_file(plan.out / PAGE, page(plan, store))
    print(f"Written: {plan.out / PAGE}, after {time.monotonic() - start:.0f} s.")
    if failed:
        print(f"{len(failed)} failed: {'; '.join(failed)}. The same command measures only what is missing.")
    runs = [run_of(step, store) for step in steps(plan)]
    lossless = all(losslessReport.verdict(run[1])[0] for run in runs if run and of_kind(run[1], LosslessLine))
    return 0 if complete and not failed and lossless else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    return as_command(
        "courseReport", partial(make_report, argv), "What was measured is kept; the same command continues."
    )


if __name__ == "__main__":
    sys.exit(main())
