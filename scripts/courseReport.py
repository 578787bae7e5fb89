"""The course report's whole protocol by one command: downloads, measures, and writes one page.

    python -m scripts.courseReport                                 Pythia-2.8b with Pythia-70m, as `make report`
    python -m scripts.courseReport TARGET DRAFT --out FOLDER       other models
    python -m scripts.courseReport --flags "--sentences 2"         flags that every step passes to test.py

Each step is a run of test.py that writes to FOLDER/results.jsonl. A step that has a finished run by the same command is
not measured again; so the same command continues after an interruption. FOLDER/report.md has all tables, and
the report's own figures beside them. The exit code is 1 if a step failed or --lossless found a difference.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import downloadData
import downloadModel
from experiments.intervals import FEW, summarize
from experiments.schema import Run, RunLine, SpeedLine, TextPerplexityLine, TimedText, of_kind
from experiments.settings import parse, without_effect
from inputs.commandLine import as_script, path, script_parser, text, whole
from inputs.devices import pick_device
from inputs.files import ROOT, replace_file
from inputs.models import find_model
from inputs.texts import find_texts
from report import sources
from report.losslessReport import exit_code
from report.results import heading, pieces_of_run
from report.tables import Cell, Table, markdown, span
from scripts.keepRecord import command_without_places, differing, finished_runs, source, without_places
from utils import UserError

DRAFT, MID, TARGET = downloadModel.PYTHIA
DATA = ["wikitext", "pg19"]
OUT, PAGE = Path("courseReport"), "report.md"
SPEED = "Speed with and without a KV cache"
COMPILED = f"{SPEED}, compiled"
NOTES = """\
- Group one is the best of several runs of one configuration, "not representative" in the report's words; group two is
  typical.
- Times are those of two machines, and of two pairs of models unless these are Pythia-2.8b and -70m. No tolerance is
  given for them. total/n: the whole time over the number of tokens. TTFT: the time to the first token; the report's is
  that of a separate call, for plain decoding a model's first one, for speculative decoding of 4 tokens or more.
- The speed-up without a KV cache, as in the report's code, agrees if its interval meets 1.81 to 2.49.
- Speculative and target perplexity should agree to a relative difference below 1e-6. The report's are means of ten
  texts; its code reads the first 20 of WikiText-2's test split that have 100 characters or more, as here.
