"""Keep a record for the documentation: copy a run into docs/records/.

    python -m scripts.keepRecord compare 0a37afb3 --from FOLDER     a run of FOLDER/results.jsonl, as "compare"
    python -m scripts.keepRecord compare 1 2 3 4 5 --from FOLDER    the newest five, of one command: five processes
    python -m scripts.keepRecord chat --from FOLDER                 FOLDER/chat.json, or another file of one record

A record replaces the one that was kept under its name. The project's results.txt is that of "first", `python test.py`.
`python -m scripts.render` then writes the documentation and draws its pictures.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from experiments.intervals import summarize
from experiments.runRecord import choose_run
from experiments.schema import EndLine, Line, Run, RunLine, SpeedLine, of_kind
from inputs.commandLine import as_command, counted, path, script_parser, text
from inputs.files import ROOT, library_errors, replace_file
from inputs.models import read_json
from report.results import Results
from utils import UserError

TIMED = ("speed", "queue")  # kinds of lines that each process of a record has
PLACES = ("--out", "--texts")  # flags that name a folder of the machine


class Records:
    """The committed measurements of the project in the folder `root`: every figure in its documentation is of them.

    In docs/records/, index.json names runs: {"compare": "0a37afb3", ...}; results.jsonl holds them, as test.py writes;
    the others are records of one file: rounds.json and the like. `records["compare"]` is a run with its measurements,
    `records["rounds"]` the record of that file, with none.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "docs" / "records"
        self.files = {file.stem: read_json(file) for file in sorted(self.folder.glob("*.json"))}
        index, runs = (
            self.files.pop("index", {}),
            {run["run"]: (run, lines) for run, lines in Results(self.folder).runs()},
        )
        self.runs: dict[str, Run] = {name: runs[run] for name, run in index.items() if run in runs}

    def __getitem__(self, name: str) -> tuple[Any, list[Line]]:
        """A record by its name. Raises UserError if there is none."""
        if name in self.runs:
            return self.runs[name]
        if name not in self.files:
            raise UserError(f"there is no record {name!r} in docs/records/")
        return self.files[name], []


def command_of(record: Mapping[str, Any]) -> str:
    """The command line of a run, or of the program that a record names."""
    if record["command"].startswith("make "):
        return record["command"]
    return f"python {record.get('program', 'test.py')} {record['command']}".rstrip()


def source(record: Mapping[str, Any], lines: Iterable[Line] = ()) -> str:
    """The line under a table: how, with what and where its figures were measured, and the dtype of timed texts."""
    machine, models = record["machine"], ", ".join(model["name"] for model in record["models"].values())
    dtype = next((line["dtype"] for line in of_kind(lines, SpeedLine)), record.get("dtype"))
    place = f"{machine['processor']}, {counted(machine['threads'], 'thread')}, {record['device']}"
    parts = f"`{command_of(record)}`", place, models, dtype, f"torch {machine['torch']}", record["time"][:10]
    return "; ".join(filter(None, parts)) + "."


def differing(runs: Iterable[RunLine]) -> list[str]:
    """In what runs differ that should be one experiment. A run whose code was not recorded is like no other."""
    runs = list(runs)
    versions = {(model["name"], model["version"]) for run in runs for model in run["models"].values()}
    of_all: dict[str, list[Any]] = {"machine": [run["machine"] for run in runs]}
    of_all["code"] = [run.get("code") or run["run"] for run in runs]
    differ = [what for what, values in of_all.items() if any(value != values[0] for value in values)]
    return differ + ["weights"] * (len(versions) > len(dict(versions)))  # two versions of one name


