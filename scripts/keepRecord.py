"""Keep a record for the documentation: copy a run, or the benchmark's records, into docs/records/.

    python -m scripts.keepRecord compare 0a37afb3 --from FOLDER     a run of FOLDER/results.jsonl, as "compare"
    python -m scripts.keepRecord benchmark --from FOLDER            FOLDER/benchmark*.json
    python -m scripts.keepRecord benchmark --from FOLDER --machine NAME     the same, of a second machine

A record replaces the one that was kept under its name. results.txt is rendered from the runs that are kept. The
benchmark's tables show all machines; figures in running text are those of the record without a machine's name.
`python -m scripts.renderDocs` then writes the documentation and draws its pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from inputs.commandLine import Parser, as_command, path, text
from inputs.files import ROOT, replace_file
from report.results import Results
from scripts.docsPictures import PICTURES
from scripts.docsRecords import BENCHMARKS, Record, Records, on_machine, read_json
from utils import UserError


def without_places(record: Record) -> Record:
    """A record without the folders of the machine it was made on."""
    kept = {key: value for key, value in record.items() if key != "folder"}
    if "flags" in kept:
        kept["flags"] = {key: value for key, value in kept["flags"].items() if key != "out"}
    if "command" in kept:
        words = shlex.split(kept["command"])
        while "--out" in words:
            at = words.index("--out")
            del words[at : at + 2]
        kept["command"] = shlex.join(word for word in words if not word.startswith("--out="))
    return kept


def choose(store: Results, asked: str) -> tuple[Record, list[Record]]:
    """The run `asked` of a folder's results: by name, or 1 for the newest, 2 for the one before. Raises UserError for a
    run that is not there or was not finished."""
    runs = {run["run"]: (run, lines) for run, lines in store.runs()}
    if asked not in runs and asked.isascii() and asked.isdecimal() and 1 <= int(asked[:9]) <= len(runs):
        asked = list(runs)[-int(asked[:9])]
    if asked not in runs:
        raise UserError(f"{store.lines} has no run {asked}; it has: {', '.join(list(runs)[-9:]) or 'none'}")
    run, lines = runs[asked]
    if not any(line["kind"] == "end" for line in lines):
        raise UserError(f"run {asked} was not finished: keep a whole one")
    return run, lines


def keep_run(name: str, asked: str, folder: Path, root: Path) -> str:
    """Copy a run into docs/records/ under a name; returns the run's own name."""
    records = Records(root)
    run, lines = choose(Results(folder), asked)
    index = dict(records.index) | {name: run["run"]}
    kept = {each: records.runs[each] for each in index.values() if each in records.runs and each != run["run"]}
    pictures = {f"figures/{each}.png" for each in index} & set(PICTURES)
    own = [line | {"file": f"figures/{name}.png"} if names_picture(line, name, pictures) else line for line in lines]
    kept[run["run"]] = without_places(run), own
    in_order = sorted(kept.values(), key=lambda each: each[0]["time"])
    records.folder.mkdir(parents=True, exist_ok=True)
    written = [json.dumps(line, ensure_ascii=False) for run, own in in_order for line in (run, *own)]
    replace_file(records.folder / "results.jsonl", "\n".join(written) + "\n")
    replace_file(records.folder / "index.json", json.dumps(index, indent=2) + "\n")
    show_runs(root)
    return run["run"]


def names_picture(line: Record, name: str, pictures: set[str]) -> bool:
    """Whether a line names the picture of its run, which has a name of its own in figures/."""
    return line["kind"] == "figure" and f"figures/{name}.png" in pictures


def show_runs(root: Path) -> None:
    """Render results.txt of the project from the runs that are kept."""
    store = Results(root / "docs" / "records")
    store.text = root / "results.txt"
    store.render()


def machine_name(value: str) -> str:
    """A name that a file's name can hold."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.]*", value):
        raise argparse.ArgumentTypeError("takes small letters, digits and dots")
    return value


def keep_benchmarks(folder: Path, root: Path, machine: str | None = None) -> list[str]:
    """Copy the benchmark's records of a folder into docs/records/; returns their names there."""
    names = [name for name in BENCHMARKS if (folder / f"{name}.json").exists()]
    if not names:
        raise UserError(f"{folder} has neither of {', '.join(f'{name}.json' for name in BENCHMARKS)}")
    kept = {name: on_machine(name, machine) for name in names}
    for name, as_name in kept.items():
        record = without_places(read_json(folder / f"{name}.json"))
        replace_file(root / "docs" / "records" / f"{as_name}.json", json.dumps(record, ensure_ascii=False) + "\n")
    return list(kept.values())


def work(root: Path, argv: Sequence[str] | None) -> int:
    """Parse the flags and copy."""
    parser = Parser(
        prog="python -m scripts.keepRecord",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", type=text, metavar="NAME", help="first, compare, sweep, diversity, lossless, benchmark")
    parser.add_argument("run", type=text, nargs="?", metavar="RUN", help="a run's name; 1 is the newest")
    parser.add_argument(
        "--from", dest="folder", type=path, default=ROOT, metavar="FOLDER", help="(the project's folder)"
    )
    parser.add_argument(
        "--machine",
        type=machine_name,
        metavar="NAME",
        help="keep the benchmark beside the first: of another machine, or beside other engines",
    )
    args = parser.parse_args(argv)
    if args.machine and args.name != "benchmark":
        raise UserError("--machine is for the benchmark")
    if args.name == "benchmark":
        if args.run:
            raise UserError("the benchmark's records are whole files: leave out RUN")
        print(f"Kept: {', '.join(keep_benchmarks(args.folder, root, args.machine))}")
    elif not args.run:
        raise UserError(f"name the run to keep as {args.name!r}, or 1 for the newest")
    else:
        print(f"Kept: run {keep_run(args.name, args.run, args.folder, root)} as {args.name!r}; results.txt shows it.")
    print("Now render the documentation: python -m scripts.renderDocs")
    return 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line `argv` on the records in the folder `root`; returns the exit code."""
    return as_command("keepRecord", partial(work, root, argv), "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
