"""`results.jsonl`, one line for each measurement, and `results.txt`, rendered from it.

A run begins with a line of kind "run": its flags, seed, models and machine. Each line of a measurement names its run.
A line is appended in one write and fsynced: a kill loses nothing that was measured, and the lines of two runs at once
do not mix. The text is replaced as a whole: a reader never sees half of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from inputs.commandLine import visible
from inputs.files import replace_file
from report.lines import Line
from report.runReport import show
from utils import UserError

Run = tuple[Line, list[Line]]  # the run's own line, and its measurements


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A lock on a folder: of several processes that render its results, one reads and writes at a time. So the last
    text holds the lines of all. Where folders cannot be locked, nothing is."""
    handle = None
    with suppress(ImportError, OSError):
        import fcntl  # Windows has none.

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


class Results:
    """The results of a folder: its `results.jsonl` (`lines`) and `results.txt` (`text`)."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.lines, self.text = Path(folder) / "results.jsonl", Path(folder) / "results.txt"

    def append(self, **record: Any) -> None:
        """Add one line, which is on disk when this returns; nan, which JSON lacks, becomes null.

        Raises UserError if the line cannot be written.
        """
        record = {key: None if value != value else value for key, value in record.items()}
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        try:
            handle = os.open(self.lines, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                end = os.lseek(handle, 0, os.SEEK_END)
                if end and os.pread(handle, 1, end - 1) != b"\n":
                    line = b"\n" + line  # An earlier run was cut off in the middle of its line.
                if os.write(handle, line) < len(line):
                    raise OSError("no space left on the device")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise UserError(
                f"{self.lines} cannot be written: {error.strerror or error}; what was written before is kept"
            ) from None

    def records(self) -> list[Line]:
        """All whole lines, as dictionaries. A line that a kill cut off is skipped."""
        records = []
        if self.lines.exists():
            for line in self.lines.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
                with suppress(ValueError, RecursionError):
                    records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        runs: dict[str, Run] = {}
        for record in self.records():
            name = record.get("run")
            if not isinstance(name, str):
                continue
            if record.get("kind") == "run":
                runs[name] = (record, [])
            elif name in runs:
                runs[name][1].append(record)
        return list(runs.values())

    def run(self, name: str) -> Run:
        """One run, with its measurements so far."""
        return next(run for run in self.runs() if run[0]["run"] == name)

    def render(self) -> None:
        """Write `results.txt` from all lines, newest run first. Raises UserError if it cannot be written."""
        with locked(self.text.parent):
            text = self.rendered()
            try:
                replace_file(self.text, text)
            except OSError as error:
                reason = error.strerror or error
                raise UserError(
                    f"{self.text} cannot be written: {reason}; the measurements are in {self.lines.name}"
                ) from None

    def rendered(self) -> str:
        """The content of `results.txt`."""
        buffer = StringIO()
        for run, measurements in reversed(self.runs()):
            try:
                show(run, measurements, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
            except Exception:  # Lines of another version, whatever they hold, must not hide those of this one.
                name = visible(run["run"], "")
                buffer.write(f"Run {name} was written by another version: see {self.lines.name}.\n\n")
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