def without_places(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the folders of the machine it was made on. Of a path from the root, the last name is left."""
    flags = {key: last_name(value) for key, value in record["flags"].items() if f"--{key}" not in PLACES}
    result = dict(record) | {"flags": flags, "command": command_without_places(shlex.split(record["command"]))}
    result.pop("folder", None)
    return result


def command_without_places(argv: Sequence[str]) -> str:
    words, place = [], False  # place: among the values of a flag of PLACES
    for word in argv:
        place = word in PLACES if word.startswith("--") else place
        words += [] if place or word.split("=")[0] in PLACES else [last_name(word)]
    return shlex.join(words)


def last_name(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def of_processes(runs: Sequence[Run]) -> Run:
    """One record of several runs of one command: all their timed texts with the number of the process, and what else
    the first one measured. Raises UserError if they differ or were not finished, or if a figure cannot be right."""
    for run, lines in runs:
        if not of_kind(lines, EndLine):
            raise UserError(f"run {run['run']} was not finished; keep a finished one")
    heads, (run, lines) = [run for run, _ in runs], runs[0]
    if differing(heads) or any(head["command"] != run["command"] for head in heads):
        names = ", ".join(head["run"] for head in heads)
        raise UserError(f"runs {names} differ in command, code, machine or weights: keep one")
    numbered = [line | {"process": i} for i, (_, body) in enumerate(runs) for line in body if line["kind"] in TIMED]
    timed = cast(list[Line], numbered if len(runs) > 1 else [line for line in lines if line["kind"] in TIMED])
    groups: dict[Any, list[Any]] = {}
    for line in of_kind(timed, SpeedLine):
        groups.setdefault(tuple(line[key] for key in ("mode", "promptLen", "temperature")), []).append(line)
    for row in chain.from_iterable(map(summarize, groups.values())):
        if row["drafted"] and row["speedup"].low > (most := row["tokens_per_round"].high):
            fast = f"{row['method']} is {row['speedup'].middle:.2f} times as fast as plain decoding"
            wrong = f"but a round commits at most {most:.2f} tokens: a fault of the measurement"
            raise UserError(f"{fast}, {wrong}; was the machine busy? Measure again")
    return run, timed + [line for line in lines if line["kind"] not in TIMED]


def keep_record(root: Path, argv: Sequence[str] | None) -> None:
    """Copy a record into docs/records/ under a name. The project's results.txt is that of the run "first"."""
    parser = script_parser("python -m scripts.keepRecord", __doc__)
    parser.add_argument("name", type=text, metavar="NAME", help="first, compare, sweep, ..., or of a file")
    parser.add_argument("run", type=text, nargs="*", metavar="RUN", help="a run's name; 1 is the newest")
    parser.add_argument("--from", dest="folder", type=path, default=ROOT, metavar="FOLDER", help="(the project's)")
    args = parser.parse_args(argv)
    name, file, records = args.name, args.folder / f"{args.name}.json", Records(root)
    if name == "index" or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"a record cannot have the name {name!r}: it takes letters, digits, dots, - and _")
    if args.run:
        store = Results(args.folder)
        with library_errors(f"{store.lines} has no whole record of it", "measure it again with this version"):
            run, lines = of_processes([choose_run(store.runs(), store.lines, one) for one in args.run])
            records.runs[name] = cast(RunLine, without_places(run)), lines
        for end in of_kind(lines, EndLine):  # The figure of a run that is kept has a name of its own in figures/.
            end["figures"] = [f"figures/{name}.png"] if end.get("figures") else []
        index = {key: head["run"] for key, (head, _) in records.runs.items()}
        by_time = sorted(records.runs.values(), key=lambda kept: kept[0]["time"])
        runs = {head["run"]: [head, *body] for head, body in by_time}
        written = [json.dumps(line, ensure_ascii=False) for run_lines in runs.values() for line in run_lines]
        replace_file(records.folder / "results.jsonl", "\n".join(written) + "\n")
        replace_file(records.folder / "index.json", json.dumps(index, indent=2) + "\n")
        if name == "first":
            replace_file(root / "results.txt", Results(root).rendered([records.runs[name]]))
    elif file.exists():
        with library_errors(f"{file} is no record", "name another file"):
            record = json.dumps(without_places(read_json(file)), ensure_ascii=False)
        replace_file(records.folder / file.name, record + "\n")
    else:
        raise UserError(f"name the run to keep as {name!r}, or 1 for the newest")
    print(f"Kept as {name!r}. Now render the documentation: python -m scripts.render")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    return as_command("keepRecord", lambda: keep_record(root, argv), "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
