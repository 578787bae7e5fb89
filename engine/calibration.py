"""`calibrated`: a model's linear layers rounded to a few bits, so that the copy agrees with it as often as possible.

The copy guesses for the model and shares its key/value cache. The kernels fix the format: a weight [out, in] is split
along `in` into groups of `group` numbers; weight = (code - 2^(bits-1)) * scale, with one scale for each group of each
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.decoderLayers import NAMES

SHRINKAGE = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76)  # candidates for a scale, of the one that fits the largest number
DAMPING = 0.01  # of a hessian's mean diagonal, added to the diagonal
RIDGE = 0.5  # the same, where a weight is changed to make up for earlier layers' errors
BLOCK = 128  # columns whose errors reach the columns after them in one product
TOGETHER = 8  # rows of text in a forward


def rounded(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [out, in] and scales bfloat16 [out, in / group] of least squared error, by search."""
    groups = weight.detach().float().unflatten(1, (-1, group))
    scales = best_scales(groups, bits)
    return (codes_of(groups, scales[..., None], bits) + 2 ** (bits - 1)).to(torch.uint8).flatten(1), scales


def compensated(weight: Tensor, hessian: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Codes and scales as of `rounded`, which keep the layer's outputs rather than its weights: each column's error is
    passed on to the columns after it, as far as the layer's inputs allow.

    hessian: sum of x x^T over the inputs x, float32 [in, in]. GPTQ (arXiv 2210.17323), algorithm 1.
    """
    rest = weight.detach().float().t().contiguous()  # [in, out]: a column lies in one piece.
    upper, importance = inverse_root(hessian), hessian.diagonal()
    codes, scales = torch.empty_like(rest, dtype=torch.uint8), []
    block = max(BLOCK // group, 1) * group
    for start in range(0, len(rest), block):
        end = min(start + block, len(rest))
        errors = torch.empty_like(rest[start:end])
        for i in range(start, end):
            if i % group == 0:
                scales.append(best_scales(rest[i : i + group].t(), bits, importance[i : i + group]))
            code = codes_of(rest[i], scales[-1], bits)
            codes[i] = code + 2 ** (bits - 1)
            errors[i - start] = (rest[i] - code * scales[-1]) / upper[i, i]
            rest[i + 1 : end].addr_(upper[i, i + 1 : end], errors[i - start], alpha=-1)
        rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    return codes.t().contiguous(), torch.stack(scales, 1)


def dequantised(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The weight [out, in], float32, that these codes and scales stand for."""
    groups = codes.unflatten(1, (scales.shape[1], -1)).float() - 2 ** (bits - 1)
    return (groups * scales[..., None]).flatten(1)


def best_scales(numbers: Tensor, bits: int, importance: Tensor | float = 1.0) -> Tensor:
    """The scales (bfloat16) of numbers [..., group] with the least squared error, weighted by their importance.

    The number furthest from zero gets the code 0, which stands for -2^(bits-1) and has no positive partner: its sign
    is the scale's.
    """
    furthest = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(furthest), torch.full_like(furthest, torch.inf)
    for share in SHRINKAGE:
        scale = (furthest * (-share / 2 ** (bits - 1))).bfloat16().float()
        error = (codes_of(numbers, scale, bits) * scale - numbers).square_().mul_(importance).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best.squeeze(-1).bfloat16()


def codes_of(numbers: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest codes, less 2^(bits-1). A scale of 0 makes them 0."""
    return (numbers / scale).nan_to_num_(0, 0, 0).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The hessian with its diagonal raised, so that it has an inverse."""
    return hessian + torch.eye(len(hessian)) * (damping * hessian.diagonal().mean()).clamp_min(1e-8)


def inverse_root(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U = H^-1, of the damped hessian."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(hessian, DAMPING)))
    return torch.linalg.cholesky(inverse, upper=True)


class ExactKeys(Cache):
    """The keys and values of one layer for some texts, as the model has them: those that the copy attends to."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.kept: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.kept = self.kept or (key_states, value_states)
        return self.kept


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


@dataclass
class Texts:
    """Rows of the calibration text between two layers, and how a layer is called with them."""

    exact: Tensor  # the model's hidden states [rows, n, hidden]
    near: Tensor  # and the copy's
    args: tuple[Any, ...]  # of a layer's call, after the hidden states
    kwargs: dict[str, Any]
    cache: ExactKeys

    def through(self, layer: nn.Module, states: Tensor) -> Tensor:
        out = layer(states, *self.args, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


def begun(model: PreTrainedModel, first: nn.Module, tokens: Tensor) -> Texts:
    """The texts before the first layer."""
    cache = ExactKeys()
    args, kwargs = arguments(first, lambda: model(input_ids=tokens, past_key_values=cache, use_cache=True))
    states = args[0] if args else kwargs.pop("hidden_states")
    return Texts(states, states, args[1:], kwargs, cache)


def flat(states: Tensor) -> Tensor:
    """States [rows, n, width] as [tokens, width], float32, without a row's first token: the copy never reads that, and
    it is an outlier in many models."""
    return states[:, 1:].flatten(0, 1).float()


def weight_of(linear: nn.Module) -> Tensor:
    """A view [out, in] of a linear layer's weight."""
    weight = linear.weight.detach()
    return weight.t() if isinstance(linear, Conv1D) else weight


@torch.no_grad()
def calibrated(
    model: PreTrainedModel,
    tokens: Tensor,
    bits: int,
    group: int,
    done: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name of a module, codes, scales) of every linear layer of the decoder layers, in order, and of the output
    embedding. The model stays as it is, and needs the memory of one more layer.

    tokens: [rows, n], text that the model wrote itself. done: what an earlier run yielded, {name: (codes, scales)}:
    it is neither computed nor yielded again.
    """
    names, done = NAMES[model.config.model_type], done or {}
    layers: Any = model.get_submodule(where := f"{names.base}.{names.layers}")
    texts = [begun(model, layers[0], rows) for rows in tokens.split(TOGETHER)]
    for i, layer in enumerate(layers):
        copy = deepcopy(layer)
        for some in texts:
            some.cache.kept = None
            some.exact = some.through(layer, some.exact)
        for stage in names.qkv, [names.out], names.up, [names.down]:
            linears = {f"{where}.{i}.{name}": copy.get_submodule(name) for name in stage}
            if not linears.keys() <= done.keys():
                codes, scales = chosen(copy, list(linears.values()), texts, stage == [names.down], bits, group)
                sizes = [len(weight_of(linear)) for linear in linears.values()]
                found = dict(zip(linears, zip(codes.split(sizes), scales.split(sizes))))
                yield from ((name, *found[name]) for name in linears if name not in done)
            for name, linear in linears.items():
                weight_of(linear).copy_(dequantised(*(done.get(name) or found[name]), bits))
        for some in texts:
            some.near = some.through(copy, some.near)
    head, last = model.get_output_embeddings(), model.get_submodule(f"{names.base}.{names.last}")
    name = next(name for name, module in model.named_modules() if module is head)
    if name not in done:
        states = torch.cat([flat(last(some.near)) for some in texts])
        yield name, *compensated(weight_of(head), states.t() @ states, bits, group)


def chosen(
    layer: nn.Module, linears: Sequence[nn.Module], texts: Sequence[Texts], is_last: bool, bits: int, group: int
) -> tuple[Tensor, Tensor]:
    """Codes and scales of linear layers with the same inputs, one below the other.

    The last linear layer of a decoder layer first moves to where the copy's states are nearest to the model's (ridge
    regression): it makes up for what was rounded before it, in this decoder layer and in earlier ones.
    """
    weight = torch.cat([weight_of(linear).float() for linear in linears])
    hessian, lacking = weight.new_zeros(weight.shape[1], weight.shape[1]), torch.zeros_like(weight)
    for some in texts:
        (inputs, *_), _ = arguments(linears[0], lambda: some.through(layer, some.near))
        inputs = flat(inputs.view(*some.near.shape[:2], -1))
        hessian.addmm_(inputs.t(), inputs)
        if is_last:
            lacking.addmm_(flat(some.exact - some.through(layer, some.near)).t(), inputs)
    if is_last:
        weight += torch.linalg.solve(damped(hessian, RIDGE), lacking.t()).t()
    return compensated(weight, hessian, bits, group)
