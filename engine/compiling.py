"""`compiled` and `make_graphs`: models whose steps are computed by graphs, and the graphs that samplers need."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from engine.cachedModel import CachedModel
from engine.compiledModel import CompiledModel
from engine.cpuModel import CpuModel
from engine.cudaModel import CudaModel
from engine.steps import Shape

T = TypeVar("T")


def compiled(model: CachedModel, target: CachedModel | None = None) -> CachedModel:
    """The same model, computed by kernels on a CPU and by graphs on a GPU, which `make_graphs` makes. It shares the
    weights: on a CPU, its layers are packed for good (engine/decoderLayers.py). If that is not possible, one line says
    why, and the model stays as it is.

    target: for a model that shares the KV cache of another one, or reads its features, that one, compiled.
    """
    if is_compiled(model) or model.stays_eager or (target is not None and not is_compiled(target)):
        return model
    cache_of, features = (None, target or model.features_of) if model.reads_features else (target, model.tap)
    parts = model.model, model.vocabulary, model.name, cache_of, features
    made = attempted(lambda: compiled_class(model)(*parts), model.name)
    if made is None:
        model.stays_eager = True  # It is said once.
        if cache_of is not None:
            model.cache_of, model.store = cache_of, cache_of.store
        elif model.reads_features and target is not None:
            model.features_of = target
        return model
    made.parameters = model.parameters  # Layers that another model has packed are no parameters any more.
    return made


def is_compiled(model: CachedModel) -> bool:
    """Whether the model is one that `compiled` makes."""
    return isinstance(model, (CompiledModel, CpuModel))


def compiled_class(model: CachedModel) -> type[CpuModel | CudaModel]:
    """The engine for the model's device. Raises RuntimeError if there is none."""
    if model.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"it can be compiled on a CPU and on CUDA, not on {model.device.type}")
    if model.is_spread:
        raise RuntimeError("it is spread over several devices")
    return CudaModel if model.device.type == "cuda" else CpuModel


@torch.inference_mode()
def make_graphs(
    models: Iterable[CachedModel],
    rehearse: Callable[[], object],
    follow: Callable[[Sequence[tuple[CompiledModel, Shape]]], Iterable[tuple[CompiledModel, Shape]]] = iter,
) -> float | None:
    """Make the graphs for all shapes of steps that `rehearse()` asks of the compiled ones of `models`.

    Steps of other shapes stay eager. follow: wraps the list of what is to be made, to show progress.
    Returns the seconds it took; None if some model cannot be compiled. Then one line says why, and it stays eager.
    """
    start, failed = time.perf_counter(), set()
    works = [model for model in models if isinstance(model, CompiledModel)]
    for model in works:
        model.asked = set()
    try:
        rehearse()
    finally:
        asked = [model.asked or set() for model in works]
        for model in works:
            model.asked = None
    todo = [(model, shape) for model, shapes in zip(works, asked) for shape in model.add(shapes)]
    for compiling, shape in follow(todo):
        if compiling not in failed and not attempted(lambda: compiling.make(shape), compiling.name):
            failed.add(compiling)
            compiling.forget()
    return None if failed else time.perf_counter() - start


def attempted(work: Callable[[], T], name: str) -> T | None:
    """What `work()` gives; None, and one line that says why, if the model of that name cannot be compiled."""
    try:
        return work()
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        no_compiler = isinstance(error, subprocess.CalledProcessError)
        reason = "the C++ compiler failed" if no_compiler else " ".join(str(error).split())[:200]
        print(f"{name} stays eager: it cannot be compiled here ({reason})", file=sys.stderr)
        return None
