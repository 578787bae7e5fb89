"""Measure the records of the documentation, and keep them in docs/records/.

    python -m scripts.keepRecord                   every record that other code measured: hours, on an idle machine
    python -m scripts.keepRecord compare head      these
    python -m scripts.keepRecord chat --from DIR   DIR/chat.json, the record of one file, which its own command wrote
    python -m scripts.keepRecord first --carry WHY let the records of the code that measured these stay: see below

The runs of a record are written to .records/, or to DIR. Finished runs of the same code and flags that are there are
not measured again, so it goes on where it was stopped. Records without times may be measured there beforehand by
several processes (`accelerate launch --multi_gpu --num_processes 2 test.py --lossless ... --out .records`). A record
replaces the one that was kept under its name. The project's results.txt is that of "first", `python test.py`.
`python -m scripts.render` then writes the documentation.

Not every change of the code changes what it measures: it may refuse a model that no record has. `--carry WHY` repeats
the named records with the code of today (`test.py --rerun`). If every text and figure that flags and seed fix is the
same, carried.json says so, and the records of the older code count as of today's. The reason should say why no time
changes either, since a repetition compares none.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from experiments.intervals import too_fast
from experiments.runRecord import comparable, compare, is_of_now
from experiments.schema import EndLine, EngineLine, Line, Run, RunLine, SpeedLine, StepLine, of_kind
from inputs.commandLine import as_script, did_you_mean, path, script_parser, text
from inputs.files import ROOT, library_errors, replace_file
from inputs.models import model_version, read_json
from report.results import Results
from report.runTables import finished, measured_on
from utils import UserError

REAL, COMPILED = "--target SmolLM2-135M-Instruct", "--compile --repeats 1"
RANDOM = "--target random:pythia-2.8b --draft random:pythia-70m --acceptance 0.6"
COPY_OF_RANDOM = "--target random:pythia-2.8b --draft self --draftBits 4 --acceptance 0.9"
FAST = "llama.cpp:plain,llama.cpp:bfloat16,llama.cpp:int8,llama.cpp:int4,llama.cpp:q4_0"
UNAIDED = (  # the methods of other programs that need no draft model
    f"generate:plain,generate:compiled,generate:lookup,{FAST},llama.cpp:lookup,llama.cpp:copy,"
    "openvino:plain,openvino:lookup,openvino:int8,ctranslate2,vllm:plain,vllm:lookup"
)
PLAIN = f"{FAST},generate:compiled,openvino:plain,openvino:int8,ctranslate2,vllm:plain"
OWN_COPY, OF_128 = f"{REAL} --draft self --draftBits 6", f"{COMPILED} --maxLen 128 --sentences 10"
OTHERS = "generate,llama.cpp,openvino,ctranslate2,vllm"
MEASURED = {  # {name: (flags of test.py, processes)}, what README.md shows first
    "first": ("", 1),
    "compare": ("--compare all --repeats 1 --sentences 5", 5),
    "head": (f"--compare head,fixed,block {COMPILED} --sentences 40", 5),
    "benchmark-SmolLM2": (f"--compare self,lookup,{UNAIDED} --steps {OWN_COPY} {OF_128}", 5),
    "greedy-SmolLM2": (f"--compare self,lookup,{PLAIN} {OWN_COPY} --temperature 0 {OF_128}", 5),
    "top-k-SmolLM2": (f"--compare self,{FAST} {OWN_COPY} --top_k 40 {OF_128}", 5),
    "tuned-SmolLM2": (f"--compare self,{FAST} {OWN_COPY} {OF_128}", 5),
    **dict.fromkeys(
        ("avx2-SmolLM2", "avx512-SmolLM2"),
        (f"--compare self,lookup,{FAST},llama.cpp:lookup,openvino:int8 --steps {OWN_COPY} {OF_128}", 5),
    ),
    "head-tree": (f"--draft head --compare fixed,block,tree,costAware {COMPILED} --sentences 40", 5),
    "categories-SmolLM2": (f"--compare lookup,block,self {OWN_COPY} {COMPILED} --prompts sample --maxLen 64", 5),
    "batch-copy": (f"--sweep batch --compile --maxLen 64 --sentences 16 --repeats 3 {OWN_COPY}", 1),
    "batch-bundled": ("--sweep batch --compile --maxLen 400 --sentences 16 --repeats 4", 1),
    "sweep": ("--sweep --temperature 0 0.5 0.85 1 --repeats 1 --sentences 6", 1),
    "categories": (f"--compare fixed,block,lookup,lookupFirst {COMPILED} --prompts sample --maxLen 96", 5),
    "lossless": ("--lossless all --tokens 12800 --dtype bfloat16 --compile", 1),
    "diversity": ("--diversity --repeats 10", 1),
    "benchmark": (f"--compare all,{OTHERS} --steps {COMPILED} --maxLen 300 --sentences 4", 5),
    "benchmark-pythia": (
        f"--compare fixed,block,self,{OTHERS} --steps {RANDOM} {COMPILED} --maxLen 48 --sentences 1",
        2,
    ),
    "gpu": (f"--compare fixed,block,tree {RANDOM} --compile --repeats 2 --maxLen 128 --sentences 4", 1),
    "gpu-copy": (f"--compare self {COPY_OF_RANDOM} --compile --repeats 2 --maxLen 64 --sentences 4", 1),
}
OF_AMX = "benchmark-SmolLM2", "greedy-SmolLM2", "top-k-SmolLM2", "tuned-SmolLM2", "batch-copy", "categories-SmolLM2"
# Of the processor, by torch (AVX512: without AMX), or CUDA: the record is measured on such a machine alone.
CAPABILITY = {"avx2-SmolLM2": "AVX2", "avx512-SmolLM2": "AVX512", "gpu": "CUDA", "gpu-copy": "CUDA"}
CAPABILITY |= dict.fromkeys(OF_AMX, "AMX")
ENVIRONMENT = {"tuned-SmolLM2": {"LLAMA_ARG_FLASH_ATTN": "off"}}  # of records whose flags no other record has
TIMED = ("speed", "queue")  # kinds of lines that each process of a record has
BUNDLED = "bundled-target", "bundled-draft", "bundled-mid", "bundled-head"
PLACES = ("--out", "--texts")  # flags that name a folder of the machine


class Records:
    """The committed measurements of the project in the folder `root`: every figure in its documentation is of them.

    In docs/records/, index.json names runs: {"compare": "0a37afb3", ...}; results.jsonl holds them, as test.py writes;
    carried.json lists changes of the code that changed no figure; the others are records of one file: rounds.json and
    the like. `records["compare"]` is a run with its measurements, `records["rounds"]` that of a file, with none.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "docs" / "records"
        self.files = {file.stem: read_json(file) for file in sorted(self.folder.glob("*.json"))}
        runs = {run["run"]: (run, lines) for run, lines in Results(self.folder).runs()}
        index, self.carried = self.files.pop("index", {}), self.files.pop("carried", [])
        self.pieces: dict[str, list[Any]] = {}  # what was rendered of a record so far
        self.runs: dict[str, Run] = {name: runs[run] for name, run in index.items() if run in runs}

    def __getitem__(self, name: str) -> tuple[Any, list[Line]]:
        """A record by its name. Raises UserError if there is none."""
        if name in self.runs:
            return self.runs[name]
        if name not in self.files:
            raise UserError(f"there is no record {name!r} in docs/records/")
        return self.files[name], []

    def carried_to(self, code: str) -> str:
        """The digest of the newest code that differs from that with the digest `code` only in what carried.json
        lists."""
        for change in self.carried:
            code = " ".join(change["digests"].get(part, part) for part in code.split())
        return code

    def is_of_now(self, code: str, device: str = "cpu") -> bool:
        """Whether a record with this digest counts as measured by the code of today."""
        return is_of_now(self.carried_to(code), device)

    def is_stale(self, name: str) -> bool:
        """Whether a record that a command measures is missing, or of other code, weights or flags, or fewer processes
        than it should be; whether any part of another record is of other code or weights. A training's record stays
        with the weights that it describes."""
        if name in self.files:
            record = self.files[name]
            parts = record.get("cells") or record.get("rows") or [record]
            codes = {part.get("code", "") for part in [*parts, *record.get("mistakes", []), *record.get("mended", [])]}
            # Kernels of a GPU are counted on a CPU, in the code that a GPU uses.
            device = "cuda" if name == "kernels" else "cpu"
            of_now = has_bundled_weights(record) and all(self.is_of_now(code, device) for code in codes)
            return "variants" not in record and not of_now
        if name not in self.runs:
            return name in MEASURED
        run, lines = self.runs[name]
        flags, processes = MEASURED.get(name, (run["command"], 1))
        measured = len({line.get("process") for line in lines if line["kind"] in TIMED})
        is_whole = run["command"] == flags and not 0 < measured < processes and has_bundled_weights(run)
        return not (is_whole and self.is_of_now(run.get("code", ""), run["device"]))


