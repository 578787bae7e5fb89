"""`SlotCache`: keys and values in preallocated slots, written where a tensor says.

Nothing is ever removed. A rejected draft is rolled back by writing the next tokens at smaller positions: the stale
slots behind them are masked until they are overwritten.
"""

from transformers.cache_utils import Cache, StaticLayer


class SlotLayer(StaticLayer):
    """One layer's `[B, heads, capacity, d]` keys and values; a new token goes to the slot its position names."""

    def __init__(self, capacity, shared, dtype):
        super().__init__(max_cache_len=capacity)
        self.shared, self.kept_as = shared, dtype

    def update(self, key_states, value_states, *args, **kwargs):
        """Write `[B, heads, n, d]` states to the slots `[B, n]` and return the first `reach` slots."""
        key_states, value_states = key_states.to(self.kept_as), value_states.to(self.kept_as)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        index = self.shared["slots"].to(self.keys.device)[:, None, :, None]  # a model may be spread
        self.keys.scatter_(2, index.expand_as(key_states), key_states)
        self.values.scatter_(2, index.expand_as(value_states), value_states)
        reach = self.shared["reach"]
        return self.keys[:, :, :reach], self.values[:, :, :reach]

    def get_seq_length(self):
        """Always 0: positions and masks are given with every call, never derived from how much was written."""
        return 0


class SlotCache(Cache):
    """`capacity` slots for each of the batch's rows in each of `layers` layers, kept as `dtype`.

    Before each forward of n tokens, `address` says where they go; memory is taken at the first.
    """

    def __init__(self, layers, capacity, dtype):
        self.capacity = capacity
        self._shared = {"slots": None, "reach": capacity}
        super().__init__(layers=[SlotLayer(capacity, self._shared, dtype) for _ in range(layers)])

    def address(self, slots, reach=None):
        """The next n tokens go to `slots` (int64 `[B, n]`, on the model's device); attention sees the first `reach`
        slots (None: all), as its mask must."""
        self._shared.update(slots=slots, reach=self.capacity if reach is None else reach)
