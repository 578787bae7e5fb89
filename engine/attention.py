"""Attention in the dtype of the KV cache; in a graph compiled on a CPU, by a kernel of our own.

On a CPU, torch's attention kernel for bfloat16 takes up to five times as long as the one for float32 when one token
attends to many. So there an eager model's cache is float32, and attention is computed in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_in_cache_dtype"


class Whole:
    """New keys or values `[B, G, n, d]` together with all slots of a layer, `kept[B, G, capacity, d]`.

    The attention kernel writes the new ones to the slots `positions[B, n]`, and each token attends to the slots up to
    its own position.
    """

    def __init__(self, states: Tensor, kept: Tensor, positions: Tensor) -> None:
        self.states, self.kept, self.positions = states, kept, positions


def sdpa_in_cache_dtype(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' "sdpa" in the dtype of `key` and `value`; the result has the dtype of `query[B, heads, n, d]`."""
    if not isinstance(key, Tensor):  # It is a `Whole`.
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


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of an eager model's KV cache: float32 on a CPU, the model's own elsewhere."""
    return torch.float32 if model.device.type == "cpu" else model.dtype
