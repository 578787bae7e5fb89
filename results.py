"""`results.jsonl`, one line a measurement, and `results.txt`, rendered from it.

A run begins with a line of kind "run" (flags, seed, models, machine); every measurement's line names its run. Lines are
appended in one write and fsynced, so a kill loses nothing that was measured and two runs at once do not mix; the text
is replaced as a whole, so it is never half there.
"""

import json
import os
import tempfile
from io import StringIO
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speed import summarize
from utils import UserError

WIDTH = 100
# Flags named above a table of speeds, with the value that needs no mention.
SHOWN = {"maxLen": None, "gamma": None, "draftLength": "fixed", "verification": "token", "temperature": None,
         "top_p": 1, "top_k": 0, "repetition_penalty": 1}
NAMES = {"draft": "draft alone", "target": "target alone", "speculative": "speculative"}
# What the course report prints for Pythia-70m and Pythia-2.8b on WikiText-2 and for its speed-up without a KV cache.
REPORT = {"draft": 84.37, "target": 17.141058, "speculative": 17.141059, "speedup": "1.8 - 2.5"}


class Results:
    """The results of a folder: `results.jsonl` and `results.txt` in it."""

    def __init__(self, folder):
        self.lines, self.text = Path(folder) / "results.jsonl", Path(folder) / "results.txt"

    def append(self, **record):
        """Add one line, on disk when this returns; nan, which JSON lacks, is null. Raises UserError where it cannot be
        written."""
        record = {key: None if value != value else value for key, value in record.items()}
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        try:
            handle = os.open(self.lines, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                end = os.lseek(handle, 0, os.SEEK_END)
                if end and os.pread(handle, 1, end - 1) != b"\n":
                    line = b"\n" + line  # an earlier run was cut off in the middle of its line
                if os.write(handle, line) < len(line):
                    raise OSError("no space left on the device")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise UserError(f"{self.lines} cannot be written: {error.strerror or error}; what was written before is "
                            "kept") from None

    def records(self):
        """All whole lines, as dictionaries. A line cut off by a kill is passed over."""
        records = []
        if self.lines.exists():
            for line in self.lines.read_text(encoding="utf-8", errors="replace").split("\n"):
                try:
                    records.append(json.loads(line))
                except ValueError:
                    continue
        return [record for record in records if isinstance(record, dict)]

    def runs(self):
        """[(the run's own record, its measurements)], oldest first."""
        runs = {}
        for record in self.records():
            if record.get("kind") == "run":
                runs[record["run"]] = (record, [])
            elif record.get("run") in runs:
                runs[record["run"]][1].append(record)
        return list(runs.values())

    def render(self):
        """Write `results.txt` from all records, newest run first."""
        buffer, file = StringIO(), None
        for run, measurements in reversed(self.runs()):
            try:
                show(run, measurements, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
            except (KeyError, TypeError):  # lines of another version must not keep today's from being shown
                buffer.write(f"Run {run['run']} was written by another version: see {self.lines.name}.\n\n")
        text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
        try:
            with tempfile.NamedTemporaryFile("w", dir=self.text.parent, prefix=".results", delete=False,
                                             encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, self.text)
        except OSError as error:
            raise UserError(f"{self.text} cannot be written: {error.strerror or error}; the measurements are in "
                            f"{self.lines.name}") from None
        finally:
            if file:
                Path(file.name).unlink(missing_ok=True)


def show(run, measurements, **options):
    """Print a run's report on the screen, or where the `options` of a `rich` console say."""
    pieces = list(report(run, measurements))
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False, **options)
    for piece in pieces:
        console.print(piece)


def plain(value):
    """Text for the screen with no markup and no control characters: names may come from anywhere."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)))


def number(value, digits):
    """A figure that keeps to its column: in powers of ten from a million up."""
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}e}"


def span(interval, scale=1.0):
    """A median to about three digits, and its 95 % interval on a second line."""
    digits = next((2 - power for power in (0, 1) if max(interval) * scale < 10 ** (power + 1)), 0)
    middle, low, high = (f"{value * scale:.{digits}f}" for value in interval)
    return middle if low == high or low == "nan" else f"{middle}\n[{low}, {high}]"


def grid(title, columns):
    """A table whose numbers are never cut: where it is too wide, the names in its first column are folded."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False,
                  padding=(0, 0, 0, 1), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    return table


def report(run, measurements):
    """Everything shown of a run, as rich renderables: the same on screen and in `results.txt`."""
    flags, machine = run["flags"], run["machine"]
    yield Text("=" * WIDTH)
    yield plain(f"Run {run['run']} of {run['time']}" + ("" if finished(measurements) else ", not finished"))
    yield plain("python test.py " + run["command"])
    for role, model in run["models"].items():
        yield plain(f"{role}: {model['name']}, {model['parameters'] / 1e6:,.1f} M parameters, {model['version']}")
    yield plain(f"{machine['processor']}, {machine['threads']} threads, {run['device']}; torch {machine['torch']}, "
                f"transformers {machine['transformers']}; seed {flags['seed']}")
    pythia = run["models"]["target"]["name"] == "pythia-2.8b" and run["models"]["draft"]["name"] == "pythia-70m"
    speed = [m for m in measurements if m["kind"] == "speed"]
    for length in dict.fromkeys(m.get("promptLen") for m in speed):
        group = [m for m in speed if m.get("promptLen") == length]
        rows = summarize(group)
        yield speed_table(run, group, rows)
        yield from acceptance(rows)
    if speed:
        yield Text(speed_notes(speed, pythia))
    for kind, table in (("ppl_text", text_table), ("ppl_corpus", corpus_table)):
        chosen = [m for m in measurements if m["kind"] == kind]
        if chosen:
            yield table(chosen, pythia)
    yield Text()


def finished(measurements):
    return any(m["kind"] == "end" for m in measurements)


def speed_table(run, measurements, rows):
    flags = run["flags"]
    prompts = len({m["prompt"] for m in measurements})
    low, high = (f(m["prompt_tokens"] for m in measurements) for f in (min, max))
    shown = "".join(f"{name} {flags[name]}, " for name, off in SHOWN.items() if flags.get(name, off) != off)
    table = grid(f"Speed: {prompts} prompts of {low if low == high else f'{low} to {high}'} tokens, {shown}"
                 + measurements[0]["dtype"],
                 ["", "TTFT ms", "TPOT ms", "tokens/s", "speed-up", "alpha", "tokens/\nround", "total/n\nms"])
    for row in rows:
        alone = row["method"] != "speculative"
        table.add_row(NAMES.get(row["method"], row["method"]), span(row["ttft"], 1e3), span(row["tpot"], 1e3),
                      span(row["throughput"]), span(row["speedup"]), "" if alone else f"{row['alpha']:.3f}",
                      "" if alone else span(row["tokens_per_round"]), span(row["report_tpot"][:1] * 3, 1e3))
    return table


def acceptance(rows):
    for row in rows:
        if row["method"] == "speculative" and row["acceptance_by_position"]:
            yield Text("Acceptance by position in the round: "
                       + ", ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"]) + ".")


