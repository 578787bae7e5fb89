"""`Records`: the committed measurements in docs/records/, from which every figure in the documentation comes."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from report.results import Results
from utils import UserError

Record = Any
BENCHMARKS = ("benchmark", "benchmark-pythia-2.8b")  # files that `python -m benchmark` writes


def on_machine(name: str, machine: str | None) -> str:
    """What a benchmark's record is called: without a machine it is the one that figures in running text come from."""
    return f"{name}-{machine}" if machine else name


class Records:
    """The records of the project in the folder `root`.

    index.json names runs: {"compare": "0a37afb3", ...}. results.jsonl holds these runs, in the format that test.py
    writes. benchmark*.json are the records of the benchmark: benchmark.json is the first machine's,
    benchmark-MACHINE.json another's. Records with the same content are equal.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "docs" / "records"

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all files."""
        files = sorted(self.folder.glob("*.json*"))
        return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def index(self) -> dict[str, str]:
        """{name: run}. Empty if no run was kept yet."""
        path = self.folder / "index.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def runs(self) -> dict[str, tuple[Record, list[Record]]]:
        """{run: (its own record, its measurements)}."""
        return {run["run"]: (run, lines) for run, lines in Results(self.folder).runs()}

    def run(self, name: str) -> tuple[Record, list[Record]]:
        """The record of a run and its measurements, by the run's name in the index. Raises UserError if there is no
        such run."""
        if name not in self.index:
            raise UserError(f"docs/records/index.json names no run {name!r}: see docs/records/README.md")
        if self.index[name] not in self.runs:
            raise UserError(f"run {self.index[name]} of {name!r} is not in docs/records/results.jsonl")
        return self.runs[self.index[name]]

    def benchmark(self, name: str = "benchmark") -> Record:
        """The record of a benchmark. Raises UserError if there is none."""
        return read_json(self.folder / f"{name}.json")

    def benchmarks(self, name: str) -> dict[str, Record]:
        """{file without .json: the record of a benchmark} of every machine, the first one first. Raises UserError if
        that is missing."""
        others = [path.stem for path in sorted(self.folder.glob(f"{name}-*.json"))]
        longer = tuple(each for each in BENCHMARKS if len(each) > len(name))  # "benchmark" begins all names.
        return {each: self.benchmark(each) for each in (name, *(o for o in others if not o.startswith(longer or "-")))}


def read_json(path: Path) -> Record:
    """The object in a JSON file. Raises UserError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read as a record: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path.name} is not a record: it holds no object")
    return found


def digest(record: object) -> str:
    """16 hexadecimal digits that stand for a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
