"""`SlotCache`: a KV cache that is written where positions say, and attention over its slots.

Nothing is ever removed. To roll back a rejected guess, the next tokens are written at smaller positions: stale slots
behind them are masked until they are overwritten.

Which slots a token attends to is decided here, for every kind of layer: `Block.mask` asks the mask function that
transformers has for the kind (the whole text, a sliding window, chunks), with the positions of the token and of what is
in each slot. The model calls it through transformers' interface of masks, in the middle of its forward.

On a CPU, torch's attention kernel for bfloat16 takes up to five times as long as the one for float32 when one token
attends to many. So there the cache of an eager model is float32, and attention is computed in float32.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from decoding.tree import Places

# Names of attention over slots in transformers: this module's own, as a copy of it may be loaded too.
SDPA, EAGER = f"sdpa over slots of {__name__}", f"eager over slots of {__name__}"
# torch prefers cuDNN's attention on H100 and later. It makes a plan for each new shape, within a text that is timed.
torch.backends.cuda.enable_cudnn_sdp(False)


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
        for states in (self.keys[: len(source)], self.values[: len(source)]):
            read, written = (
                x.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                for x in (source, slots)
            )
            states.scatter_(2, written, states.gather(2, read))

    def get_seq_length(self) -> int:
        """The slots before a block of which attention sees `reach`: from this, alibi knows how many keys there are.
        Positions and masks come with every call, and are never derived from it."""
        slots = self.shared["slots"]
        return 0 if slots is None else max(self.shared["reach"] - slots.shape[-1], 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The slots that attention sees, and the first of them."""
        return self.shared["reach"], 0


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
        return self.layers[0].is_initialized

    @property
    def used_layers(self) -> list[SlotLayer]:
        """The layers that have keys and values: some read those of earlier layers."""
        return [layer for layer in self.layers if layer.is_initialized]

    def move(self, source: Tensor, slots: Tensor) -> None:
        """Copy keys and values from the slots `source[B, m]` (int64) to `slots[B, m]`. All are read before any is
        written."""
        for layer in self.used_layers:
            layer.move(source, slots)

    def copy_row(self, source: int, row: int) -> None:
        """Copy the keys and values of row `source` to another row."""
        for layer in self.used_layers:
            for states in (layer.keys, layer.values):
                states[row] = states[source]

    def address(self, slots: Tensor, reach: int | None = None, first: int = 0) -> None:
        """The next tokens go to `slots` (int64 `[B, n]`, on the model's device) of the B rows from `first` on.
        Attention sees the first `reach` slots (None: all), as its mask must."""
        self._shared.update(slots=slots, reach=self.capacity if reach is None else reach, first=first)


@dataclass
class Block:
    """A block that is read. positions: int64 `[B, n]`. seen: bool `[B, n, reach]`, the slots that hold the text before
    each token, and its own. places: of the nodes of a tree; else slots are positions."""

    positions: Tensor
    seen: Tensor
    places: Places | None = None

    def mask(self, kind: Callable[..., Tensor]) -> Tensor:
        """Which slots the tokens attend to in a layer, bool `[B, 1, n, reach]`. kind: its mask function in
        transformers, of the numbers of a row and a head and the positions of a query and a key."""
        if kind is causal_mask_function:
            return self.seen[:, None]
        (rows, _, reach), device = self.seen.shape, self.seen.device
        row, head = torch.arange(rows, device=device).view(-1, 1, 1, 1), torch.zeros(1, 1, 1, 1, device=device).long()
        keys = torch.arange(reach, device=device) if self.places is None else self.places.key_positions(reach)[:, None]
        return self.seen[:, None] & kind(row, head, self.positions[:, None, :, None], keys)


_LOCAL = threading.local()  # block: the one that this thread's forward reads


@contextmanager
def reading(block: Block) -> Iterator[None]:
    """Use the masks of `Block.mask` while a model reads this block."""
    _LOCAL.block = block
    try:
        yield
    finally:
        _LOCAL.block = None


def slots_mask(mask_function: Callable[..., Tensor], **options: Any) -> Tensor | None:
    """transformers' mask for "sdpa": of a block over slots, else its own."""
    block = getattr(_LOCAL, "block", None)
    return block.mask(mask_function) if block else sdpa_mask(mask_function=mask_function, **options)


def added_slots_mask(mask_function: Callable[..., Tensor], dtype: torch.dtype, **options: Any) -> Tensor | None:
    """The same for "eager", where it is added to scores."""
    block = getattr(_LOCAL, "block", None)
    if block is None:
        return eager_mask(mask_function=mask_function, dtype=dtype, **options)
    mask = block.mask(mask_function)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def in_cache_dtype(
    attention: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers in the dtype of `key` and `value`; the result has the dtype of
    `query[B, heads, n, d]`."""
    if key.device.type == "cpu":
        key, value = key.float(), value.float()
    output, weights = attention(module, query.to(key.dtype), key, value, *mask, **options)
    return output.to(query.dtype), weights


def sdpa_over_slots(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """transformers' "sdpa" in the dtype of the cache."""
    return in_cache_dtype(sdpa_attention_forward, module, *states, **options)


def eager_over_slots(module: nn.Module, *states: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """The attention that the code of a model defines beside its class, including features that torch's lacks, such as
    capped scores and sinks."""
    attention = sys.modules[type(module).__module__].eager_attention_forward
    return in_cache_dtype(attention, module, *states, **options)


AttentionInterface.register(SDPA, sdpa_over_slots)
AttentionInterface.register(EAGER, eager_over_slots)
AttentionMaskInterface.register(SDPA, slots_mask)
AttentionMaskInterface.register(EAGER, added_slots_mask)


def set_attention(model: PreTrainedModel) -> str:
    """Make a model attend over slots: with torch's attention if its class supports it, else with its own. Returns the
    name of the implementation."""
    way = SDPA if model._supports_sdpa and model._can_set_attn_implementation() else EAGER
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = way
    return way


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of an eager model's KV cache: float32 on a CPU, the model's own elsewhere, and where its class computes
    attention by itself."""
    return torch.float32 if model.device.type == "cpu" and model._can_set_attn_implementation() else model.dtype


def cache_shape(config: PretrainedConfig) -> tuple[int, int]:
    """Heads of keys and values in a layer, and the numbers in each; the most of any layer."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    heads = max(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers)
    latent = (getattr(config, "qk_nope_head_dim", None) or 0) + (getattr(config, "qk_rope_head_dim", None) or 0)
    width = max(
        getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads for layer in layers
    )
    return heads, max(width, latent)


def cache_bytes(config: PretrainedConfig, slots: int, dtype: torch.dtype) -> int:
    """Bytes of a KV cache with `slots` slots, of all rows together."""
    return 2 * config.num_hidden_layers * math.prod(cache_shape(config)) * slots * dtype.itemsize
