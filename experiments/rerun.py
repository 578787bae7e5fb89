"""`test.py --rerun`: repeat a run of `results.jsonl` from its record alone, and compare.

Flags and seed fix every token that a method draws, given the machine, the libraries and the weights that the record
names. Times are not compared, and neither are texts whose guesses depend on measured times
(`methods.catalogue.repeatable`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.flags import parser
from experiments.schema import Line, Run, RunLine, name_of_kind
from inputs.commandLine import counted
from utils import UserError

Key = tuple[Any, ...]  # the kind of a line, and the values that tell it from others of its kind
Fields = Mapping[str, Any]  # a line of any kind

TOLERANCE = 1e-9  # relative, for perplexities and rates
# For each kind of line that is compared: the figure compared, and the names whose values tell such lines apart.
COMPARED = {
    "speed": ("sha256", ("mode", "promptLen", "temperature", "method", "prompt", "repeat")),
    "diversity": ("sha256", ("method",)),
    "costs sweep": ("alpha", ("promptLen", "temperature")),
    "ppl text": ("ppl", ("corpus",)),
    "ppl corpus": ("ppl", ("corpus",)),
    "lossless drawn": ("counts", ("dtype", "method")),
    "lossless mistake": ("tokens", ("mistake",)),
    "lossless greedy": ("differing", ("dtype", "method")),
    "lossless audit": ("counts", ("file",)),
    "lossless greedyAudit": ("beyond", ("file",)),
}


def choose_run(runs: Sequence[Run], path: Path, name: str) -> Run:
    """The record and the lines of one of `runs`, which are those of the file `path`, by its name, or by a number: 1 for
    the newest, 2 for the one before. Raises UserError for a run that does not exist."""
    by_name = {run["run"]: (run, lines) for run, lines in runs}
    if name not in by_name and name.isascii() and name.isdecimal() and 1 <= int(name[:9]) <= len(runs):
        name = runs[-int(name[:9])][0]["run"]
    if name not in by_name:
        newest = ", ".join(list(by_name)[-9:]) or "none"
        raise UserError(f"there is no run {name}: {path} has {counted(len(runs), 'run')}; the newest are: {newest}")
    return by_name[name]


def flags_of_run(run: RunLine, lines: Sequence[Line], out: str) -> list[str]:
    """The command line with all flags of a run's record, including the device, and the folder `out` for its results.
    Raises UserError if the run cannot be repeated and compared."""
    if not isinstance(run.get("flags"), dict) or not isinstance(run.get("models"), dict):
        raise UserError(f"--rerun: run {run['run']} was written by another version: its record lacks the flags")
    if not comparable(lines):
        why = "it ended before anything was measured, or was written by a version that recorded no hashes"
        raise UserError(f"--rerun: run {run['run']} cannot be compared: {why}")
    flags = {"device": run.get("device")} | {name: value for name, value in run["flags"].items() if value is not None}
    known = {action.dest: action for action in parser()._actions}
    words: list[str] = []
    for name, value in (flags | {"out": out}).items():
        if name not in known:
            raise UserError(f"run {run['run']} was written by another version: there is no flag --{name} any more")
        if isinstance(value, list) and known[name].nargs:
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, list):  # The flag was given once for each value.
            words += [f"--{name}={one}" for one in value]
        elif value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words.append(f"--{name}={value}")
    return words


def changes(earlier: RunLine, run: RunLine) -> Iterator[str]:
    """One sentence for each thing that has changed since the run `earlier` was made. run: the record of the new one."""
    for role, model in run["models"].items():
        known = earlier["models"].get(role)
        before, now = known["version"] if known else "not there", model["version"]
        if before != now:
            yield f"The weights of the {role}, {model['name']}, have changed: they were {before} and are {now}."
    old, new = earlier.get("machine", {}), run["machine"]
    changed = [f"{name} was {old.get(name)} and is {value}" for name, value in new.items() if old.get(name) != value]
    if changed:
        yield "The machine is not the same, so tokens may differ: " + "; ".join(changed) + "."


def compare(earlier: RunLine, lines: list[Line], run: RunLine, new: list[Line]) -> tuple[list[str], bool]:
    """Compare the lines of the run `earlier` with the `new` lines of its repetition `run`. Returns sentences on
    the differences, and whether everything is equal."""
    old, fresh = comparable(lines), comparable(new)
    sentences, same = [f"Run {earlier['run']} again, as {run['run']}:"], True
    for what, hashed in ("texts", True), ("figures", False):
        figures = {key: COMPARED[key[0]][0] for key in old if key in fresh}
        keys = [key for key, figure in figures.items() if (figure == "sha256") == hashed]
        differing = [key for key in keys if not agree(old[key][figures[key]], fresh[key][figures[key]])]
        if differing:
            first = differing[0]
            reason = why(old[first], fresh[first])
            sentences.append(f"{len(differing)} of {len(keys)} {what} differ, first {describe(first)}{reason}.")
        elif keys:
            sentences.append(f"all {len(keys)} {what} are the same.")
        same &= not differing
    if lacking := [key for key in old if key not in fresh]:
        sentences.append(f"{len(lacking)} were not measured again, first {describe(lacking[0])}.")
    if clocked := sum(name_of_kind(line) in COMPARED and not is_repeatable(line) for line in lines):
        why_not = "the guesses of costAware and --tree auto follow the clock, and their texts too"
        sentences.append(f"{clocked} are left out: {why_not}.")
    return sentences, same and not lacking


def comparable(lines: Iterable[Fields]) -> dict[Key, Fields]:
    """{key: line} of the lines that flags and seed determine."""
    by_key = {}
    for line in lines:
        figure, names = COMPARED.get(name_of_kind(line), (None, ()))
        if figure in line and all(name in line for name in names) and is_repeatable(line):
            by_key[(name_of_kind(line), *(line[name] for name in names))] = line
    return by_key


def is_repeatable(line: Fields) -> bool:
    """Whether flags and seed determine the line's results. Earlier versions did not record it."""
    return line.get("repeatable", line.get("method") != "costAware")


def agree(old: object, new: object) -> bool:
    """Whether two figures are the same: hashes, numbers, or dictionaries of them."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(agree(old[name], new.get(name)) for name in old)
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=TOLERANCE)
    return old == new


def describe(key: Key) -> str:
    return ", ".join([key[0], *(f"{name} {value}" for name, value in zip(COMPARED[key[0]][1], key[1:]))])


def why(old: Fields, new: Fields) -> str:
    """The reason for a difference, if the lines show one."""
    if "input" in old and old["input"] != new["input"]:
        return " (the text that is read has changed)"
    if old.get("dtype") != new["dtype"]:
        return f" (in {old.get('dtype')} then, in {new['dtype']} now)"
    return ""
