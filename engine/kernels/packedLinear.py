"""`PackedLinear`: a linear layer whose weight is stored in the order in which our kernel reads it.

On a CPU, a forward of a few tokens takes as long as reading its weights, if they are read once for all tokens, from one
end to the other (linear.h). The packed weight replaces the original, so memory stays the same.
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

HUGE = 2 << 20  # Bytes of a huge page. Smaller tensors gain nothing.
MADV_HUGEPAGE = 14
SIDE = 32  # outputs side by side in a block, as in linear.h


class PackedLinear(nn.Module):
    """A linear layer of `weight[out, in]` and `bias`, applied to `x[..., in]`. 16-bit weights need an even `in`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.width, size = weight.shape
        pair = 4 // weight.itemsize
        blocks = -(-self.width // SIDE)
        packed = on_huge_pages(weight.new_empty(blocks, size // pair, SIDE, pair))
        for block, rows in zip(packed, weight.detach().split(SIDE)):  # One by one: no second copy of the whole weight.
            block[:, : len(rows)] = rows.reshape(len(rows), -1, pair).transpose(0, 1)
            block[:, len(rows) :] = 0
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.native.linear(x, self.packed, self.bias, self.width)


def can_be_packed(weight: Tensor) -> bool:
    """Whether there is a kernel for `weight[out, in]`."""
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the model's linear layers by packed ones, one after the other."""
    for module in model.modules():
        for name, layer in list(module.named_children()):
            if type(layer) in (nn.Linear, Conv1D):
                weight = layer.weight if type(layer) is nn.Linear else layer.weight.t()
                if can_be_packed(weight):
                    setattr(module, name, PackedLinear(weight, layer.bias))
    return model


def on_huge_pages(empty: Tensor) -> Tensor:
    """The same tensor, on huge pages if it is in a CPU's memory and the system allows it. Nothing may have been written
    to it yet: a page gets its size when it is first written."""
    if sys.platform == "linux" and empty.device.type == "cpu" and empty.nbytes >= HUGE:
        first = -(-empty.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = empty.data_ptr() + empty.nbytes - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE)  # Advice: may fail.
    return empty
