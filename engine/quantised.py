"""Weights of a few bits: how they are rounded, and `QuantisedLinear`, a layer that multiplies by one.

The kernels fix the format (kernels/linear.h): a weight [out, in] is split along `in` into groups of GROUP numbers, and
weight = (code - 2^(bits-1)) * scale, with one scale for each group of each output. The last group is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from engine.sharedWeights import sharing_copy

BITS = (4, 5, 6, 8)  # of a weight; there are kernels for these
GROUP = 32  # neighbouring inputs that share a scale
SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76)  # candidates for a scale, of the one that fits the largest number
DAMPING = 0.01  # of a hessian's mean diagonal, added to the diagonal
PASSES = 2  # of improving scales and codes alternately
BLOCK = 128  # columns whose changes reach the columns after them in one product
OUTPUTS = 1024  # whose scales are fitted together: it bounds memory


class Codes(NamedTuple):
    """A weight of few bits. codes: uint8 `[out, in]`. scales: bfloat16 `[out, in / GROUP]`. in: of whole groups."""

    codes: Tensor
    scales: Tensor
    bits: int

    def weight(self) -> Tensor:
        """The dequantised weight, float32 `[out, in]`."""
        signed = self.codes.float() - 2 ** (self.bits - 1)
        return (signed.unflatten(1, (self.scales.shape[1], -1)) * self.scales[..., None]).flatten(1)


def rounded(weight: Tensor, bits: int) -> Codes:
    """The codes and scales of least squared error, by search."""
    groups = in_groups(weight.detach().float(), GROUP).unflatten(1, (-1, GROUP))
    scales = best_scales(groups, bits)
    return unsigned(nearest(groups, scales[..., None], bits).flatten(1), scales, bits)


def compensated(weight: Tensor, hessian: Tensor, bits: int, passes: int = PASSES) -> Codes:
    """Codes and scales that keep the layer's outputs rather than its weights.

    hessian: sum of x x^T over the inputs x, float32 [in, in]. GPTQ (arXiv 2210.17323, algorithm 1), then in each pass
    the best scales for these codes, and for each column the best codes while the others stay.
    """
    columns = in_groups(weight.detach().float(), GROUP).t().contiguous()  # [in, out]
    hessian = damped(in_groups(in_groups(hessian, GROUP).t(), GROUP), DAMPING)
    root = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    scales, diagonal = columns.new_empty(len(columns) // GROUP, len(weight)), hessian.diagonal()
    ideal = columns.clone()
    codes = codes_by_column(ideal, ideal, -root / root.diagonal()[:, None], scales, bits, diagonal)
    wanted = hessian @ columns
    for _ in range(passes):
        scales = fitted(wanted, hessian, codes, scales)
        before = codes * scales.repeat_interleave(GROUP, 0)
        ideal = before + (wanted - hessian @ before) / diagonal[:, None]
        codes = codes_by_column(ideal, before, hessian / diagonal, scales, bits)
    return unsigned(codes.t(), scales.t(), bits)


def in_groups(x: Tensor, size: int) -> Tensor:
    """x with its last group of `size` numbers filled with zeros."""
    return pad(x, (0, -x.shape[-1] % size))


def codes_by_column(
    ideal: Tensor, before: Tensor, influence: Tensor, scales: Tensor, bits: int, importance: Tensor | None = None
) -> Tensor:
    """Codes [in, out] nearest to the ideal columns (rows of the tensors here), one after the other. Where a column
    moves from what it was before, the ideals of later ones move the other way, `influence` [in, in] times as far.

    importance: [in], of the columns. If there is one, a group's scales [out] are searched for when its turn comes.
    """
    codes = torch.empty_like(ideal)
    for start in range(0, len(ideal), BLOCK):
        end = min(start + BLOCK, len(ideal))
        moves = torch.empty_like(ideal[start:end])
        for i in range(start, end):
            if importance is not None and i % GROUP == 0:
                part = slice(i, i + GROUP)
                scales[i // GROUP] = best_scales(ideal[part].t(), bits, importance[part])
            scale = scales[i // GROUP]
            codes[i] = nearest(ideal[i], scale, bits)
            moves[i - start] = codes[i] * scale - before[i]
            ideal[i + 1 : end].addr_(influence[i, i + 1 : end], moves[i - start], alpha=-1)
        ideal[end:].addmm_(influence[start:end, end:].t(), moves, alpha=-1)
    return codes


def fitted(wanted: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The scales [in / GROUP, out] with which these codes keep the layer's outputs best: least squares per output.

    wanted: hessian @ weight^T, [in, out].
    """
    best = []
    for right, code, old in zip(*(x.t().split(OUTPUTS) for x in (wanted, codes, scales))):
        groups = code.unflatten(1, (len(scales), -1))  # [outputs, in / GROUP, GROUP]
        parts = zip(groups.unbind(1), hessian.chunk(len(scales)))
        system = torch.stack([((part @ rows).view_as(groups) * groups).sum(-1) for part, rows in parts], 1)
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal += (ridge := 1e-3 * diagonal.mean(1, keepdim=True) + 1e-8)  # A group of zeros keeps its scale.
        best.append(torch.linalg.solve(system, (right.unflatten(1, groups.shape[1:]) * groups).sum(-1) + ridge * old))
    return torch.cat(best).bfloat16().float().t().contiguous()


