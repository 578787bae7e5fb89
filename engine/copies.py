"""`Copies`: a model's own copies with weights of few bits. Their codes are computed once and kept on disk."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.cachedModel import CachedModel
from engine.calibration import calibrated, weight_of
from engine.decoderLayers import names_of
from engine.kernels.loader import cache_folder
from engine.quantised import GROUP, Codes, quantised_copy
from engine.rounding import PASSES, rounded

Follow = Callable[[Iterable[Any], str, int], Iterable[Any]]  # follow(work, title, steps) shows progress


CALIBRATED = (4, 5)  # bits with which calibration pays; with more, rounding each weight by itself is enough
LARGE = 1 << 30  # Weights of a model for which the passes of `compensated` take too long.
LONG = 50_000_000  # Weights from which on the work is announced.
TOLD = "Rounding the {millions:,.0f} M weights of {name}, once: this takes about a second for each million of them."
METHOD = b"compensated, fitted"  # of the method that computes codes: codes of another method on disk are ignored


def unfollowed(work: Iterable[Any], title: str, steps: int) -> Iterable[Any]:
    """Iterate without a progress bar."""
    return work


class Copies:
    """Copies of `model`, which share its KV cache and all weights but those of the linear layers.

    bits: the numbers of bits that `of` will be called with. text: f() -> tokens `[rows, n]` that the model wrote; the
    weights are rounded so that its outputs on these change least (calibration.py). It is called only if the codes
    are not on disk, beside the built kernels, in a folder whose name has a hash of the weights. Interrupted work is
    resumed. Raises RuntimeError, with the reason, if the layers cannot be rounded.
    """

    def __init__(self, model: CachedModel, bits: Sequence[int], text: Callable[[], Tensor], follow: Follow) -> None:
        self.name, self.vocabulary = model.name, model.vocabulary
        if model.is_spread:
            raise RuntimeError("it is spread over several devices")
        weights = weights_of(model.model)
        uneven = sorted({weight.shape[1] for weight in weights.values() if weight.shape[1] % GROUP})
        if uneven:
            raise RuntimeError(f"it has layers of {uneven[0]} inputs, which is no multiple of {GROUP}")
        self.weights = sum(weight.numel() for weight in weights.values())
        self.names, self.folder = list(weights), cache_folder() / f"copies-{hash_of(weights)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError:  # A home that cannot be written: nothing is kept.
            self.temporary = tempfile.TemporaryDirectory(prefix="copies-")
            self.folder = Path(self.temporary.name)
        absent = {count: [name for name in weights if not self.is_whole(count, name)] for count in bits}
        if any(absent.values()) and self.weights > LONG:
            print(TOLD.format(name=self.name, millions=self.weights / 1e6), file=sys.stderr)
        tokens = text() if any(absent.get(count) for count in CALIBRATED) else None
        for count, names in absent.items():
            if not names:
                continue
            (self.folder / str(count)).mkdir(parents=True, exist_ok=True)
            work: Iterable[tuple[str, Tensor, Tensor]]
            if tokens is not None and count in CALIBRATED:
                done = {name: self.read(count, name)[:2] for name in weights if name not in names}
                passes = PASSES if self.weights < LARGE else 0
                work = calibrated(model.model, tokens, count, GROUP, done, passes)
            else:
                work = ((name, *rounded(weights[name], count, GROUP)) for name in names)
            for name, codes, scales in follow(work, f"rounding {self.name} to {count} bits", len(names)):
                self.write(name, Codes(codes, scales, count))
        nothing = Codes(torch.empty(0), torch.empty(0), 0)  # Kept without weights: `of` puts its own in their place.
        self.like = quantised_copy(model.model, dict.fromkeys(weights, nothing))

    def of(self, bits: int, cache_of: CachedModel) -> CachedModel:
        """The copy with weights of `bits` bits. cache_of: the model whose KV cache it shares."""
        model = quantised_copy(self.like, self.codes(bits))
        return CachedModel(model, self.vocabulary, f"{self.name} in {bits} bits", cache_of)

    def codes(self, bits: int) -> dict[str, Codes]:
        """{name: weight in `bits` bits} of all linear layers."""
        return {name: self.read(bits, name) for name in self.names}

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
            self.read(bits, name)
            return True
        except (OSError, SafetensorError, TypeError):
            return False

    def write(self, name: str, codes: Codes) -> None:
        """Write to a temporary file and rename it, so that the file is never incomplete."""
        draft = self.folder / f"{os.getpid()}.safetensors"
        parts = {"codes": codes.codes, "scales": codes.scales}
        save_file({part: tensor.cpu().contiguous() for part, tensor in parts.items()}, draft)
        os.replace(draft, self.file(codes.bits, name))


def rounded_copy(model: CachedModel, bits: int) -> CachedModel:
    """A copy of `model` whose weights are rounded each by itself, without a text (`calibration.rounded`). It shares the
    model's KV cache."""
    weights = weights_of(model.model)
    codes = {name: Codes(*rounded(weight, bits, GROUP), bits) for name, weight in weights.items()}
    return CachedModel(quantised_copy(model.model, codes), model.vocabulary, f"{model.name} in {bits} bits", model)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """{name: weight `[out, in]`} of the linear layers in the decoder's layers, in their order, and of the output layer.
    Raises RuntimeError for an unknown type of model."""
    names, head = names_of(model), model.get_output_embeddings()
    inside = f"{names.base}.{names.layers}."
    return {
        name: weight_of(module)
        for name, module in model.named_modules()
        if module is head or (name.startswith(inside) and isinstance(module, (nn.Linear, Conv1D)))
    }


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """16 digits of a hash of weights, whatever dtype they were loaded in."""
    digest = hashlib.sha256(METHOD)
    for name, weight in weights.items():
        digest.update(name.encode())
        digest.update(weight.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