def command_of(record: Mapping[str, Any]) -> str:
    """The command line of a run, or of the program that a record names."""
    if record["command"].startswith("make "):
        return record["command"]
    set_first = "".join(f"{name}={value} " for name, value in record.get("environment", {}).items())
    return f"{set_first}python {record.get('program', 'test.py')} {record['command']}".rstrip()


def source(record: Mapping[str, Any], lines: Sequence[Line] = ()) -> str:
    """The line under a table: how, with what and where its figures were measured."""
    return f"`{command_of(record)}`; {measured_on(record, lines)}."


def differing(runs: Iterable[RunLine]) -> list[str]:
    """In what runs differ that should be one experiment. A run whose code was not recorded is like no other."""
    runs = list(runs)
    versions = {(model["name"], model["version"]) for run in runs for model in run["models"].values()}
    machines = [run["machine"] for run in runs]
    codes = {tuple(part.split(":")) for run in runs for part in (run.get("code") or f"sha256:{run['run']}").split()}
    differ = ["machine"] * any(machine != machines[0] for machine in machines)
    differ += ["code"] * (len(codes) > len({name for name, *_ in codes}))  # Each mode has a digest of its own.
    return differ + ["weights"] * (len(versions) > len(dict(versions)))  # two versions of one name


def without_places(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the folders of the machine it was made on. Of a path from the root, the last name is left."""
    flags = {key: last_name(value) for key, value in record["flags"].items() if f"--{key}" not in PLACES}
    result = dict(record) | {"flags": flags, "command": command_without_places(shlex.split(record["command"]))}
    result.pop("folder", None)
    return result


def last_name(value: Any) -> Any:
    """Of a path from the root, also one after `--flag=`, the last name."""
    flag, sign, path = value.rpartition("=") if isinstance(value, str) and value.startswith("--") else ("", "", value)
    return f"{flag}{sign}{Path(path).name}" if isinstance(path, str) and Path(path).is_absolute() else value


def command_without_places(argv: Sequence[str], named: Callable[[str], str] = last_name) -> str:
    """named: what is left of a word: of a path, its last name."""
    words, place = [], False  # place: among the values of a flag of PLACES
    for word in argv:
        place = word in PLACES if word.startswith("--") else place
        words += [] if place or word.split("=")[0] in PLACES else [named(word)]
    return shlex.join(words)


def finished_runs(folder: Path, named: Callable[[str], str] = last_name) -> list[tuple[str, Run]]:
    """(command line without places, run) of each finished run in a folder's results.jsonl, oldest first."""
    ended = [run for run in Results(folder).runs() if of_kind(run[1], EndLine)]
    return [(command_without_places(shlex.split(run[0]["command"]), named), run) for run in ended]


def runs_of_now(folder: Path, words: str) -> list[Run]:
    """The finished runs of a command line in a folder that are of today's code, oldest first."""
    runs = [run for command, run in finished_runs(folder) if command == words and has_bundled_weights(run[0])]
    return [run for run in runs if is_of_now(run[0].get("code", ""), run[0]["device"])]


def has_bundled_weights(record: Mapping[str, Any]) -> bool:
    """Whether the bundled models of a record have the weights of today."""
    models = [model for model in record.get("models", {}).values() if model.get("name") in BUNDLED]
    return all(model["version"] == version_of_bundled(model["name"]) for model in models)


version_of_bundled = functools.cache(model_version)


def of_processes(runs: Sequence[Run]) -> Run:
    """One record of several runs of one command: all their timed texts with the number of the process, of each step
    (`--steps`) the median of each process, what else the first one measured, and which programs failed in any. Raises
    UserError if they are of several machines or weights, or a figure cannot be right."""
    run, lines = runs[0]
    if differ := differing(head for head, _ in runs):
        names = ", ".join(head["run"] for head, _ in runs)
        raise UserError(f"runs {names} differ in {' and '.join(differ)}: measure them anew in another folder (--from)")
    timed: list[Any] = []
    for number, (_, body) in enumerate(runs):
        process = {"run": run["run"], "process": number} if len(runs) > 1 else {}
        timed += [cast(dict[str, Any], line) | process for line in body if line["kind"] in TIMED]
    for wrong in too_fast(of_kind(timed, SpeedLine)):
        raise UserError(f"{wrong}; was the machine busy? Measure again in another folder (--from)")
    rest: list[Any] = [line for line in lines if line["kind"] not in TIMED]
    # A program that failed in any process has texts of fewer prompts in the record: its line says so.
    failed = {line["method"]: line for _, body in runs for line in of_kind(body, EngineLine) if line["failed"]}
    rest = [failed.get(line["method"], line) if line.get("test") == "engine" else line for line in rest]
    rest = [line | {"run": run["run"]} for line in rest]
    timed = finished(timed, failed.values())
    if len(runs) > 1:
        steps = [of_kind(body, StepLine) for _, body in runs]
        for line, of_each in zip(of_kind(rest, StepLine), zip(*steps, strict=True), strict=True):
            seconds = [median(step["seconds"]) for step in of_each]
            cast(dict[str, Any], line).update(seconds=seconds, processes=len(runs))
    return run, timed + rest


def here() -> list[str]:
    """What this machine has, of CAPABILITY: the processor first."""
    processor = "AMX" if torch.cpu._is_amx_tile_supported() else torch.backends.cpu.get_cpu_capability()
    return [processor, *["CUDA"] * torch.cuda.is_available()]


def measure(name: str, folder: Path) -> Run:
    """The record `name`, of runs in `folder`: those that are missing are measured. Raises UserError if one fails."""
    flags, processes = MEASURED[name]
    if name in ENVIRONMENT or [words for words, _ in MEASURED.values()].count(flags) > 1:
        folder /= name  # Elsewhere, or without the environment, the same command measures another record.
        folder.mkdir(parents=True, exist_ok=True)
    command, before = [str(ROOT / "test.py"), *shlex.split(flags), "--out", str(folder)], -1
    while True:
        runs = runs_of_now(folder, flags)
        if len(runs) >= processes:
            return of_processes(runs[-processes:])
        if len(runs) == before:
            raise UserError(f"the command of {name} failed: {shlex.join(command)}")
        if CAPABILITY.get(name, here()[0]) not in here():
            raise UserError(f"{name} is measured on a machine with {CAPABILITY[name]}, and this one has {here()[0]}")
        print(f"{name}, run {len(runs) + 1} of {processes}: {shlex.join(command)}", flush=True)
        before = len(runs)
        subprocess.run([sys.executable, *command], env=os.environ | ENVIRONMENT.get(name, {}))


def keep_record(root: Path, name: str, folder: Path) -> None:
    """Copy a record into docs/records/ under its name."""
    file, measured = folder / f"{name}.json", measure(name, folder) if name in MEASURED else None
    records = Records(root)  # Read now: others may have been kept in the hours of the measurement.
    if measured:
        run, lines = measured
        environment = {"environment": ENVIRONMENT[name]} if name in ENVIRONMENT else {}
        records.runs[name] = cast(RunLine, without_places(run) | environment), lines
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
    elif not file.exists():
        raise UserError(f"{file} is not there; the record is of `{command_of(records.files[name])}`")
    else:
        with library_errors(f"{file} is no record", "name another file"):
            record = json.dumps(without_places(read_json(file)), ensure_ascii=False)
        replace_file(records.folder / file.name, record + "\n")
    print(f"Kept as {name!r}. Now render the documentation: python -m scripts.render")


def carry(root: Path, names: Sequence[str], folder: Path, why: str) -> None:
    """Let records of older code count as of today's, if the records `names` come out the same. Raises UserError if
    anything that flags and seed fix differs."""
    records, digests, shown = Records(root), dict[str, str](), list[dict[str, Any]]()
    if not names or not {*names} <= {*records.runs}:
        raise UserError(f"--carry: name records of runs to repeat, of {', '.join(records.runs)}")
    for name in names:
        (run, lines), known = records.runs[name], Results(folder).runs()
        for line in [] if run["run"] in {head["run"] for head, _ in known} else [run, *lines]:
            Results(folder).append(**line)
        again = f"--rerun {run['run']}"
        if not runs_of_now(folder, again):
            subprocess.run([sys.executable, str(ROOT / "test.py"), *again.split(), "--out", str(folder)])
        if not (runs := runs_of_now(folder, again)):
            raise UserError(f"--carry: the command of {name} failed: test.py {again}")
        sentences, same = compare(run, lines, *runs[-1])
        if not same:
            raise UserError(f"--carry: {name} is not the same: {' '.join(sentences)}")
        digests |= zip(records.carried_to(run["code"]).split(), runs[-1][0]["code"].split(), strict=True)
        shown.append({"record": name, "same": len(comparable(runs[-1][1]))})
    now = {"time": time.strftime("%Y-%m-%d"), "why": why, "shown": shown}
    changed = {old: new for old, new in digests.items() if old != new}
    replace_file(records.folder / "carried.json", json.dumps([*records.carried, now | {"digests": changed}]) + "\n")


@as_script("keepRecord", "What was measured is kept.")
def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> None:
    parser = script_parser("python -m scripts.keepRecord", __doc__)
    parser.add_argument("name", type=text, nargs="*", metavar="NAME", help="first, compare, sweep, ..., or of a file")
    parser.add_argument("--carry", type=text, metavar="WHY", help="let records of the code before stay, if these do")
    parser.add_argument("--from", dest="folder", type=path, default=ROOT / ".records", metavar="DIR", help="(.records)")
    args = parser.parse_args(argv)
    records = Records(root)
    known = [*MEASURED, *records.files]
    if unknown := [name for name in args.name if name not in known]:  # before any is measured, which takes hours
        shown = ", ".join(known) + did_you_mean(unknown[0], known)
        raise UserError(f"no record with the name {unknown[0]!r} is measured or copied, but {shown}")
    args.folder.mkdir(exist_ok=True)
    if args.carry:
        return carry(root, args.name, args.folder, args.carry)
    failed = []
    stale = [name for name in MEASURED if records.is_stale(name) and CAPABILITY.get(name, here()[0]) in here()]
    for name in args.name or stale:
        try:
            keep_record(root, name, args.folder)
        except UserError as error:  # The records after it are measured all the same.
            failed.append(str(error))
    if failed:
        raise UserError("; ".join(failed))


if __name__ == "__main__":
    sys.exit(main())
