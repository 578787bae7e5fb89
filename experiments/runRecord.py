"""`run_record`, the first line of a run in results.jsonl: it has everything needed to repeat the run. And `test.py
--rerun`, which repeats a run from that line alone, and compares.

Flags and seed fix every token that a method draws, given the machine, the libraries and the weights that the record
names. Times are not compared, and neither are texts whose guesses depend on measured times
(`methods.catalogue.repeatable`).
"""

import ast
import functools
import hashlib
import io
import math
import os
import platform
import re
import shlex
import socket
import time
import tokenize
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, cast

import numpy
import psutil
import torch
import transformers

from engine.cachedModel import CachedModel
from engine.compiling import is_compiled
from experiments.flags import FLAGS, parser
from experiments.intervals import too_fast
from experiments.loading import Inputs, LoadedModels
from experiments.processes import Processes
from experiments.schema import Line, ModelRecord, Run, RunLine, SpeedLine, name_of_kind, of_kind
from experiments.speed import digest
from inputs import files
from inputs.commandLine import counted, did_you_mean
from inputs.models import model_version
from utils import UserError

# All source that can change a figure of test.py: decoding, its speed, measurement, and statistics. A script that
# measures by itself is not in the digest: after a change of scripts/costFrontier.py, scripts/auditEngines.py or
# tests/countKernels.py that alters figures, their records must be measured anew.
SOURCE = ("utils", "regrSampling", "specSampling", "PPL")
FOLDERS = ("decoding", "engine", "methods", "inputs", "experiments", "lossless", "benchmark")
SUFFIXES = (".py", ".cpp", ".h")
UNUSED = {"cpu": "engine/cuda*.py", "cuda": "engine/kernels/*.[ch]*"}  # {kind of device: source that only others use}
# Source that changes no figure: it refuses, downloads or converts models, or reads the command line. A record has the
# flags, the dtypes, and the hashes of weights and texts.
CHECKS = "inputs/commandLine.py", "inputs/devices.py", "inputs/files.py", "inputs/gguf.py", "inputs/hub.py"
OF_MODES = {  # {flag: source that no other runs use}
    "audit": ("lossless/audit.py",),
    "compare": ("benchmark/*.py", "lossless/audit.py", "methods/programs/*.py"),  # Other engines' texts are judged.
    "lossless": ("lossless/trial.py", "lossless/mistakes.py"),
    "steps": ("benchmark/steps.py",),
    "sweep": ("experiments/sweep.py",),
    "zoo": ("engine/gate.py", "engine/smallTwin.py"),  # They refuse kinds of models.
}
BUSY = 0.5  # load beyond the cores that does not indicate other programs

Fields = Mapping[str, Any]  # a line of any kind
TOLERANCE = 1e-9  # relative, for perplexities and rates
COMPARED = {  # {kind of line: the figure that is compared}
    "speed": "sha256",
    "diversity": "sha256",
    "costs sweep": "alpha",
    "ppl text": "ppl",
    "ppl corpus": "ppl",
    "lossless drawn": "counts",
    "lossless mistake": "tokens",
    "lossless greedy": "differing",
    "lossless audit": "counts",
    "lossless greedyAudit": "beyond",
}
# The fields whose values tell lines of one kind apart, and those of --lossless by their dtype too.
IDENTIFYING = "mode", "promptLen", "temperature", "mistake", "method", "prompt", "repeat", "corpus", "file"


def run_record(inputs: Inputs, models: LoadedModels, argv: Sequence[str]) -> RunLine:
    """The record of a run by the command line `argv`."""
    settings = inputs.settings
    roles = {
        role: model_record(folder.name, model_version(folder), models[role]) for role, folder in inputs.folders.items()
    }
    if inputs.copies and settings.models.bits:  # The codes follow from the weights.
        version = f"{roles['target']['version']}, {inputs.copies.version(settings.models.bits)}"
        copy = model_record(models["self"].name, version, models["self"])
        copy["parameters"] = models["target"].parameters
        roles |= {role: copy.copy() for role in sorted(inputs.roles_of("self") - {"self"} or {"self"})}
    for role in sorted(inputs.roles_of("head")):
        roles[role] = model_record(inputs.head.name, model_version(inputs.head), models[role])
    if settings.models.draft_device and "draft" in roles:
        roles["draft"]["device"] = inputs.draft_device
        roles["draft"]["processor"] = machine(inputs.draft_device)["processor"]
    several = inputs.processes.count > 1
    device = inputs.device.split(":")[0] if several else inputs.device  # The processes' own devices have numbers.
    name: dict[str, Any] = {"kind": "run", "run": uuid.uuid4().hex[:8], "folder": os.getcwd()}
    record = cast(RunLine, name | origin(argv, settings.flags, device, roles))
    if several:
        texts = digest([inputs.prompts, inputs.article, inputs.texts, list(map(astuple, inputs.audited))])
        record["processes"] = devices(inputs.processes, inputs.device, record["machine"], roles, texts)
    return record


