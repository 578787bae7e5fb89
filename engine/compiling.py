"""`compiled`: a model whose steps are computed by kernels on a CPU and by graphs on a GPU."""

from __future__ import annotations

import subprocess
import sys

from engine.cachedModel import CachedModel
from engine.cpuModel import CpuModel
from engine.cudaModel import CudaModel
from engine.decoderLayers import PackedLayer
from utils import UserError


def compiled(model: CachedModel, target: CachedModel | None = None) -> CachedModel:
    """The same model, computed by kernels on a CPU, and on a GPU by graphs that are captured at their first use. It
    shares the weights: on a CPU, its layers are packed for good (engine/decoderLayers.py). If that is not possible, one
    line prints the reason, and the model stays eager.

    target: for a model that shares the KV cache of another one, or reads its features, that one, compiled. Raises
        UserError for a model that does neither.
    """
    shared = model.cache_of or model.features_of
    if target is not None and (shared is None or shared.model.config.to_dict() != target.model.config.to_dict()):
        raise UserError(f"{model.name} shares nothing with {target.name}: call compiled(model) without a target")
    if is_compiled(model) or model.stays_eager or (target is not None and not is_compiled(target)):
        return model
    cache_of, features = (None, target or model.features_of) if model.reads_features else (target, model.tap)
    try:
        if model.device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"it can be compiled on a CPU and on CUDA, not on {model.device.type}")
        if model.is_spread:
            raise RuntimeError("it is spread over several devices")
        engine = CudaModel if model.device.type == "cuda" else CpuModel
        result = engine(model.model, model.vocabulary, model.name, cache_of, features)
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        if any(isinstance(part, PackedLayer) for part in model.model.modules()):  # Memory may end amid the layers.
            raise
        no_compiler = isinstance(error, subprocess.CalledProcessError)
        reason = "the C++ compiler failed" if no_compiler else " ".join(str(error).split())[:200]
        print(f"{model.name} stays eager: it cannot be compiled here ({reason})", file=sys.stderr)
        model.stays_eager = True  # It is said once.
        if cache_of is not None:
            model.cache_of, model.store = cache_of, cache_of.store
        elif model.reads_features and target is not None:
            model.features_of = target
        return model
    result.parameters = model.parameters  # Layers that another model has packed are not parameters any more.
    return result


def is_compiled(model: CachedModel) -> bool:
    """Whether the model is a result of `compiled`."""
    return isinstance(model, (CudaModel, CpuModel))
