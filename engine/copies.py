"""`Copies`: a model's own copies with weights of few bits, which guess for it. Their codes are kept on disk.

With few bits, the linear layers are rounded so that the copy agrees with the model as often as possible (`calibrated`).
The copy shares the model's key/value cache, so calibration gives it the model's keys and values.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.cachedModel import CachedModel
from engine.decoderLayers import names_of, weight_of
from engine.kernels.loader import cache_folder
from engine.quantised import PASSES, Codes, compensated, damped, quantised_copy, rounded

Follow = Callable[[Iterable[Any], str, int], Iterable[Any]]  # follow(work, title, steps) shows progress

CALIBRATED = (4, 5)  # bits with which calibration pays; with more, rounding each weight by itself is enough
LARGE = 1 << 30  # Weights of a model for which the passes of `compensated` take too long.
LONG = 50_000_000  # Weights from which on the work is announced.
METHOD = b"compensated, fitted"  # of the method that computes codes: codes of another method on disk are ignored
RIDGE = 0.5  # share of a hessian's mean diagonal: how little a weight moves to make up for what was rounded before it
ROWS = 8  # of text in a forward


class Copies:
    """Copies of `model`, which share its KV cache and all weights but those of the linear layers.

    bits: the numbers of bits that `of` will be called with. text: f() -> tokens `[rows, n]` that the model wrote; the
    weights are rounded so that its outputs on these change least. It is called only if the codes are not on disk,
    beside the built kernels, in a folder whose name has a hash of the weights, whatever dtype they were loaded in.
    Interrupted work is resumed. Raises RuntimeError, with the reason, if the layers cannot be rounded.
    """

    def __init__(
        self, model: CachedModel, bits: Sequence[int], text: Callable[[], Tensor], follow: Follow | None = None
    ) -> None:
        self.name, self.vocabulary = model.name, model.vocabulary
        if model.is_spread:
            raise RuntimeError("it is spread over several devices")
        weights = weights_of(model.model)
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
        absent = {count: [name for name in weights if not self.is_whole(count, name)] for count in bits}
        if any(absent.get(count) for count in CALIBRATED) and self.weights > LONG:
            millions = f"{self.weights / 1e6:,.0f} M"
            said = f"Rounding the {millions} weights of {self.name}, once: this takes about a second for each million"
            print(f"{said} of them.", file=sys.stderr)
        tokens = text() if any(absent.get(count) for count in CALIBRATED) else None
        for count, names in ((count, names) for count, names in absent.items() if names):
            work: Iterable[tuple[str, Codes]] = ((name, rounded(weights[name], count)) for name in names)
            if tokens is not None and count in CALIBRATED:
                done = {name: self.read(count, name) for name in weights if name not in names}
                work = calibrated(model.model, tokens, count, done, PASSES if self.weights < LARGE else 0)
            for name, codes in follow(work, f"rounding {self.name} to {count} bits", len(names)) if follow else work:
                self.write(name, codes)
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
            self.read(bits, name)
            return True
        except (OSError, SafetensorError, TypeError):
            return False

    def write(self, name: str, codes: Codes) -> None:
        """Write to a temporary file and rename it, so that the file is never incomplete."""
        draft, file = self.folder / f"{os.getpid()}.safetensors", self.file(codes.bits, name)
        file.parent.mkdir(exist_ok=True)
        save_file({"codes": codes.codes.cpu().contiguous(), "scales": codes.scales.cpu().contiguous()}, draft)
        os.replace(draft, file)


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


# Calibration.


class Caught(Exception):
    """A module was called."""


def arguments_of(module: nn.Module, call: Callable[[], Any]) -> list[Any]:
    """[arguments, {name: argument}] with which `call` first calls the module. It ends there."""
    arguments: list[Any] = []

    def catch(_: nn.Module, *caught: Any) -> None:
        arguments.extend(caught)
        raise Caught

    with module.register_forward_pre_hook(catch, with_kwargs=True), suppress(Caught):
        call()
    return arguments


class States(Cache):
    """A KV cache that gives the copy of a layer the keys and values of the layer itself: those `written` first."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.written: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.written = self.written or (key_states, value_states)
        return self.written


