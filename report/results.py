"""`results.jsonl`, one line a measurement, and `results.txt`, rendered from it.

A run begins with a line of kind "run" (flags, seed, models, machine); every measurement's line names its run. Lines are
appended in one write and fsynced, so a kill loses nothing that was measured and two runs at once do not mix; the text
is replaced as a whole, so it is never half there.
"""

import json
import os
import tempfile
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path

from inputs.escape import visible
from report.runReport import show
from utils import UserError


@contextmanager
def alone(folder):
    """Of processes that render a folder's results at once, one at a time: the last to read them is the last to write,
    and shows all. Where folders cannot be locked they take their chance."""
    handle = None
    with suppress(ImportError, OSError):
        import fcntl  # Windows has none

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


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
            raise UserError(
                f"{self.lines} cannot be written: {error.strerror or error}; what was written before is kept"
            ) from None

    def records(self):
        """All whole lines, as dictionaries. A line cut off by a kill is passed over."""
        records = []
        if self.lines.exists():
            for line in self.lines.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
                with suppress(ValueError, RecursionError):
                    records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    def runs(self):
        """[(the run's own record, its measurements)], oldest first."""
        runs = {}
        for record in self.records():
            name = record.get("run")
            if not isinstance(name, str):
                continue
            if record.get("kind") == "run":
                runs[name] = (record, [])
            elif name in runs:
                runs[name][1].append(record)
        return list(runs.values())

    def run(self, name):
        """(record, measurements so far) of one run."""
        return next(run for run in self.runs() if run[0]["run"] == name)

    def render(self):
        """Write `results.txt` from all records, newest run first."""
        with alone(self.text.parent):
            self.replace()

    def replace(self):
        buffer, file = StringIO(), None
        for run, measurements in reversed(self.runs()):
            try:
                show(run, measurements, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
            except Exception:  # lines of another version, whatever they hold, must not keep today's from being shown
                name = visible(run["run"], "")
                buffer.write(f"Run {name} was written by another version: see {self.lines.name}.\n\n")
        text = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=self.text.parent, prefix=".results", delete=False, encoding="utf-8"
            ) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, self.text)
        except OSError as error:
            raise UserError(
                f"{self.text} cannot be written: {error.strerror or error}; the measurements are in {self.lines.name}"
            ) from None
        finally:
            if file:
                Path(file.name).unlink(missing_ok=True)
