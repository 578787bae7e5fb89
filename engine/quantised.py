"""`QuantisedLinear`: a linear layer with a weight of few bits, as the kernels compute it (kernels/linear.h). A model
whose linear layers are replaced by these is a draft that agrees with the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from engine.rounding import dequantised
from engine.sharedWeights import sharing_copy

BITS = (4, 5, 6, 8)  # of a weight; there are kernels for these
GROUP = 32  # neighbouring inputs that share a scale


class Codes(NamedTuple):
    """A weight `[out, in]` in few bits, `(codes - 2 ** (bits - 1)) * scales`.

    codes: uint8 `[out, in]`. scales: bfloat16 `[out, in / group]`, of groups of neighbouring inputs.
    """

    codes: Tensor
    scales: Tensor
    bits: int

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def weight(self) -> Tensor:
        """The dequantised weight, float32 `[out, in]`."""
        return dequantised(self.codes, self.scales, self.bits)


class QuantisedLinear(nn.Module):
    """A linear layer with the weight `codes` and the bias of another one. Its inputs are rounded to int8."""

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", codes.codes, persistent=False)
        self.register_buffer("scales", codes.scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        self.bits = codes.bits

    def forward(self, x: Tensor) -> Tensor:
        weight = Codes(self.codes, self.scales, self.bits)
        y = linear(in_int8(x.float(), weight.group), weight.weight())
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


class Int4Linear(nn.Module):
    """A `QuantisedLinear` with 4 bits in bfloat16, by torch's operator for a GPU. Its inputs stay in bfloat16.

    Raises RuntimeError if the operator is missing, or does not compute the layer's product.
    """

    def __init__(self, layer: QuantisedLinear) -> None:
        super().__init__()
        codes, scales = layer.codes, layer.scales.t().contiguous()
        self.group, self.bits = codes.shape[1] // len(scales), layer.bits
        # The operator adds a zero point to (code - 8) * scale.
        self.register_buffer("scales", torch.stack([scales, torch.zeros_like(scales)], -1), persistent=False)
        packed = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        self.register_buffer("codes", packed, persistent=False)
        self.register_buffer("bias", layer.bias, persistent=False)
        x = torch.eye(codes.shape[1], device=codes.device, dtype=torch.bfloat16)[:: max(codes.shape[1] // 8, 1)]
        if not torch.allclose(self(x), layer(x), rtol=0.02, atol=0.02 * float(layer.scales.abs().max())):
            raise RuntimeError("torch's operator for 4 bits does not compute this product on this device")

    def forward(self, x: Tensor) -> Tensor:
        y = torch._weight_int4pack_mm(x.flatten(0, -2).contiguous(), self.codes, self.group, self.scales)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def in_int8(x: Tensor, group: int) -> Tensor:
    """`x[..., in]` with each group of neighbouring numbers rounded to multiples of its largest one over 127."""
    groups = x.unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / largest.clamp(min=1e-30))).round() * (largest / 127)).flatten(-2)


def quantised_copy(model: PreTrainedModel, codes: Mapping[str, Codes]) -> PreTrainedModel:
    """A copy of the model whose layers named in `codes` have weights of few bits. It shares all other weights."""
    copy = sharing_copy(model)
    by_torch = model.device.type == "cuda" and model.dtype == torch.bfloat16
    for name, weight in codes.items():
        weight = Codes(weight.codes.to(model.device), weight.scales.to(model.device), weight.bits)
        layer = QuantisedLinear(weight, copy.get_submodule(name).bias)
        copy.set_submodule(name, Int4Linear(layer) if by_torch and weight.bits == 4 else layer)
    return copy