def speed_notes(measurements, pythia):
    repeats = len({m["repeat"] for m in measurements})
    return (f"Medians over prompts and {repeats} interleaved repeats [95 % bootstrap interval]; speed-up: median of "
            "paired throughput ratios to the target alone. total/n: the report's time per token."
            + (f"\nThe report measured a speed-up of {REPORT['speedup']} (without a KV cache)." if pythia else ""))


def text_table(measurements, pythia):
    table = grid(f"Perplexity per text (mean over texts of at least {measurements[0]['sentenceLimit']} characters), "
                 + measurements[0]["dtype"],
                 ["", "texts", "tokens", "draft", "target", "speculative", "relative\ndifference"])
    for m in measurements:
        ppl = m["ppl"]
        table.add_row(plain(m["corpus"]), str(m["texts"]), f"{m['tokens']:,}", number(ppl["draft"], 4),
                      number(ppl["target"], 6), number(ppl["speculative"], 6), difference(ppl))
    if pythia:
        table.add_row("the report (WikiText-2)", "", "", str(REPORT["draft"]), str(REPORT["target"]),
                      str(REPORT["speculative"]), difference(REPORT))
    return table


def corpus_table(measurements, pythia):
    first = measurements[0]
    table = grid(f"Perplexity of the corpus (windows of {first['window']} tokens, stride {first['stride']}), "
                 + first["dtype"],
                 ["", "tokens", "per", "draft", "target", "speculative", "relative\ndifference"])
    for m in measurements:
        for unit in ("token", "word", "byte"):
            ppl = {role: m["ppl"][role][unit] for role in ("draft", "target", "speculative")}
            lead = (plain(m["corpus"]), f"{m['tokens']:,}") if unit == "token" else ("", "")
            table.add_row(*lead, unit, number(ppl["draft"], 4), number(ppl["target"], 6), number(ppl["speculative"], 6),
                          difference(ppl))
    return table


def difference(ppl):
    """Of the speculative perplexity from the target's, relative."""
    return f"{abs(ppl['speculative'] / ppl['target'] - 1):.1e}"