- [95 % bootstrap interval]; in round brackets the range of few values."""

NO_CACHE = {"target": "noCache", "speculative": "speculativeNoCache"}  # {role in the report: its row here}
CACHED = {"draft": "draft", "target": "target", "speculative": "speculative"}


def read_plan(argv: Sequence[str] | None) -> Namespace:
    """What to measure, by the flags. Raises UserError for flags that test.py would reject."""
    parser = script_parser("python -m scripts.courseReport", __doc__)
    add = parser.add_argument
    add("target", type=text, nargs="?", default=TARGET, metavar="TARGET", help=f"({TARGET})")
    add("draft", type=text, nargs="?", default=DRAFT, metavar="DRAFT", help=f"({DRAFT})")
    add("--mid", type=text, metavar="MODEL", help=f"for the cascade ({MID} with the default models, else none)")
    add("--data", type=text, nargs="+", default=DATA, metavar="NAME", help=f"({' '.join(DATA)})")
    add("--books", type=whole(1, 100_000), default=2, metavar="N", help="documents of a data set (2)")
    add("--tokens", type=whole(1), metavar="N", help="of each method that --lossless tests (100000)")
    add("--flags", type=shlex.split, default=[], metavar='"FLAGS"', help="handed to each test.py that reads them")
    add("--out", type=path, default=OUT, metavar="FOLDER", help=f"the folder of all results ({OUT})")
    plan = parser.parse_args(argv)
    plan.mid = plan.mid or (MID if (plan.target, plan.draft) == (TARGET, DRAFT) else None)
    plan.models = [name for name in (plan.target, plan.draft, plan.mid) if name]
    for name in (name for name in plan.models if not downloadModel.is_hub_id(name)):
        find_model(name)
    for name in (name for name in plan.data if name not in DATA):
        find_texts(name)
    plan.out.mkdir(parents=True, exist_ok=True)
    if not os.access(plan.out, os.W_OK):
        raise UserError(f"{plan.out} is a folder that you may not write to; name another with --out")
    plan.steps = list(steps(plan))
    return plan


def steps(plan: Namespace) -> Iterator[tuple[str, list[str]]]:
    """All runs of test.py, (title, flags without --out): first those of the report's own figures, in the setting of its
    code. The plan's flags stand last and replace those of the setting; those without effect are left out."""
    target, draft, mid = (name and shlex.quote(name) for name in (plan.target, plan.draft, plan.mid))
    pair, cached = f"--target {target} --draft {draft}", ",".join(CACHED.values())
    three = f"{pair} --mid {mid}" if mid else pair
    device = parse([*shlex.split(pair), *plan.flags, "--out", str(plan.out)]).models.device
    dtype = "" if pick_device(device) == "cpu" else f"--dtype {sources.REPORT_DTYPE}"
    first, later = (f"--prompt {shlex.quote(prompt)} {dtype}" for prompt in sources.REPORT_PROMPTS)
    texts = [(Path(data).name, f"--dataset {shlex.quote(data)} --books {plan.books}") for data in plan.data]
    (name, of_data), tokens = texts[0], f"--tokens {plan.tokens}" if plan.tokens else ""
    commands = [
        (SPEED, f"--compare {cached},{','.join(NO_CACHE.values())} {first} --repeats {FEW} {pair}"),
        (COMPILED, f"--compare {cached} --compile {first} --repeats {FEW} {pair}"),
        *((f"Perplexity: {file}", f"--ppl {of} {shlex.join(sources.REPORT_PASSAGES)} {pair}") for file, of in texts),
        ("The additive draft-length rule", f"--speedNew {later} --target {target} --draft {mid or draft}"),
        *([("A cascade of three models", f"--speedMulti --maxLen 500 {later} {three}")] if mid else []),
        (f"Every method: {name}", f"--compare all {of_data} {three}"),
        (f"Speed over gamma: {name}", f"--sweep {of_data} {pair}"),
        (f"Tests of losslessness: {name}", f"--lossless all {tokens} {of_data} {three}"),
    ]
    for title, line in commands:
        command, reads = shlex.split(line), True
        idle = without_effect(parse([*command, *plan.flags], again=True), plan.flags)
        for word in plan.flags:
            reads = word.split("=")[0] not in idle if word.startswith("--") else reads
            command += [word] if reads else []
        parse(command)  # It raises UserError for what test.py would refuse.
        yield title, command


def test_py(words: Sequence[str]) -> int:
    """The exit code of test.py in a process of its own: if it is stopped, the other steps still run."""
    return subprocess.run([sys.executable, str(ROOT / "test.py"), *words], stdout=subprocess.DEVNULL).returncode


def runs_of_steps(plan: Namespace) -> list[tuple[str, Run | None]]:
    """(title, the newest finished run by its command, or None) of each step."""
    by_command = dict(finished_runs(plan.out, str))  # Two files may have one name.
    return [(title, by_command.get(command_without_places(command, str))) for title, command in plan.steps]


@as_script("courseReport", "What was measured is kept; the same command continues.")
def main(argv: Sequence[str] | None = None) -> int:
    """Download what is missing, run each step that has no finished run, write the page. Returns the exit code."""
    plan, start = read_plan(argv), time.monotonic()
    models = [n for n in plan.models if downloadModel.is_hub_id(n) and not downloadModel.downloaded_folder(n)]
    data = [name for name in plan.data if name in DATA]
    codes = [downloadModel.main(models)] if models else []
    codes += [downloadData.main([*data, "--books", str(plan.books)])] if data else []
    runs = runs_of_steps(plan)
    if 130 in codes:
        raise KeyboardInterrupt
    for number, (title, command) in enumerate(plan.steps):
        place = f"[{number + 1}/{len(plan.steps)}] {title}"
        if run := runs[number][1]:
            print(f"{place}: measured before, run {run[0]['run']}", flush=True)
            continue
        print(f"{place}: python test.py {shlex.join(command)}", flush=True)
        begin = time.monotonic()
        if (code := test_py([*command, "--out", str(plan.out)])) == 130:
            raise KeyboardInterrupt
        runs = runs_of_steps(plan)
        how = "done" if runs[number][1] else f"FAILED (exit code {code})"
        print(f"{place}: {how}, {time.monotonic() - begin:.0f} s", flush=True)
        replace_file(plan.out / PAGE, page(runs))
    replace_file(plan.out / PAGE, page(runs))
    print(f"Written: {plan.out / PAGE}, after {time.monotonic() - start:.0f} s.")
    if failed := [title for title, run in runs if not run]:
        print(f"{len(failed)} failed: {'; '.join(failed)}. The same command measures only what is missing.")
    return int(bool(failed) or any(codes) or any(exit_code(run[1]) for _, run in runs if run))


