"""`results.jsonl`, one line for each measurement, and `results.txt`, rendered from it as on the screen.

A run begins with a line of kind "run": its flags, seed, models and machine. Each line of a measurement names its run.
A line is appended in one write and fsynced: a kill loses no line that was written, and the lines of two runs at once do
not mix. The text is replaced as a whole: a reader never sees half of it.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from numpy import nan_to_num
from rich.console import RenderableType
from rich.text import Text

from experiments import schema
from experiments.intervals import summarize
from experiments.runRecord import strained
from experiments.schema import Line, Run, RunLine, of_kind
from inputs.commandLine import counted, visible
from inputs.files import replace_file
from inputs.progress import Printer
from methods.catalogue import METHODS
from report import losslessReport
from report.runTables import batch_table, engine_table, speed_notes, speed_tables, step_tables, sweep_tables
from report.sources import PERPLEXITY_NOTES, corpus_table, diversity_table, is_the_reports, text_table
from report.tables import WIDTH, Table, median, name_of, plain
from utils import UserError

NEWEST = 25  # runs that the index names
ROOM = 62  # characters of a run's date and command there


class Results:
    """The results of a folder: its `results.jsonl` (`lines`) and `results.txt` (`text`)."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.lines, self.text = Path(folder) / "results.jsonl", Path(folder) / "results.txt"

    def append(self, **record: Any) -> None:
        """Add one line, which is on disk when this returns; nan and infinity, which JSON lacks, become null.

        Raises UserError if the line cannot be written.
        """
        text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
        line = f"{text}\n".encode(errors="backslashreplace")
        try:
            with open(self.lines, "a+b", buffering=0) as file:
                if end := file.tell():
                    file.seek(end - 1)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # An earlier run was cut off in its line.
                if file.write(line) < len(line):
                    raise OSError("no space left on the device")
                os.fsync(file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.lines} cannot be written: {reason}; earlier results are kept") from None

    def records(self) -> list[dict[str, Any]]:
        """All whole lines, as dictionaries. A line that a kill cut off is skipped."""
        records = []
        if self.lines.exists():
            for line in self.lines.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
                with suppress(ValueError, RecursionError):
                    records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    def runs(self) -> list[Run]:
        """All runs, oldest first, each with its measurements so far."""
        runs: dict[str, Any] = {}  # {name: Run}
        for record in self.records():
            name = record.get("run")
            if isinstance(name, str) and record.get("kind") == "run":
                runs[name] = (record, [])
            elif isinstance(name, str) and name in runs:
                runs[name][1].append(record)
        return list(runs.values())

    def run(self, name: str) -> Run:
        """One run, with its measurements so far. Raises UserError if it is not there any more."""
        if not (found := [run for run in self.runs() if run[0]["run"] == name]):
            raise UserError(f"{self.lines} has no run {name} any more: was it moved or removed?")
        return found[0]

    def render(self) -> None:
        """Write `results.txt` from all lines, newest run first. Of several processes one reads and writes at a time: so
        the last text has the lines of all. Raises UserError if it cannot be written."""
        folder = None
        try:
            with suppress(ImportError, OSError):  # Where folders cannot be locked, as on Windows, nothing is.
                import fcntl

                folder = os.open(self.text.parent, os.O_RDONLY)
                fcntl.flock(folder, fcntl.LOCK_EX)
            replace_file(self.text, self.rendered())
        except OSError as error:
            where = f"the measurements are in {self.lines.name}"
            raise UserError(f"{self.text} cannot be written: {error.strerror or error}; {where}") from None
        finally:
            if folder is not None:
                os.close(folder)  # This releases the lock.

    def rendered(self, runs: Sequence[Run] | None = None) -> str:
        """The content of `results.txt`: a line for each of the newest runs, and all runs, newest first. runs: None for
        those of this folder."""
        index: list[tuple[int, str, str]] = []  # (line, command, headline) of each run
        shown: list[str] = []
        for run, measurements in reversed(self.runs() if runs is None else runs):
            buffer = StringIO()
            try:
                show(run, measurements, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
                command = f"{run['time'][:16]}  {run['command'] or '(no flags)'}"
                index.append((len(shown), command, headline(measurements)))
            except Exception:  # Lines of another version, whatever they hold, must not hide those of this one.
                name = visible(run["run"], "")
                buffer.write(f"Run {name} was written by another version: see {self.lines.name}.\n\n")
            shown += buffer.getvalue().splitlines()
        above, index = [f"{'line':>5}  {'run':{ROOM}}  what it found"], index[:NEWEST]
        for at, command, figure in index:
            command = command if len(command) <= ROOM else command[: ROOM - 3] + "..."
            above.append(f"{len(index) + at + 3:5}  {visible(command, ''):{ROOM}}  {figure}")
        above = [*above, ""] if len(index) > 1 else []
        return "\n".join(line.rstrip() for line in above + shown) + "\n"


def finite(value: Any) -> Any:
    """The value with None in place of each float in it that JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def headline(lines: Sequence[Line]) -> str:
    """One figure of a run: the verdict, the fastest lossless method, or a perplexity."""
    if not of_kind(lines, schema.EndLine):
        return "not finished"
    if any(line["kind"] == "lossless" and line["test"] != "engine" for line in lines):
        return "a difference" if losslessReport.exit_code(lines) else "no difference"
    speed = of_kind(lines, schema.SpeedLine)
    if speed := [line for line in speed if line["method"] in METHODS and METHODS[line["method"]].lossless]:
        last = speed[-1]["mode"], speed[-1]["promptLen"]
        texts = [line for line in speed if (line["mode"], line["promptLen"]) == last]
        queues = of_kind(lines, schema.QueueLine)
        queues = [line for line in queues if (line["mode"], line["promptLen"]) == last]
        rows = summarize(texts, queues=queues)
        best = max(rows, key=lambda row: nan_to_num(row["speedup"][0]))
        if best["method"] != "target":
            return f"{name_of(best['method'])}: {median(best['speedup'])} of plain"
        return f"plain: {median(best['throughput'])} tokens/s"
    figures = [line["ppl"]["target"] for line in of_kind(lines, schema.TextPerplexityLine)]
    return f"perplexity {figures[0]:.4f}" if figures and figures[0] is not None else ""


def show(run: RunLine, lines: Sequence[Line], **options: Any) -> None:
    """Print the report of a run: on the screen, or where the `options` of a `rich` console say."""
    pieces = list(pieces_of_run(run, lines))
    console = Printer(width=WIDTH, markup=False, emoji=False, highlight=False, **options)
    for piece in pieces:
        console.print(piece)


def pieces_of_run(run: RunLine, lines: Sequence[Line]) -> Iterator[RenderableType]:
    """Everything shown of a run, as tables and other rich renderables. lines: its measurements."""
    yield from heading(run, finished=bool(of_kind(lines, schema.EndLine)))
    yield from map(plain, strained(run, lines))
    pythia, engines = is_the_reports(run), of_kind(lines, schema.EngineLine)
    speed, of_speed = of_kind(lines, schema.SpeedLine), list[RenderableType]()
    timed: list[Any] = [*speed, *of_kind(lines, schema.QueueLine)]
    for mode, length in dict.fromkeys((line["mode"], line["promptLen"]) for line in timed):
        here = [line for line in lines if (line.get("mode"), line.get("promptLen")) == (mode, length)]
        if mode != "sweep":
            of_speed += speed_tables(run, here, engines)
        elif of_kind(here, schema.SpeedLine):
            of_speed += sweep_tables(run, here)
        else:
            of_speed.append(batch_table(here))
    yield from of_speed
    if engines:
        yield engine_table(engines)
    if steps := of_kind(lines, schema.StepLine):
        yield from step_tables(steps, [line for line in speed if line["mode"] == "compare" and "batch" not in line])
    yield from losslessReport.lossless_report(lines)
    for end in of_kind(lines, schema.EndLine):
        yield from (plain(f"Figure: {file}") for file in end.get("figures", ()))
    if speed:
        yield Text(speed_notes(speed, [piece for piece in of_speed if isinstance(piece, Table)], pythia))
    if diversity := of_kind(lines, schema.DiversityLine):
        yield diversity_table(run, diversity)
    if texts := of_kind(lines, schema.TextPerplexityLine):
        yield text_table(texts, pythia)
    if corpora := of_kind(lines, schema.CorpusPerplexityLine):
        yield corpus_table(corpora)
    if texts or corpora:
        yield Text(PERPLEXITY_NOTES)
    yield Text()


def heading(run: RunLine, finished: bool) -> Iterator[RenderableType]:
    """The command line, the models and the machine of a run."""
    machine = run["machine"]
    yield Text("=" * WIDTH)
    yield plain(f"Run {run['run']} of {run['time']}" + ("" if finished else ", not finished"))
    yield plain("python test.py " + run["command"])
    for role, model in run["models"].items():
        where = f", on {model['device']} ({model['processor']})" if "device" in model else ""
        size = f"{model['parameters'] / 1e6:,.1f} M parameters"
        yield plain(f"{role}: {model['name']}, {size}, {model['version']}{where}")
    yield plain(
        f"{machine['processor']}, {counted(machine['threads'], 'thread')}, {run['device']}; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; seed {run['flags']['seed']}"
    )
    if processes := run.get("processes"):
        places = Counter(f"{process['host']} {process['device']}" for process in processes)
        counts = [f"{count} on {place}" if count > 1 else place for place, count in places.items()]
        yield plain(f"{len(processes)} processes: {', '.join(counts)}")
