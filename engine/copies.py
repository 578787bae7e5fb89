"""`Copies`: a model's own copies with weights of few bits, which guess for it. Their codes are kept on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.cachedModel import CachedModel
from engine.decoderLayers import PackedLayer, names_of, weight_of
from engine.kernels.loader import cache_folder
from engine.quantised import GROUP, Codes, quantised_copy, rounded

Follow = Callable[[Iterable[Any], str, int], Iterable[Any]]  # follow(work, title, steps) shows progress

METHOD = b"rounded from bfloat16"  # of the method that computes codes: codes of another method on disk are ignored


class Copies:
    """Copies of `model`, which share its KV cache and all weights but those of the linear layers.

    bits: the numbers of bits that `of` will be called with. Codes are computed if they are not on disk, beside the
    built kernels, in a folder whose name has a hash of the weights, whatever dtype they were loaded in. Interrupted
    work is resumed. Raises RuntimeError, with the reason, if the layers cannot be rounded.
    """

    def __init__(self, model: CachedModel, bits: Sequence[int], follow: Follow | None = None) -> None:
        self.name, self.vocabulary = model.name, model.vocabulary
        if model.is_spread:
            raise RuntimeError("it is spread over several devices")
        if any(isinstance(part, PackedLayer) for part in model.model.modules()):
            raise RuntimeError("its layers are packed for the kernels; it can be copied only before it is compiled")
        weights = weights_of(model.model)
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.names, self.weights = list(weights), sum(weight.numel() for weight in weights.values())
        digest = hashlib.sha256(METHOD)
        for name, weight in weights.items():
            digest.update(name.encode())
            digest.update(weight.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())
        self.folder = cache_folder() / f"copies-{digest.hexdigest()[:16]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError:  # A home that cannot be written: nothing is kept.
            self.temporary = tempfile.TemporaryDirectory(prefix="copies-")
            self.folder = Path(self.temporary.name)
        for count in bits:
            absent = [name for name in weights if not self.is_whole(count, name)]
            work = follow(absent, f"rounding {self.name} to {count} bits", len(absent)) if follow and absent else absent
            for name in work:
                self.write(name, rounded(weights[name], count))
        nothing = Codes(torch.empty(0), torch.empty(0), 0)  # Kept without weights: `of` puts its own in their place.
        self.like = quantised_copy(model.model, dict.fromkeys(weights, nothing))

    def of(self, bits: int, cache_of: CachedModel) -> CachedModel:
        """The copy with weights of `bits` bits. cache_of: the model whose KV cache it shares."""
        model = quantised_copy(self.like, {name: self.read(bits, name) for name in self.names})
        return CachedModel(model, self.vocabulary, f"{self.name} in {bits} bits", cache_of)

    def version(self, bits: int) -> str:
        """Identifies the weights in `bits` bits: 16 digits of a hash of their files."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(self.file(bits, name).read_bytes())
        return f"{bits} bits, sha256:{digest.hexdigest()[:16]}"

    def file(self, bits: int, name: str) -> Path:
        return self.folder / str(bits) / f"{name}.safetensors"

    def read(self, bits: int, name: str) -> Codes:
        return Codes(**load_file(self.file(bits, name)), bits=bits)

    def is_whole(self, bits: int, name: str) -> bool:
        """Whether a weight is on disk; incomplete files are ignored and computed again."""
        try:
            out, size = self.shapes[name]
            return self.read(bits, name).codes.shape == (out, -(-size // GROUP) * GROUP)
        except (OSError, SafetensorError, TypeError):
            return False

    def write(self, name: str, codes: Codes) -> None:
        """Write to a temporary file and rename it, so that the file is never incomplete."""
        file = self.file(codes.bits, name)
        draft = self.folder / f"{os.getpid()}-{threading.get_ident()}.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_file({"codes": codes.codes.cpu().contiguous(), "scales": codes.scales.cpu().contiguous()}, draft)
        os.replace(draft, file)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """{name: weight `[out, in]`} of the linear layers in the decoder's layers, in their order, and of the output layer.
    Raises RuntimeError for an unknown type of model, and for adapters and weights that are quantised already."""
    names, head = names_of(model), model.get_output_embeddings()
    inside = f"{names.base}.{names.layers}."
    layers = {
        name: module
        for name, module in model.named_modules()
        if module is head or (name.startswith(inside) and isinstance(module, (nn.Linear, Conv1D)))
    }
    if getattr(model, "peft_config", None):
        raise RuntimeError("its adapters are not merged")
    for name, module in layers.items():
        if type(module) not in (nn.Linear, Conv1D):  # A kind of Linear may keep a scale apart from its weight.
            raise RuntimeError(f"its layer {name} is a {type(module).__name__}, no plain linear layer")
    return {name: weight_of(module) for name, module in layers.items()}
