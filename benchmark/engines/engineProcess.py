"""`Child`: the process of an engine, seen from the benchmark."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from benchmark.engines.engineModule import SITE
from inputs.folders import ROOT

WAIT = 1800.0  # seconds for an answer; converting a large model takes minutes
COMMAND = (sys.executable, "-m", "benchmark.engines.worker")
REASON = 200  # characters of a reason


class PeerError(Exception):
    """An engine failed. Its text is one line that says why."""


def one_line(words: str) -> str:
    """A reason in one line, not too long."""
    line = " ".join(words.split())
    return line if len(line) <= REASON else line[: REASON - 4] + " ..."


class Child:
    """A child process that speaks JSON lines, and makes itself a process group (worker.py).

    Between two questions the whole group is stopped, so that no thread of an idle engine takes time from the row that
    is being measured.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
        threads = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the child
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            env=threads | {"PYTHONPATH": path},
            cwd=ROOT,
        )

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The answer to a message. Raises PeerError if there is none, or if it is an error."""
        assert self.process.stdin and self.process.stdout
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps({"do": do} | fields) + "\n")
            self.process.stdin.flush()
            line = self.line(WAIT)
        except OSError:
            line = ""
        if not line:
            raise PeerError(self.last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(one_line(answer["error"]))
        self.signal(signal.SIGSTOP)
        return answer

    def line(self, wait: float) -> str:
        """The next line of the child; empty if it ended. Raises PeerError if it takes too long."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], wait)[0]:
            raise PeerError(f"it did not answer within {wait:.0f} s")
        return self.process.stdout.readline()

    def last_words(self) -> str:
        """Why the child ended: the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        return one_line(f"its process ended with exit code {self.process.poll()}: {(lines or ['no message'])[-1]}")

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process and all that it started."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream:
                with suppress(OSError):
                    stream.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