class Texts:
    """Rows of the calibration text between two layers, and how a layer is called with them.

    kind: of the layer, in layers of several kinds, which are called with other masks and rotary embeddings.
    exact, near: the model's hidden states and the copy's, `[rows, n, hidden]`: at first those before the layer `first`.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, kinds: Sequence[str], tokens: Tensor) -> None:
        self.states = States()
        call = partial(model, input_ids=tokens, past_key_values=self.states, use_cache=True)
        self.calls = {kind: arguments_of(layers[kinds.index(kind)], call) for kind in set(kinds)}
        args, kwargs = self.calls[kinds[0]]
        self.exact = self.near = args[0] if args else kwargs["hidden_states"]
        self.kind = kinds[0]

    def through(self, layer: nn.Module, states: Tensor) -> Tensor:
        args, kwargs = self.calls[self.kind]
        out = layer(*args, **kwargs | {"hidden_states": states}) if not args else layer(states, *args[1:], **kwargs)
        return out[0] if isinstance(out, tuple) else out


def flat(states: Tensor) -> Tensor:
    """States [rows, n, width] as [tokens, width], float32. A row's first token is an outlier that no copy reads."""
    return states[:, 1:].flatten(0, 1).float()


@torch.no_grad()
def calibrated(
    model: PreTrainedModel, tokens: Tensor, bits: int, done: Mapping[str, Codes], passes: int = PASSES
) -> Iterator[tuple[str, Codes]]:
    """(name of a module, its weight) of every linear layer of the decoder layers, in order, and of the output
    embedding. The model is not changed; this needs the memory of one more layer.

    tokens: [rows, n], text that the model wrote itself. done: the results of an earlier run, {name: weight}: they are
    neither computed nor yielded again. passes: of `compensated`; each takes longer than the rest of it.
    """
    names = names_of(model)
    layers: Any = model.get_submodule(where := f"{names.base}.{names.layers}")
    kinds = getattr(model.config, "layer_types", None) or ["all"] * len(layers)
    batches = [Texts(model, layers, kinds, rows) for rows in tokens.split(ROWS)]
    # What the last linear layer computes is added to the hidden states times this; 0: after a norm.
    share = 0.0 if names.after_mlp else getattr(model.config, "residual_multiplier", 1.0)
    for i, layer in enumerate(layers):
        copy = deepcopy(layer)
        for texts in batches:
            texts.states.written, texts.kind = None, kinds[i]
            texts.exact = texts.through(layer, texts.exact)
        for stage in names.qkv, [names.out], names.up, [names.down]:
            linears = {f"{where}.{i}.{name}": copy.get_submodule(name) for name in stage}
            codes = {name: done[name] for name in linears if name in done}
            if len(codes) < len(linears):
                fits = share if stage == [names.down] else 0.0
                of_all = calibrated_stage(copy, list(linears.values()), batches, fits, bits, passes)
                sizes = [len(weight_of(linear)) for linear in linears.values()]
                parts = zip(of_all.codes.split(sizes), of_all.scales.split(sizes))
                computed = {name: Codes(*part, bits) for name, part in zip(linears, parts) if name not in codes}
                yield from computed.items()
                codes |= computed
            for name, linear in linears.items():
                weight_of(linear).copy_(codes[name].weight()[:, : weight_of(linear).shape[1]])
        for texts in batches:
            texts.near = texts.through(copy, texts.near)
    head, last = model.get_output_embeddings(), model.get_submodule(f"{names.base}.{names.last}")
    name = next(name for name, module in model.named_modules() if module is head)
    if name not in done:
        states = torch.cat([flat(last(texts.near)) for texts in batches])
        yield name, compensated(weight_of(head), states.t() @ states, bits, passes)


def calibrated_stage(
    layer: nn.Module, linears: Sequence[nn.Module], batches: Sequence[Texts], share: float, bits: int, passes: int
) -> Codes:
    """The weights of linear layers with the same inputs, one below the other.

    The last linear layer of a decoder layer first moves to where the copy's states are nearest to the model's (ridge
    regression): it makes up for what was rounded before it, in this decoder layer and in earlier ones. share: what its
    outputs are multiplied by when they are added to the hidden states; 0: it does not move.
    """
    weight = torch.cat([weight_of(linear).float() for linear in linears])
    hessian, lacking = weight.new_zeros(weight.shape[1], weight.shape[1]), torch.zeros_like(weight)
    for texts in batches:
        args, _ = arguments_of(linears[0], lambda: texts.through(layer, texts.near))
        inputs = flat(args[0].view(*texts.near.shape[:2], -1))
        hessian.addmm_(inputs.t(), inputs)
        if share:
            lacking.addmm_(flat(texts.exact - texts.through(layer, texts.near)).t(), inputs, alpha=1 / share)
    if share:
        weight += torch.linalg.solve(damped(hessian, RIDGE), lacking.t()).t()
    return compensated(weight, hessian, bits, passes)
