"""Weights of a few bits: how they are rounded, and `QuantisedLinear`, a layer that multiplies by one.

The kernels fix the format (kernels/linear.h): a weight [out, in] is split along `in` into groups of GROUP numbers, and
weight = (code - 2^(bits-1)) * scale, with one scale for each group of each output. The last group is filled with zeros.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from engine.gate import TOLERANCE
from engine.sharedWeights import sharing_copy
from utils import out_of_memory

BITS = (4, 5, 6, 8)  # of a weight; there are kernels for these
GROUP = 32  # neighbouring inputs that share a scale
SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76)  # candidates for a scale, of the one that fits the largest number
AT_ONCE = 1 << 17  # weights that are rounded together: they stay in a processor's cache


class Codes(NamedTuple):
    """A weight of few bits. codes: uint8 `[out, in]`. scales: bfloat16 `[out, in / GROUP]`. in: of whole groups."""

    codes: Tensor
    scales: Tensor
    bits: int

    def weight(self) -> Tensor:
        """The dequantised weight, float32 `[out, in]`."""
        signed = self.codes.float() - 2 ** (self.bits - 1)
        return (signed.unflatten(1, (self.scales.shape[1], -1)) * self.scales[..., None]).flatten(1)


@torch.no_grad()
def rounded(weight: Tensor, bits: int) -> Codes:
    """The codes and scales `[out, in]` of least squared error, by search, of a weight in bfloat16: so they do not
    depend on the dtype it was loaded in.

    The number of a group that is furthest from zero gets -2^(bits-1), which has no positive partner: its sign is the
    scale's.
    """
    if weight.device.type == "mps":  # It has no bfloat16 before macOS 14.
        weight = weight.cpu()
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    groups_of_row = -(-weight.shape[1] // GROUP)
    codes = torch.empty(len(weight), groups_of_row * GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), groups_of_row, dtype=torch.bfloat16, device=weight.device)
    for rows in torch.arange(len(weight)).split(max(1, AT_ONCE // weight.shape[1])):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        groups = in_groups(weight[part].bfloat16().float(), GROUP).unflatten(1, (-1, GROUP))
        furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        best, least = torch.zeros_like(furthest), torch.full_like(furthest, torch.inf)
        for share in SHARES:
            scale = (furthest * (share / low)).bfloat16().float()
            exact = groups * inverse(scale)
            error = exact.round().clamp_(low, high).sub_(exact).square_().sum(-1, keepdim=True) * scale**2
            best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
        signed = (groups * inverse(best)).round_().clamp_(low, high)
        codes[part], scales[part] = (signed - low).flatten(1), best[..., 0]
    return Codes(codes, scales, bits)


def in_groups(x: Tensor, size: int) -> Tensor:
    """x with its last group of `size` numbers filled with zeros."""
    return pad(x, (0, -x.shape[-1] % size))


def inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where the scale is 0, so that all codes are."""
    return torch.where(scale == 0, 0, 1 / scale)


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

    Raises RuntimeError if the operator is missing, does not take the layer's sizes, or does not compute its product.
    """

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__()
        codes, scales = layer.codes, layer.scales.t().contiguous()
        self.bits, self.inputs, self.group = layer.bits, codes.shape[1], codes.shape[1] // len(scales)
        # The operator adds a zero point to (code - 8) * scale.
        self.register_buffer("scales", torch.stack([scales, torch.zeros_like(scales)], -1), persistent=False)
        tiles = next(count for count in (8, 4, 2) if self.inputs % (16 * count) == 0)  # that are loaded together
        in_pairs = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], tiles)
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


def tolerance_of(model: nn.Module, dtype: torch.dtype) -> float:
    """What logits of a model in `dtype` may differ by, relative. With few bits, an input that lies between two numbers
    of int8 may be rounded to either."""
    quantised = any(isinstance(part, QuantisedLinear) for part in model.modules())
    return TOLERANCE.get(torch.bfloat16 if quantised else dtype, 0.1)


def quantised_copy(model: PreTrainedModel, codes: Mapping[str, Codes]) -> PreTrainedModel:
    """A copy of the model whose layers named in `codes` have weights of few bits. It shares all other weights.

    On a GPU, layers in 4 bits in bfloat16 are computed by torch's operator. One line says if others are not.
    """
    copy = sharing_copy(model)
    on_gpu = model.device.type == "cuda"
    for name, (weight, scales, bits) in codes.items():
        scales = scales.float() if model.device.type == "mps" else scales  # for `rounded`'s reason
        on_device = Codes(weight.to(model.device), scales.to(model.device), bits)
        layer: nn.Module = QuantisedLinear(on_device, copy.get_submodule(name).bias)
        if on_gpu and bits == 4 and model.dtype == torch.bfloat16:
            try:
                layer = Int4Linear(layer)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                say_slow(f"torch's own for a GPU failed ({' '.join(str(error).split())[:200]})")
        elif on_gpu and bits:
            say_slow("torch's own for a GPU is for 4 bits (--draftBits 4) and bfloat16")
        copy.set_submodule(name, layer)
    return copy


@functools.cache
def say_slow(reason: str) -> None:
    """Print once that a copy is slow."""
    print(f"Weights in few bits are multiplied by several operators, which is slow: {reason}.", file=sys.stderr)


def in_few_bits(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, tensor) of the codes, scales and biases of a model's layers in few bits, if they are not packed for the
    kernels."""
    layers = [part for part in model.modules() if isinstance(part, (QuantisedLinear, Int4Linear))]
    return [named for part in layers for named in part.named_buffers()]
