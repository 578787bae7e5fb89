"""`calibrated`: a model's linear layers rounded to a few bits, so that the copy agrees with it as often as possible.

The copy guesses for the model and shares its key/value cache, so calibration gives it the model's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.decoderLayers import names_of
from engine.rounding import PASSES, compensated, damped, dequantised

RIDGE = 0.5  # share of a hessian's mean diagonal: how little a weight moves to make up for what was rounded before it
ROWS = 8  # of text in a forward


class ExactKeys(Cache):
    """The keys and values of one layer for some texts, as the model has them: those that the copy attends to."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.states = self.states or (key_states, value_states)
        return self.states


class Caught(Exception):
    """The arguments of a module's call."""


def arguments(module: nn.Module, call: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which `call` first calls the module. It ends there."""

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Caught(args, kwargs)

    hook = module.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        call()
    except Caught as caught:
        return caught.args[0], caught.args[1]
    finally:
        hook.remove()
    raise RuntimeError("the model does not call one of its layers")


class Texts:
    """Rows of the calibration text between two layers, and how a layer is called with them.

    exact, near: the model's hidden states and the copy's, `[rows, n, hidden]`: at first those before the layer `first`.
    """

    def __init__(self, model: PreTrainedModel, first: nn.Module, tokens: Tensor) -> None:
        self.cache = ExactKeys()
        args, self.kwargs = arguments(
            first, lambda: model(input_ids=tokens, past_key_values=self.cache, use_cache=True)
        )
        self.exact = self.near = args[0] if args else self.kwargs.pop("hidden_states")
        self.args = args[1:]  # of a layer's call, after the hidden states

    def through(self, layer: nn.Module, states: Tensor) -> Tensor:
        out = layer(states, *self.args, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


def flat(states: Tensor) -> Tensor:
    """States [rows, n, width] as [tokens, width], float32. A row's first token is an outlier that no copy reads."""
    return states[:, 1:].flatten(0, 1).float()


def weight_of(linear: nn.Module) -> Tensor:
    """A view [out, in] of a linear layer's weight."""
    return linear.weight.detach().t() if isinstance(linear, Conv1D) else linear.weight.detach()


@torch.no_grad()
def calibrated(
    model: PreTrainedModel,
    tokens: Tensor,
    bits: int,
    group: int,
    done: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    passes: int = PASSES,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name of a module, codes, scales) of every linear layer of the decoder layers, in order, and of the output
    embedding. The model is not changed; this needs the memory of one more layer.

    tokens: [rows, n], text that the model wrote itself. done: the results of an earlier run, {name: (codes, scales)}:
    they are neither computed nor yielded again. passes: of `compensated`; each takes longer than the rest of it.
    """
    names, done = names_of(model), done or {}
    layers: Any = model.get_submodule(where := f"{names.base}.{names.layers}")
    batches = [Texts(model, layers[0], rows) for rows in tokens.split(ROWS)]
    for i, layer in enumerate(layers):
        copy = deepcopy(layer)
        for texts in batches:
            texts.cache.states = None
            texts.exact = texts.through(layer, texts.exact)
        for stage in names.qkv, [names.out], names.up, [names.down]:
            linears = {f"{where}.{i}.{name}": copy.get_submodule(name) for name in stage}
            if not linears.keys() <= done.keys():
                parts = list(linears.values()), batches, stage == [names.down]
                codes, scales = rounded_linears(copy, *parts, bits, group, passes)
                sizes = [len(weight_of(linear)) for linear in linears.values()]
                new = dict(zip(linears, zip(codes.split(sizes), scales.split(sizes))))
                yield from ((name, *new[name]) for name in linears if name not in done)
            for name, linear in linears.items():
                weight_of(linear).copy_(dequantised(*(done.get(name) or new[name]), bits))
        for texts in batches:
            texts.near = texts.through(copy, texts.near)
    head, last = model.get_output_embeddings(), model.get_submodule(f"{names.base}.{names.last}")
    name = next(name for name, module in model.named_modules() if module is head)
    if name not in done:
        states = torch.cat([flat(last(texts.near)) for texts in batches])
        yield name, *compensated(weight_of(head), states.t() @ states, bits, group, passes)


def rounded_linears(
    layer: nn.Module, linears: Sequence[nn.Module], batches: Sequence[Texts], is_last: bool, *how: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of linear layers with the same inputs, one below the other. how: bits, group, passes.

    The last linear layer of a decoder layer first moves to where the copy's states are nearest to the model's (ridge
    regression): it makes up for what was rounded before it, in this decoder layer and in earlier ones.
    """
    weight = torch.cat([weight_of(linear).float() for linear in linears])
    hessian, lacking = weight.new_zeros(weight.shape[1], weight.shape[1]), torch.zeros_like(weight)
    for texts in batches:
        (inputs, *_), _ = arguments(linears[0], lambda: texts.through(layer, texts.near))
        inputs = flat(inputs.view(*texts.near.shape[:2], -1))
        hessian.addmm_(inputs.t(), inputs)
        if is_last:
            lacking.addmm_(flat(texts.exact - texts.through(layer, texts.near)).t(), inputs)
    if is_last:
        weight += torch.linalg.solve(damped(hessian, RIDGE), lacking.t()).t()
    return compensated(weight, hessian, *how)
