"""`run_record`: the first line of a run in results.jsonl. It says all that is needed to run it again."""

import os
import shlex
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from engine.cachedModel import CachedModel
from experiments.machine import machine
from experiments.prepare import LoadedModels, Prepared
from experiments.processes import Processes
from experiments.speed import digest
from inputs.models import model_version
from utils import UserError


def run_record(prepared: Prepared, models: LoadedModels, argv: Sequence[str]) -> dict[str, Any]:
    """The record of a run by the command line `argv`."""
    versions = {
        role: model_record(folder.name, model_version(folder), models[role])
        for role, folder in prepared.folders.items()
    }
    if prepared.settings.models.draft_device and "draft" in versions:
        versions["draft"] |= {"device": prepared.draft_device, "processor": machine(prepared.draft_device)["processor"]}
    named = {"kind": "run", "run": uuid.uuid4().hex[:8], "folder": os.getcwd()}
    if prepared.processes.count == 1:
        return named | origin(argv, prepared.settings.flags, prepared.device, versions)
    kind = prepared.device.split(":")[0]  # The processes' own devices have numbers.
    record = named | origin(argv, prepared.settings.flags, kind, versions)
    texts = digest([prepared.prompts, prepared.article, prepared.texts])
    return record | {"processes": devices(prepared.processes, prepared.device, record["machine"], versions, texts)}


def devices(
    processes: Processes, device: str, here: dict[str, Any], versions: Mapping[str, dict[str, Any]], texts: str
) -> list[dict[str, Any]]:
    """The machine and the device of each process.

    here: this process's machine. versions: {role: `model_record`}. texts: the digest of what is read. Raises UserError
    if something that decides tokens or times is not the same in all of them.
    """
    same = {"device": here["processor"]} | {name: here[name] for name in ("torch", "transformers", "numpy")}
    if device == "cpu":
        same["threads"] = here["threads"]  # Sums are split over them, so rounding follows their number.
    same |= {f"weights of the {role}": version["version"] for role, version in versions.items()}
    same["texts"] = texts
    own = {"host": socket.gethostname(), "device": device, "processor": here["processor"]}
    everyone = processes.gathered((own, same))
    for index, (process, there) in enumerate(everyone):
        for name, value in everyone[0][1].items():
            if there[name] != value:
                raise UserError(
                    f"the processes differ in their {name}: {value} in process 0 ({everyone[0][0]['host']}), "
                    f"{there[name]} in process {index} ({process['host']}); results would depend on who computes what"
                )
    return [process for process, _ in everyone]


def origin(
    argv: Sequence[str], flags: Mapping[str, object], device: str, models: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Where measurements come from: time, command line, flags, device, machine and models {role: `model_record`}."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(argv),
        "flags": dict(flags),
        "device": device,
        "machine": machine(device),
        "models": dict(models),
    }


def model_record(name: str, version: str, model: CachedModel) -> dict[str, Any]:
    """A model in a record. version: what identifies its weights (`inputs.models.model_version`)."""
    return {"name": name, "version": version, "parameters": model.parameters}
