"""`run_record`: the first line of a run in results.jsonl. It says all that is needed to run it again."""

import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from engine.cachedModel import CachedModel
from experiments.machine import machine
from experiments.prepare import LoadedModels, Prepared
from inputs.models import model_version


def run_record(prepared: Prepared, models: LoadedModels, argv: Sequence[str]) -> dict[str, Any]:
    """The record of a run by the command line `argv`."""
    versions = {
        role: model_record(folder.name, model_version(folder), models[role])
        for role, folder in prepared.folders.items()
    }
    named = {"kind": "run", "run": uuid.uuid4().hex[:8], "folder": os.getcwd()}
    return named | origin(argv, prepared.settings.flags, prepared.device, versions)


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
