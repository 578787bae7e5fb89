"""`PackedLinear`: a linear layer whose weight is kept in the order in which a kernel of our own reads it, and no other.

On a CPU a forward of a few tokens takes as long as its weights take to read, if they are read from one end to the other
and only once for all tokens (kernels.cpp). The packed weight replaces the original: memory stays the same.
"""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

SIDE = 32  # outputs side by side in a block, as in kernels.cpp


class PackedLinear(nn.Module):
    """What `weight[out, in]` and `bias` of a linear layer do to `x[..., in]`. 16-bit weights need an even `in`."""

    def __init__(self, weight, bias):
        super().__init__()
        self.width, size = weight.shape
        pair = 4 // weight.itemsize
        blocks = -(-self.width // SIDE)
        packed = weight.new_zeros(blocks, size // pair, SIDE, pair)
        for block, rows in zip(packed, weight.detach().split(SIDE)):  # one by one: no second copy of the whole
            block[:, : len(rows)] = rows.reshape(len(rows), -1, pair).transpose(0, 1)
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x):
        return torch.ops.native.linear(x, self.packed, self.bias, self.width)


def can_be_packed(weight):
    return weight.dtype == torch.float32 or weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def pack(model):
    """Replace the model's linear layers on a CPU by packed ones, one after the other."""
    for module in model.modules():
        for name, layer in list(module.named_children()):
            if type(layer) in (nn.Linear, Conv1D):
                weight = layer.weight if type(layer) is nn.Linear else layer.weight.t()
                if can_be_packed(weight):
                    setattr(module, name, PackedLinear(weight, layer.bias))
    return model
