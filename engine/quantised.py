"""`QuantisedLinear`: a linear layer with a weight of few bits, as the kernels compute it (kernels/linear.h). A model whose
linear layers are replaced by these is a draft that agrees with the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

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
        """The weight, float32 `[out, in]`."""
        signed = self.codes.float() - 2 ** (self.bits - 1)
        return (signed.unflatten(1, (-1, self.group)) * self.scales.float()[..., None]).flatten(1)


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


def in_int8(x: Tensor, group: int) -> Tensor:
    """`x[..., in]` with each group of neighbouring numbers rounded to multiples of its largest one over 127."""
    groups = x.unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / largest.clamp(min=1e-30))).round() * (largest / 127)).flatten(-2)


def quantised_copy(model: PreTrainedModel, codes: Mapping[str, Codes]) -> PreTrainedModel:
    """A copy of the model whose layers of these names have weights of few bits. It shares all other weights."""
    copy = sharing_copy(model)
    for name, weight in codes.items():
        copy.set_submodule(name, QuantisedLinear(weight, copy.get_submodule(name).bias))
    return copy