def best_scales(groups: Tensor, bits: int, importance: Tensor | float = 1.0) -> Tensor:
    """The scales, as bfloat16 has them, of numbers [..., GROUP] with the least squared error, weighted by importance.

    The number furthest from zero gets -2^(bits-1), which has no positive partner: its sign is the scale's.
    """
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = torch.zeros_like(furthest), torch.full_like(furthest, torch.inf)
    for share in SHARES:
        scale = (furthest * (-share / 2 ** (bits - 1))).bfloat16().float()
        error = (nearest(groups, scale, bits) * scale - groups).square_().mul_(importance).sum(-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best.squeeze(-1)


def nearest(numbers: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The nearest codes, less 2^(bits-1). A scale of 0 makes them 0."""
    return (numbers / scale).nan_to_num_(0, 0, 0).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def unsigned(codes: Tensor, scales: Tensor, bits: int) -> Codes:
    """The `Codes` of codes less 2^(bits-1)."""
    return Codes((codes + 2 ** (bits - 1)).to(torch.uint8).contiguous(), scales.bfloat16().contiguous(), bits)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """The hessian with its diagonal raised, so that it has an inverse. damping: of the mean diagonal."""
    raised = (damping * hessian.diagonal().mean()).clamp_min(1e-8)
    return hessian + torch.eye(len(hessian), device=hessian.device) * raised


class QuantisedLinear(nn.Module):
    """A linear layer with the weight `codes` and the bias of another one, as the kernels compute it."""

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", codes.codes, persistent=False)
        self.register_buffer("scales", codes.scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.bits = codes.bits

    def forward(self, x: Tensor) -> Tensor:
        """Each group of inputs is rounded to int8: to multiples of its largest number over 127."""
        groups = in_groups(x.float(), self.codes.shape[1]).unflatten(-1, (self.scales.shape[1], -1))
        largest = groups.abs().amax(-1, keepdim=True)
        inputs = (groups * (127 / largest.clamp(min=1e-30))).round() * (largest / 127)
        y = linear(inputs.flatten(-2), Codes(self.codes, self.scales, self.bits).weight())
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class Int4Linear(nn.Module):
    """A `QuantisedLinear` with 4 bits in bfloat16, by torch's operator for a GPU. Its inputs stay in bfloat16.

    Raises RuntimeError if the operator is missing, or does not compute the layer's product.
    """

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__()
        codes, scales = layer.codes, layer.scales.t().contiguous()
        self.bits, self.inputs, self.group = layer.bits, codes.shape[1], codes.shape[1] // len(scales)
        # The operator adds a zero point to (code - 8) * scale.
        self.register_buffer("scales", torch.stack([scales, torch.zeros_like(scales)], -1), persistent=False)
        in_pairs = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        self.register_buffer("codes", in_pairs, persistent=False)
        self.register_buffer("bias", layer.bias, persistent=False)
        x = torch.eye(codes.shape[1], device=codes.device, dtype=torch.bfloat16)[:: max(codes.shape[1] // 8, 1)]
        if not torch.allclose(self(x), layer(x), rtol=0.02, atol=0.02 * float(layer.scales.abs().max())):
            raise RuntimeError("torch's operator for 4 bits does not compute this product on this device")

    def forward(self, x: Tensor) -> Tensor:
        x = in_groups(x, self.inputs)
        y = torch._weight_int4pack_mm(x.flatten(0, -2).contiguous(), self.codes, self.group, self.scales)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def quantised_copy(model: PreTrainedModel, codes: Mapping[str, Codes]) -> PreTrainedModel:
    """A copy of the model whose layers named in `codes` have weights of few bits. It shares all other weights."""
    copy = sharing_copy(model)
    by_torch = model.device.type == "cuda" and model.dtype == torch.bfloat16
    for name, (weight, scales, bits) in codes.items():
        on_device = Codes(weight.to(model.device), scales.to(model.device), bits)
        layer = QuantisedLinear(on_device, copy.get_submodule(name).bias)
        copy.set_submodule(name, Int4Linear(layer) if by_torch and bits == 4 else layer)
    return copy
