"""Attention in the cache's precision, or, inside a compiled graph, by a kernel of our own (nativeKernels.py).

On a CPU the kernel for 16-bit numbers takes up to five times as long as the one for float32 when a single token
attends to many (it was 2 ms of 7 a token, for the bundled target at 1,000 tokens). There the cache is float32 whatever
the weights are, and attention is computed in it.
"""

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_in_cache_dtype"


class Whole:
    """Keys or values `[B, G, n, d]`, and all slots of a layer, `kept[B, G, capacity, d]`, for an attention that writes
    the ones to the slots `positions[B, n]` of the others and attends to those up to each by itself."""

    def __init__(self, states, kept, positions):
        self.states, self.kept, self.positions = states, kept, positions


def sdpa_in_cache_dtype(module, query, key, value, attention_mask, **kwargs):
    """`transformers`' "sdpa", with `query[B, heads, n, d]` in the dtype of `key` and `value`; the result in its own."""
    if isinstance(key, Whole):
        attended = torch.ops.native.attend(
            query, key.states, value.states, key.positions, key.kept, value.kept, kwargs["scaling"]
        )
        return attended, None
    if key.device.type == "cpu":
        key, value = key.float(), value.float()
    output, weights = sdpa_attention_forward(module, query.to(key.dtype), key, value, attention_mask, **kwargs)
    return output.to(query.dtype), weights


AttentionInterface.register(NAME, sdpa_in_cache_dtype)
AttentionMaskInterface.register(NAME, sdpa_mask)


def cache_dtype(model):
    """The dtype keys and values are kept in: float32 on a CPU, the model's own elsewhere."""
    return torch.float32 if model.device.type == "cpu" else model.dtype
