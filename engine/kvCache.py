"""`SlotCache`: a KV cache of preallocated slots, written where a tensor of positions says.

Nothing is ever removed. To roll back a rejected guess, the next tokens are written at smaller positions: stale slots
behind them are masked until they are overwritten.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer


class SlotLayer(StaticLayer):
    """One layer's keys and values, `[B, heads, capacity, d]`. A token goes to the slot its position names."""

    def __init__(self, capacity: int, shared: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(max_cache_len=capacity)
        self.shared, self.kept_as = shared, dtype

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write states `[B, heads, n, d]` to the slots `[B, n]`, and return the first `reach` slots."""
        key_states, value_states = key_states.to(self.kept_as), value_states.to(self.kept_as)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        index = self.shared["slots"].to(self.keys.device)[:, None, :, None]  # A model may span several devices.
        self.keys.scatter_(2, index.expand_as(key_states), key_states)
        self.values.scatter_(2, index.expand_as(value_states), value_states)
        reach = self.shared["reach"]
        return self.keys[:, :, :reach], self.values[:, :, :reach]

    def get_seq_length(self) -> int:
        """Always 0: positions and masks come with every call and are never derived from how much was written."""
        return 0


class SlotCache(Cache):
    """`capacity` slots for each row of the batch in each of `layers` layers, kept as `dtype`.

    Before each forward of n tokens, `address` says where they go. Memory is allocated at the first forward.
    """

    def __init__(self, layers: int, capacity: int, dtype: torch.dtype) -> None:
        self.capacity = capacity
        self._shared: dict[str, Any] = {"slots": None, "reach": capacity}
        super().__init__(layers=[SlotLayer(capacity, self._shared, dtype) for _ in range(layers)])

    @property
    def allocated(self) -> bool:
        """Whether its memory is allocated."""
        return self.layers[0].is_initialized

    def address(self, slots: Tensor, reach: int | None = None) -> None:
        """The next n tokens go to `slots` (int64 `[B, n]`, on the model's device). Attention sees the first `reach`
        slots (None: all), as its mask must."""
        self._shared.update(slots=slots, reach=self.capacity if reach is None else reach)
