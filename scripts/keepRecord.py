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
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from experiments.intervals import summarize
from experiments.runRecord import choose_run
from experiments.schema import EndLine, Line, Run, RunLine, SpeedLine, of_kind
from inputs.commandLine import as_command, counted, path, script_parser, text
from inputs.files import ROOT, replace_file
from report.results import Results
from utils import UserError

TIMED = ("speed", "queue")  # kinds of lines that each process of a record has
PLACES = ("--out", "--texts")  # flags that name a folder of the machine


class Records:
    """The committed measurements of the project in the folder `root`: every figure in its documentation is of them.

    In docs/records/, index.json names runs: {"compare": "0a37afb3", ...}; results.jsonl holds them, as test.py writes;
    the others are records of one file: rounds.json and the like. Equal contents are equal, so that blocks are cached.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "docs" / "records"
        self.files = {file.stem: read_object(file) for file in sorted(self.folder.glob("*.json"))}
        self.index: dict[str, str] = self.files.pop("index", {})  # {name: run}
        self.runs: dict[str, Run] = {run["run"]: (run, lines) for run, lines in Results(self.folder).runs()}
        self.content = json.dumps([self.files, self.index, self.runs])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def run(self, name: str) -> Run:
        """A run by its name in the index: its record, and its measurements. Raises UserError if there is none."""
        run = self.index.get(name, "(not in index.json)")
        if run not in self.runs:
            raise UserError(f"run {run} of {name!r} is not in docs/records/results.jsonl")
        return self.runs[run]

    def file(self, name: str) -> dict[str, Any]:
        """The record of a file by its name without .json. Raises UserError if it does not exist."""
        if name not in self.files:
            raise UserError(f"there is no docs/records/{name}.json")
        return self.files[name]


def command_of(record: Mapping[str, Any]) -> str:
    """The command line of a run, or of the program that a record names."""
    if record["command"].startswith("make "):
        return record["command"]
    return f"python {record.get('program', 'test.py')} {record['command']}".rstrip()


def source(record: Mapping[str, Any], dtype: str = "") -> str:
    """The line under a table: how, with what and where its figures were measured."""
    machine, models = record["machine"], ", ".join(model["name"] for model in record["models"].values())
    place = f"{machine['processor']}, {counted(machine['threads'], 'thread')}, {record['device']}"
    parts = f"`{command_of(record)}`", place, models, dtype, f"torch {machine['torch']}", record["time"][:10]
    return "; ".join(filter(None, parts)) + "."


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError if there is none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        return record
    except (OSError, ValueError) as error:
        raise UserError(f"{file.name} cannot be read as a record: {error}") from None


def without_places(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the folders of the machine it was made on. Of a path from the root, the last name is left."""

    def last_name(value: Any) -> Any:
        return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value

    result = {key: value for key, value in record.items() if key != "folder"}
    if "flags" in result:
        result["flags"] = {key: last_name(value) for key, value in result["flags"].items() if f"--{key}" not in PLACES}
    if "command" in result:
        words, place = [], False  # place: among the values of a flag of PLACES
        for word in shlex.split(result["command"]):
            place = word in PLACES if word.startswith("--") else place
            words += [] if place or word.split("=")[0] in PLACES else [last_name(word)]
        result["command"] = shlex.join(words)
    return result


def of_processes(runs: Sequence[Run]) -> Run:
    """One record of several runs of one command: all their timed texts with the number of the process, and what else
    the first one measured. Raises UserError if they differ, or if a figure cannot be right."""
    run, lines = runs[0]
    for other, _ in runs[1:]:
        if (other["command"], other["code"], other["machine"]) != (run["command"], run["code"], run["machine"]):
            raise UserError(f"runs {run['run']} and {other['run']} differ in command, code or machine: keep one")
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


def keep_run(name: str, chosen: Sequence[Run], root: Path) -> None:
    """Copy a run into docs/records/ under a name, or several as one of several processes. The project's results.txt is
    that of the run "first"."""
    (run, lines), records = of_processes(chosen), Records(root)
    for end in of_kind(lines, EndLine):  # The figure of a run that is kept has a name of its own in figures/.
        end["figures"] = [f"figures/{name}.png"] if end.get("figures") else []
    index = records.index | {name: run["run"]}
    runs = {key: records.runs[key] for key in index.values() if key in records.runs}
    runs[run["run"]] = cast(RunLine, without_places(run)), lines
    in_order = sorted(runs.values(), key=lambda pair: pair[0]["time"])
    written = [json.dumps(line, ensure_ascii=False) for head, body in in_order for line in (head, *body)]
    replace_file(records.folder / "results.jsonl", "\n".join(written) + "\n")
    replace_file(records.folder / "index.json", json.dumps(index, indent=2) + "\n")
    if name == "first":
        replace_file(root / "results.txt", Results(root).rendered([Records(root).run(name)]))
    print(f"Kept: run {run['run']} as {name!r}.")


def keep_record(root: Path, argv: Sequence[str] | None) -> None:
    parser = script_parser("python -m scripts.keepRecord", __doc__)
    parser.add_argument("name", type=text, metavar="NAME", help="first, compare, sweep, ..., or of a file")
    parser.add_argument("run", type=text, nargs="*", metavar="RUN", help="a run's name; 1 is the newest")
    parser.add_argument("--from", dest="folder", type=path, default=ROOT, metavar="FOLDER", help="(the project's)")
    args = parser.parse_args(argv)
    if args.name == "index" or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", args.name):
        raise UserError(f"a record cannot have the name {args.name!r}: it takes letters, digits, dots, - and _")
    file = args.folder / f"{args.name}.json"
    if not args.run and file.exists():
        record = json.dumps(without_places(read_object(file)), ensure_ascii=False)
        replace_file(root / "docs" / "records" / file.name, record + "\n")
        print(f"Kept: {args.name}")
    elif not args.run:
        raise UserError(f"name the run to keep as {args.name!r}, or 1 for the newest")
    else:
        store = Results(args.folder)
        chosen = [choose_run(store.runs(), store.lines, one) for one in args.run]
        for run, lines in chosen:
            if not of_kind(lines, EndLine):
                raise UserError(f"run {run['run']} was not finished; keep a finished one")
        keep_run(args.name, chosen, root)
    print("Now render the documentation: python -m scripts.render")


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    return as_command("keepRecord", lambda: keep_record(root, argv), "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
