"""Measure what a first run takes: clone the last commit into an empty folder, and run README's first command there.

    python -m scripts.firstRun

Writes the seconds of each command, what was downloaded and what lies on the disk then, to docs/records/firstRun.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.runRecord import origin
from inputs.commandLine import Parser, as_command
from inputs.files import ROOT, replace_file
from utils import UserError

RECORD = ROOT / "docs" / "records" / "firstRun.json"
COMMANDS = ("make run",)
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def downloaded(log: Path) -> float:
    """The bytes that pip downloaded, by its log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    sizes = re.findall(r"Downloading \S+ \(([\d.]+) (kB|MB|GB)\)", text)
    return sum(float(number) * UNITS[unit] for number, unit in sizes)


def disk(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def measure(folder: Path) -> list[dict[str, Any]]:
    """Clone into an empty folder and run the commands, with empty caches. One line for each command."""
    clone, log, caches = folder / "clone", folder / "pip.log", folder / "caches"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environment = os.environ | {"PIP_LOG": str(log), "PIP_NO_CACHE_DIR": "1", "XDG_CACHE_HOME": str(caches)}
    lines = []
    for command in COMMANDS:
        start = time.perf_counter()
        code = subprocess.run(command.split(), cwd=clone, env=environment).returncode
        if code:
            raise UserError(f"{command} ended with exit code {code}")
        seconds = time.perf_counter() - start
        lines.append({"command": command, "seconds": seconds, "downloaded": downloaded(log), "disk": disk(folder)})
    return lines


def work(argv: Sequence[str] | None) -> None:
    """Measure and write the record."""
    Parser(prog="python -m scripts.firstRun", description=__doc__, allow_abbrev=False).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(Path(folder))
    replace_file(
        RECORD,
        json.dumps({"program": "-m scripts.firstRun"} | origin([], {}, "cpu", {}) | {"commands": lines}, indent=2)
        + "\n",
    )
    print(f"Written to {RECORD.relative_to(ROOT)}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit code."""
    return as_command("firstRun", lambda: work(argv), "Nothing was written.")


if __name__ == "__main__":
    raise SystemExit(main())
