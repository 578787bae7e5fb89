"""`PackedLinear`: a linear layer whose weight is kept in oneDNN's blocked layout, and in no other.

On a CPU a forward of a few tokens takes as long as its weights take to read. `torch.nn.functional.linear` reads 16-bit
weights at half the speed of memory; oneDNN's kernels for packed weights read them at nearly its whole speed, whatever
the number of tokens. The packed weight replaces the original: memory stays the same.
"""

import itertools
import weakref

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

# A compiled graph cannot hold a packed weight (its layout is opaque), so it names the layer that does by a number. The
# number is a tensor, hence an input of the graph and no part of it: a graph compiled before serves another process.
_layers, _numbers = weakref.WeakValueDictionary(), itertools.count()
_library = torch.library.Library("packed", "DEF")
_library.define("linear(Tensor x, Tensor number, int width) -> Tensor")
_library.impl("linear", lambda x, number, width: _layers[number.item()].multiply(x), "CPU")
_library.impl("linear", lambda x, number, width: x.new_empty(*x.shape[:-1], width), "Meta")


class PackedLinear(nn.Module):
    """What `weight[out, in]` and `bias` of a linear layer do to `x[..., in]`."""

    def __init__(self, weight, bias):
        super().__init__()
        number = next(_numbers)
        _layers[number] = self
        self.width = len(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias_ = None if bias is None else bias.detach()
        self.register_buffer("number", torch.tensor(number), persistent=False)

    def multiply(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias_, "none", [], "")

    def forward(self, x):
        return torch.ops.packed.linear(x, self.number, self.width)


def worth_packing(weight):
    """16-bit weights always; of float32 ones, large ones: small ones are multiplied sooner than oneDNN is called."""
    return weight.dtype == torch.bfloat16 or weight.dtype == torch.float32 and weight.numel() >= 1 << 19


def pack(model):
    """Replace the model's linear layers on a CPU by packed ones, one after the other."""
    for module in model.modules():
        for name, layer in list(module.named_children()):
            if type(layer) in (nn.Linear, Conv1D) and worth_packing(layer.weight):
                weight = layer.weight if type(layer) is nn.Linear else layer.weight.t().contiguous()
                setattr(module, name, PackedLinear(weight, layer.bias))
    return model