def page(runs: Sequence[tuple[str, Run | None]]) -> str:
    """The page: the report's figures beside those measured, and all tables, notes and figures of every step."""
    measured = [run for _, run in runs if run]
    records = [run for run, _ in measured]
    pieces = ["# The course report's protocol, measured"]
    if measured:  # the models and the machine
        pieces.append("\n".join(["```text", *map(str, list(heading(records[0], True))[3:]), "```"]))
    if differ := differing(records):  # A step that was measured before keeps its record.
        pieces.append(f"**Not one experiment: the runs differ in {', '.join(differ)}.** Measure into another folder.")
    timed = {title: of_kind(run[1], SpeedLine) for title, run in runs if run}
    eager, compiled = timed.get(SPEED, []), timed.get(COMPILED, [])
    ran = {title: engine_of(run[0]) for title, run in runs if run}
    first, second = ran.get(SPEED, "eager"), ran.get(COMPILED, "compiled")
    columns = {f"here, no KV cache, {first}": (eager, NO_CACHE), f"here, KV cache, {first}": (eager, CACHED)}
    third = second if second == "compiled" else f"--compile, but {second}"
    columns[f"here, KV cache, {third}"] = compiled, CACHED
    pieces += ["## Beside the report's figures", f"**Speed**\n\n{markdown(speeds_beside(columns))}"]
    if texts := [line for _, lines in measured for line in of_kind(lines, TextPerplexityLine)]:
        pieces.append(f"**Perplexity per text**\n\n{markdown(sources.text_table(texts, True))}")
    pieces.append(NOTES)
    for title, step in runs:
        pieces.append(f"## {title}")
        if not step:
            pieces.append("Not measured.")
            continue
        run, lines = step
        pieces.append(f"{source(without_places(run), lines)} Run {run['run']}.")
        for piece in list(pieces_of_run(run, lines))[len(list(heading(run, True))) :]:
            if isinstance(piece, Table):
                pieces += filter(None, [f"**{piece.title}**", markdown(piece), piece.notes])
            elif words := str(piece):
                pieces.append(re.sub(r"^Figure: (.*)", r"![\1](\1)", words))
    return "\n\n".join(pieces) + "\n"


def engine_of(run: RunLine) -> str:
    """How a run's models ran, whatever the flags asked for."""
    kinds = {model.get("compiled", False) for model in run["models"].values()}
    return "compiled" if kinds == {True} else "compiled in part" if True in kinds else "eager"


def speeds_beside(columns: Mapping[str, tuple[Sequence[TimedText], Mapping[str, str]]]) -> Table:
    """The speeds of the course report, and beside them {title of a column: (timed texts, {role in the report: row})}.
    What was not measured is an empty cell."""
    table = Table("", ["figure", "the report, group one: best of several runs", "group two: typical", *columns])
    measured = [beside_report(*column) for column in columns.values()]
    for ((role, figure), printed), *cells in zip(sources.REPORT_SPEED.items(), *measured):
        table.add(f"{role}: {figure}", *printed, *cells)
    return table


def beside_report(lines: Sequence[TimedText], methods: Mapping[str, str]) -> list[Cell]:
    """The measured values of each figure of `sources.REPORT_SPEED`."""
    rows = {row["method"]: row for row in summarize(lines, methods["target"])}
    cells: list[Cell] = []
    for role, figure in sources.REPORT_SPEED:
        row, (field, scale) = rows.get(methods.get(role, "")), sources.FIELDS[figure]
        cells.append(span(row[field], scale) if row else "")
    return cells


if __name__ == "__main__":
    sys.exit(main())