def devices(
    processes: Processes, device: str, machine: Mapping[str, Any], models: Mapping[str, ModelRecord], texts: str
) -> list[dict[str, str]]:
    """The host, the device and the processor of each process. machine, device: of this one. texts: the digest of what
    is read. Raises UserError if something that decides tokens or times is not the same in all of them."""
    same = {"device": machine["processor"], **{name: machine[name] for name in ("torch", "transformers", "numpy")}}
    if device == "cpu":
        same["threads"] = machine["threads"]  # Sums are split over them, so rounding follows their number.
    same |= {f"weights of the {role}": model["version"] for role, model in models.items()} | {"texts": texts}
    process = {"host": socket.gethostname(), "device": device, "processor": machine["processor"]}
    gathered = processes.gathered((process, same))
    first, expected = gathered[0]
    for index, (process, values) in enumerate(gathered):
        for name, value in expected.items():
            if values[name] != value:
                hosts = f"{value} in process 0 ({first['host']}), {values[name]} in process {index} ({process['host']})"
                why = "the results would depend on which process computes which text"
                raise UserError(f"the processes differ in {name}: {hosts}; {why}")
    return [process for process, _ in gathered]


def origin(argv: Sequence[str], flags: Mapping[str, Any], device: str, models: Mapping[str, Any]) -> dict[str, Any]:
    """Where measurements come from: time, command line, flags, device, code, machine and models {role: record}."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(argv),
        "flags": dict(flags),
        "device": device,
        "code": code_version(device, *filter(flags.get, OF_MODES)),
        "load": psutil.getloadavg()[0],
        "waiting": os.environ.get("OMP_WAIT_POLICY"),
        "machine": machine(device),
        "models": dict(models),
    }


def strained(run: RunLine, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each sign that other programs took the processor while something was measured."""
    load, cores = run.get("load", 0.0), run["machine"].get("cores") or 1
    if load > cores + BUSY:
        about = f"a load of {load:.1f}, and {counted(cores, 'core')}"
        yield f"The machine was busy as the run began ({about}): times are too long."
    times = defaultdict(list)
    for line in lines:
        if line["kind"] == "speed" and line["tpot"]:  # A token takes longer after a longer prompt.
            times[line["method"], line["mode"], line["promptLen"]].append(line["tpot"])
    if unsteady := dict.fromkeys(method for (method, *_), tpots in times.items() if max(tpots) > 10 * min(tpots)):
        yield f"Times per token vary more than tenfold ({', '.join(unsteady)}): was the machine busy? Measure again."
    if stalled := sum(line.get("stalled", 0) > 0 for line in lines):
        were = "was" if stalled == 1 else "were"
        yield f"The machine stalled during {counted(stalled, 'text')}, which {were} timed again."
    for sentence in too_fast(of_kind(cast(Any, lines), SpeedLine)):
        yield f"{sentence}; was the machine busy? Measure again."


@functools.cache
def code_version(device: str = "cpu", *modes: str) -> str:
    """A digest of the source in Python and C++ that a device uses, without docstrings, the help of flags and comments:
    two records with the same digest come from the same code. modes: of OF_MODES; what they alone use has a digest of
    its own each: "sha256:... sweep:..."."""
    unused = UNUSED.get(device.partition(":")[0], "*.none"), *CHECKS
    sources = [files.ROOT / f"{name}.py" for name in SOURCE]
    sources += [file for name in FOLDERS for file in (files.ROOT / name).rglob("*") if file.suffix in SUFFIXES]
    used = sorted(file for file in sources if not any(map(file.match, unused)))
    content = {file.relative_to(files.ROOT).as_posix(): file.read_text(encoding="utf-8") for file in used}
    content = {name: without_comments(text, name[name.rindex(".") :]) for name, text in content.items()}
    parts = {"sha256": content} | {mode: dict[str, str]() for mode in OF_MODES}
    for name, text in [*content.items()]:
        for mode, patterns in OF_MODES.items():
            if any(map(Path(name).match, patterns)):
                parts[mode][name] = text
                content.pop(name, None)
    used_parts = [(name, [*part.items()]) for name, part in parts.items() if name == "sha256" or name in modes]
    return " ".join(f"{name}:{hashlib.sha256(repr(part).encode()).hexdigest()[:16]}" for name, part in used_parts)


def is_of_now(code: str, device: str = "cpu") -> bool:
    """Whether the code of today is that of a record with this digest."""
    return code == code_version(device, *(part.partition(":")[0] for part in code.split()[1:]))


