"""`SlotCache`: a KV cache that is written where positions say, and attention over its slots.

Nothing is ever removed. To roll back a rejected guess, the next tokens are written at smaller positions: stale slots
behind them are masked until they are overwritten.

On a CPU, torch's attention kernel for bfloat16 takes up to five times as long as the one for float32 when one token
attends to many. So there the cache of an eager model is float32, and attention is computed in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "sdpa_in_cache_dtype"  # its name in transformers


class SlotLayer(StaticLayer):
    """One layer's keys and values, `[B, heads, capacity, d]`. A token goes to the slot its position names."""

    def __init__(self, capacity: int, shared: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(max_cache_len=capacity)
        self.shared, self.kept_as = shared, dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write states `[B, heads, n, d]` to the slots `[B, n]`, and return the first `reach` slots of these rows."""
        key_states, value_states = key_states.to(self.kept_as), value_states.to(self.kept_as)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        index = self.shared["slots"].to(self.keys.device)[:, None, :, None]  # A model may span several devices.
        first, reach = self.shared["first"], self.shared["reach"]
        keys, values = (x[first : first + len(key_states)] for x in (self.keys, self.values))
        keys.scatter_(2, index.expand_as(key_states), key_states)
        values.scatter_(2, index.expand_as(value_states), value_states)
        return keys[:, :, :reach], values[:, :, :reach]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """All rows are allocated, however many are written first."""
        rows = self.shared["rows"]
        super().lazy_initialization(*(x[:1].expand(rows, -1, -1, -1) for x in (key_states, value_states)))

    def move(self, source: Tensor, slots: Tensor) -> None:
        """Copy the slots `source[B, m]` to `slots[B, m]`."""
        for kept in (self.keys[: len(source)], self.values[: len(source)]):
            read, written = (
                x.to(kept.device)[:, None, :, None].expand(-1, kept.shape[1], -1, kept.shape[3])
                for x in (source, slots)
            )
            kept.scatter_(2, written, kept.gather(2, read))

    def get_seq_length(self) -> int:
        """Always 0: positions and masks come with every call and are never derived from how much was written."""
        return 0


class SlotCache(Cache):
    """`capacity` slots for each of `rows` rows in each of `layers` layers, kept as `dtype`.

    Before each forward of n tokens, `address` says where they go. Memory is allocated at the first forward.
    """

    def __init__(self, layers: int, rows: int, capacity: int, dtype: torch.dtype) -> None:
        self.rows, self.capacity = rows, capacity
        self._shared: dict[str, Any] = {"slots": None, "reach": capacity, "first": 0, "rows": rows}
        super().__init__(layers=[SlotLayer(capacity, self._shared, dtype) for _ in range(layers)])

    @property
    def allocated(self) -> bool:
        """Whether its memory is allocated."""
        return self.layers[0].is_initialized

    def move(self, source: Tensor, slots: Tensor) -> None:
        """Copy keys and values from the slots `source[B, m]` (int64) to `slots[B, m]`. All are read before any is
        written."""
        for layer in self.layers:
            layer.move(source, slots)

    def copy_row(self, source: int, row: int) -> None:
        """Copy the keys and values of row `source` to another row."""
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                kept[row] = kept[source]

    def address(self, slots: Tensor, reach: int | None = None, first: int = 0) -> None:
        """The next tokens go to `slots` (int64 `[B, n]`, on the model's device) of the B rows from `first` on.
        Attention sees the first `reach` slots (None: all), as its mask must."""
        self._shared.update(slots=slots, reach=self.capacity if reach is None else reach, first=first)


def sdpa_in_cache_dtype(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' "sdpa" in the dtype of `key` and `value`; the result has the dtype of `query[B, heads, n, d]`."""
    if key.device.type == "cpu":
        key, value = key.float(), value.float()
    output, weights = sdpa_attention_forward(module, query.to(key.dtype), key, value, attention_mask, **kwargs)
    return output.to(query.dtype), weights


AttentionInterface.register(ATTENTION, sdpa_in_cache_dtype)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of an eager model's KV cache: float32 on a CPU, the model's own elsewhere."""
    return torch.float32 if model.device.type == "cpu" else model.dtype


def cache_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Heads of keys and values in a layer, and the numbers in each."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cache_bytes(config: PretrainedConfig, slots: int, dtype: torch.dtype) -> int:
    """Bytes of a KV cache of that many slots in all its rows."""
    return 2 * config.num_hidden_layers * math.prod(cache_shape(config)) * slots * dtype.itemsize
