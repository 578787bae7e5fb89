"""`run_record`: the first line of a run in results.jsonl. It has everything needed to repeat the run."""

import functools
import hashlib
import os
import platform
import shlex
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any, cast

import numpy
import torch
import transformers

from engine.cachedModel import CachedModel
from engine.compiling import is_compiled
from experiments.loading import Inputs, LoadedModels
from experiments.processes import Processes
from experiments.schema import ModelRecord, RunLine
from experiments.speed import STALLED, digest
from inputs import files
from inputs.commandLine import counted
from inputs.models import model_version
from utils import UserError

# All source that can change a figure: decoding, its speed, measurement, and statistics.
SOURCE = ("utils", "regrSampling", "specSampling", "PPL")
FOLDERS = ("decoding", "engine", "methods", "inputs", "experiments", "lossless", "benchmark", "report", "scripts")
SUFFIXES = (".py", ".cpp", ".h")
BUSY = 0.5  # load beyond the cores that does not indicate other programs


def run_record(inputs: Inputs, models: LoadedModels, argv: Sequence[str]) -> RunLine:
    """The record of a run by the command line `argv`."""
    settings = inputs.settings
    roles = {
        role: model_record(folder.name, model_version(folder), models[role]) for role, folder in inputs.folders.items()
    }
    if inputs.copies and settings.models.bits:  # The codes follow from the weights and a text that the target wrote.
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
        "code": code_version(),
        "load": os.getloadavg()[0],
        "machine": machine(device),
        "models": dict(models),
    }


def strained(run: RunLine, lines: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    """A line for each sign that other programs took the processor while something was measured."""
    load, cores = run.get("load", 0.0), run["machine"].get("cores") or 1
    if load > cores + BUSY:
        about = f"a load of {load:.1f}, and {counted(cores, 'core')}"
        yield f"The machine was busy as the run began ({about}): times are too long."
    lines, times = list(lines), defaultdict(list)
    for line in lines:
        if line["kind"] == "speed" and line["tpot"]:
            times[line["method"]].append(line["tpot"])
    if unsteady := [method for method, values in times.items() if max(values) > 10 * min(values)]:
        yield f"Times per token vary more than tenfold ({', '.join(unsteady)}): was the machine busy? Measure again."
    if stalled := sum(line.get("stalled", 0) > 0 for line in lines):
        yield f"Texts with a round of over {STALLED} times the row's median, timed again: {stalled}."


@functools.cache
def code_version() -> str:
    """A digest of the source in Python and C++: two records with the same digest come from the same code."""
    sources = [files.ROOT / f"{name}.py" for name in SOURCE]
    sources += [file for name in FOLDERS for file in (files.ROOT / name).rglob("*") if file.suffix in SUFFIXES]
    content = [(file.relative_to(files.ROOT).as_posix(), file.read_bytes()) for file in sorted(sources)]
    return "sha256:" + hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def machine(device: str) -> dict[str, Any]:
    """The processor (on a GPU, the GPU), the threads, and the versions."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
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
