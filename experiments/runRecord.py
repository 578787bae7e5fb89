"""`run_record`: the first line of a run in results.jsonl. It says all that is needed to run it again."""

import os
import shlex
import time
import uuid
from collections.abc import Sequence
from typing import Any

from experiments.machine import machine
from experiments.prepare import LoadedModels, Prepared
from inputs.models import model_version


def run_record(prepared: Prepared, models: LoadedModels, argv: Sequence[str]) -> dict[str, Any]:
    """Flags, device, machine, and the models with their versions, of a run by the command line `argv`."""
    return {
        "kind": "run",
        "run": uuid.uuid4().hex[:8],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(argv),
        "folder": os.getcwd(),
        "flags": prepared.settings.flags,
        "device": prepared.device,
        "machine": machine(prepared.device),
        "models": {
            role: {"name": folder.name, "version": model_version(folder), "parameters": models[role].parameters}
            for role, folder in prepared.folders.items()
        },
    }
