"""`test.py --rerun`: a run of `results.jsonl` again, from its record alone, and whether it gave the same.

Flags and seed fix every token a method draws, on the machine, with the libraries and the weights that the record names.
Times are not compared, nor texts whose guesses follow the clock (`methods.repeatable`).
"""

import math

from experiments.flags import parser
from utils import UserError

TOLERANCE = 1e-9  # relative, of perplexities and rates
# For each kind of line that is compared: by which figure, and what tells one such line of a run from another.
COMPARED = {
    "speed": ("sha256", ("mode", "promptLen", "temperature", "method", "prompt", "repeat")),
    "diversity": ("sha256", ("method",)),
    "costs": ("alpha", ("promptLen", "temperature")),
    "ppl_text": ("ppl", ("corpus",)),
    "ppl_corpus": ("ppl", ("corpus",)),
    "lossless": ("counts", ("method",)),
    "power": ("tokens", ("mistake",)),
    "greedy": ("differing", ("dtype", "method")),
}


def choose(store, asked):
    """(record, its lines) of the run `asked`: its name, or 1 for the newest, 2 for the one before. Raises UserError for
    a run that is not there or cannot be run again."""
    runs = store.runs()
    named = {run["run"]: (run, lines) for run, lines in runs}
    if asked in named:
        run, lines = named[asked]
    elif asked.isascii() and asked.isdecimal() and 1 <= int(asked[:9]) <= len(runs):
        run, lines = runs[-int(asked[:9])]
    else:
        known = ", ".join(list(named)[-5:]) or "none"
        raise UserError(f"--rerun {asked}: {store.lines} has {len(runs)} runs; the newest are: {known}")
    if not isinstance(run.get("flags"), dict) or not isinstance(run.get("models"), dict):
        raise UserError(f"--rerun {asked}: run {run['run']} was written by another version: its record lacks the flags")
    if not comparable(lines):
        raise UserError(
            f"--rerun {asked}: run {run['run']} has nothing to compare with: it ended before anything was measured, "
            "or was written by a version that kept no hashes"
        )
    return run, lines


def arguments(run, out):
    """The command line that says all a run's record says: what depends on the machine is named too."""
    flags = {"device": run.get("device")} | {name: value for name, value in run["flags"].items() if value is not None}
    known = {action.dest for action in parser()._actions}
    for name in flags:
        if name not in known:
            raise UserError(f"run {run['run']} was written by another version: there is no flag --{name} any more")
    given = []
    for name, value in (flags | {"out": out}).items():
        if isinstance(value, list):
            given += [f"--{name}", *map(str, value)]
        elif value is True:
            given.append(f"--{name}")
        elif value is not False and value is not None:
            given.append(f"--{name}={value}")
    return given


def changes(earlier, run):
    """What is not as it was when the run that is repeated was made, a line each; `run` is the new one's record."""
    for role, model in run["models"].items():
        was, now = earlier["models"].get(role, {}).get("version", "not there"), model["version"]
        if was != now:
            yield f"The weights of the {role}, {model['name']}, have changed: they were {was} and are {now}."
    was, now = earlier.get("machine", {}), run["machine"]
    changed = [f"{name} was {was.get(name)} and is {now[name]}" for name in now if was.get(name) != now[name]]
    if changed:
        yield "The machine is not the same, so tokens may differ: " + "; ".join(changed) + "."


def compare(earlier, lines, run, new):
    """(sentences, whether all is the same) for the lines of the run `earlier` and the `new` ones of its repetition."""
    old, fresh = comparable(lines), comparable(new)
    sentences, same = [f"Run {earlier['run']} again, as {run['run']}:"], True
    for what, hashed in ("texts", True), ("figures", False):
        keys = [key for key in old if key in fresh and (figure_of(key) == "sha256") == hashed]
        differing = [key for key in keys if not agree(old[key][figure_of(key)], fresh[key][figure_of(key)])]
        if differing:
            first = differing[0]
            reason = why(old[first], fresh[first])
            sentences.append(f"{len(differing)} of {len(keys)} {what} differ, first {describe(first)}{reason}.")
        elif keys:
            sentences.append(f"all {len(keys)} {what} are the same.")
        same &= not differing
    lacking = [key for key in old if key not in fresh]
    if lacking:
        sentences.append(f"{len(lacking)} were not measured again, first {describe(lacking[0])}.")
    clocked = sum(not repeatable(line) for line in lines)
    if clocked:
        sentences.append(f"{clocked} are left out: the guesses of costAware follow the clock, and the texts with them.")
    return sentences, same and not lacking


def comparable(lines):
    """{(kind, and what tells it from others): line} of the lines that flags and seed fix."""
    found = {}
    for line in lines:
        figure, names = COMPARED.get(line["kind"], (None, ()))
        if figure in line and all(name in line for name in names) and repeatable(line):
            found[(line["kind"], *(line[name] for name in names))] = line
    return found


def repeatable(line):
    return line.get("repeatable", line.get("method") != "costAware")  # earlier versions did not say


def figure_of(key):
    return COMPARED[key[0]][0]


def agree(old, new):
    """Whether two figures are the same: hashes, numbers, or dictionaries of them."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(agree(old[name], new.get(name)) for name in old)
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=TOLERANCE)
    return old == new


def describe(key):
    return ", ".join([key[0], *(f"{name} {value}" for name, value in zip(COMPARED[key[0]][1], key[1:]))])


def why(old, new):
    """What explains a difference, where the lines tell."""
    if "input" in old and old["input"] != new["input"]:
        return " (the text that is read has changed)"
    if old.get("dtype") != new["dtype"]:
        return f" (in {old.get('dtype')} then, in {new['dtype']} now)"
    return ""