@functools.cache
def without_comments(text: str, suffix: str) -> str:
    """The source of a file without docstrings, other texts that stand alone, comments and empty lines. It is the same
    under every version of Python."""
    if suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*", "", text).split())
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno, node.end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def machine(device: str) -> dict[str, Any]:
    """The processor (on a GPU, the GPU), the threads, and the versions."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError, KeyError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        # A virtual machine says "AMD EPYC" of every generation.
        processor = f"{about['model name']} (family {about['cpu family']}, model {about['model']})"
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
    }


def model_record(name: str, version: str, model: CachedModel) -> ModelRecord:
    """A model in a record. version: what identifies its weights (`inputs.models.model_version`)."""
    return {"name": name, "version": version, "parameters": model.parameters, "compiled": is_compiled(model)}


def choose_run(runs: Sequence[Run], path: Path, name: str) -> Run:
    """The record and the lines of one of `runs`, which are those of the file `path`, by its name, or by a number: 1 for
    the newest, 2 for the one before. Raises UserError for a run that does not exist."""
    by_name = {run["run"]: (run, lines) for run, lines in runs}
    if name not in by_name and name.isascii() and name.isdecimal() and 1 <= int(name[:9]) <= len(runs):
        name = runs[-int(name[:9])][0]["run"]
    if name not in by_name:
        newest = ", ".join(list(by_name)[-9:]) or "none"
        held = f"{path} has {counted(len(runs), 'run')}; the newest are: {newest}"
        raise UserError(f"there is no run {name}: {held}{did_you_mean(name, by_name)}")
    return by_name[name]


def flags_of_run(run: RunLine, lines: Sequence[Line], out: str) -> list[str]:
    """The command line with all flags of a run's record, including the device, and the folder `out` for its results.
    Raises UserError if the run cannot be repeated and compared."""
    about: Fields = {"machine": {}, "folder": ""} | run
    shapes = {"flags": dict, "models": dict, "machine": dict, "folder": str}
    is_known = bool(about.get("flags")) and all(isinstance(about.get(name), shape) for name, shape in shapes.items())
    if not is_known or not all(isinstance(model, dict) and "version" in model for model in about["models"].values()):
        raise UserError(f"--rerun: run {run['run']} was written by another version: its record lacks the flags")
    if not comparable(lines):
        why = "it has nothing that flags and seed fix: it timed batches alone, ended early, or is of another version"
        raise UserError(f"--rerun: run {run['run']} cannot be compared: {why}")
    flags = {"device": run.get("device")} | {name: value for name, value in run["flags"].items() if value is not None}
    actions = {action.dest: action for action in parser()._actions}
    words: list[str] = []
    for name, value in (flags | {"out": out}).items():
        if name not in FLAGS:
            raise UserError(f"run {run['run']} was written by another version: there is no flag --{name} any more")
        if isinstance(value, list) and actions[name].nargs:
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
    for what, hashed in ("text", True), ("figure", False):
        figures = {name: COMPARED[name_of_kind(line)] for name, line in old.items() if name in fresh}
        names = [name for name, figure in figures.items() if (figure == "sha256") == hashed]
        differing = [name for name in names if not agree(old[name][figures[name]], fresh[name][figures[name]])]
        if differing:
            before, now = old[differing[0]], fresh[differing[0]]
            reason = ""
            if "input" in before and before["input"] != now.get("input"):
                reason = " (the text that is read has changed)"
            elif before.get("dtype") != now["dtype"]:
                reason = f" (in {before.get('dtype')} then, in {now['dtype']} now)"
            counts = f"{len(differing)} of {counted(len(names), what)} differ{'s' * (len(differing) == 1)}"
            sentences.append(f"{counts}, first {differing[0]}{reason}.")
        elif names:
            are = f"all {len(names)} {what}s are" if names[1:] else f"the only {what} is"
            sentences.append(f"{are} the same.")
        same &= not differing
    if lacking := [name for name in old if name not in fresh]:
        were = "was" if len(lacking) == 1 else "were"
        sentences.append(f"{len(lacking)} {were} not measured again, first {lacking[0]}.")
    if clocked := sum(not line.get("repeatable", True) for line in lines):
        why_not = "the guesses of costAware and --tree auto follow the clock, and their texts too; "
        why_not += "other programs' texts are not fixed by the seed"
        sentences.append(f"{clocked} {'is' if clocked == 1 else 'are'} left out: {why_not}.")
    return sentences, same and not lacking


def comparable(lines: Iterable[Fields]) -> dict[str, Fields]:
    """{the kind of a line and what tells it from others of its kind: the line} of those that flags and seed fix."""
    named = {}
    for line in lines:
        kind = name_of_kind(line)
        names = ("dtype", *IDENTIFYING) if line.get("kind") == "lossless" else IDENTIFYING
        if COMPARED.get(kind) in line and line.get("repeatable", True):
            named[", ".join([kind, *(f"{name} {line[name]}" for name in names if name in line)])] = line
    return named


def agree(old: object, new: object) -> bool:
    """Whether two figures are the same: hashes, numbers, or dictionaries of them."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(agree(old[name], new.get(name)) for name in old)
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=TOLERANCE)
    return old == new
