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

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from utils import UserError

if TYPE_CHECKING:
    from decoding.tree import Places

# Names of attention over slots in transformers: this module's own, as a copy of it may be loaded too.
SDPA, EAGER = f"sdpa over slots of {__name__}", f"eager over slots of {__name__}"
# torch prefers cuDNN's attention on H100 and later. It makes a plan for each new shape, within a text that is timed:
# only graphs use it (cudaModel.py).
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass
class Address:
    """Where the next tokens go: to `slots` (int64 `[B, n]`, on the model's device) of the B rows from `first` on.
    Attention sees the first `reach` slots, as its mask must."""

    slots: Tensor
    reach: int
    first: int = 0


class SlotLayer(StaticLayer):
    """The slots of one layer, keys and values `[rows, heads, capacity, d]`. They are written where `address` says.

    A compiled layer is given this instead of the whole cache, so that its code is that of all layers.
    """

    def __init__(self, rows: int, capacity: int, dtype: torch.dtype, address: Address) -> None:
        super().__init__(capacity)
        self.rows, self.dtype, self.address = rows, dtype, address

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """All rows are allocated, however many are written first. No address is marked as static, as transformers does:
        code would be compiled anew for each cache and each layer."""
        self.keys, self.values = (
            x.new_zeros(self.rows, x.shape[1], self.max_cache_len, x.shape[3], dtype=self.dtype)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write states `[B, heads, n, d]` to the slots `[B, n]`, and return the first `reach` slots of these rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.address.slots.to(self.keys.device)  # A model may span several devices.
        written = []
        for states, x in (self.keys, key_states.to(self.dtype)), (self.values, value_states.to(self.dtype)):
            states = states[self.address.first : self.address.first + len(x)]
            if torch.compiler.is_compiling():  # Inductor writes this in place, and copies the whole cache to scatter.
                states[torch.arange(len(x), device=x.device)[:, None], :, slots] = x.transpose(1, 2)
            else:
                states.scatter_(2, slots[:, None, :, None].expand_as(x), x)
            written.append(states[:, :, : self.address.reach])
        return written[0], written[1]

    def get_seq_length(self, *args: object) -> int:
        """The slots before a block of which attention sees `reach`: from this, alibi knows how many keys there are.
        Positions and masks come with every call, and are never derived from it."""
        return max(self.address.reach - self.address.slots.shape[-1], 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The slots that attention sees, and the first of them."""
        return self.address.reach, 0


class SlotCache(Cache):
    """`capacity` slots for each of `rows` rows, in `dtype`, in each of `layers` layers.

    Before each forward of n tokens, `address` says where they go. Memory is allocated at the first forward.
    """

    def __init__(self, layers: int, rows: int, capacity: int, dtype: torch.dtype) -> None:
        self.rows, self.capacity, self.dtype = rows, capacity, dtype
        self.at = Address(torch.empty(rows, 0), capacity)
        super().__init__(layers=[SlotLayer(rows, capacity, dtype, self.at) for _ in range(layers)])

    def address(self, slots: Tensor, reach: int, first: int) -> None:
        """See `Address`."""
        self.at.slots, self.at.reach, self.at.first = slots, reach, first

    def states(self) -> Iterator[Tensor]:
        """The keys and values of all layers that have some: some layers read those of earlier ones."""
        for layer in self.layers:
            if layer.is_initialized:
                yield from (layer.keys, layer.values)

    def move(self, source: Tensor, slots: Tensor) -> None:
        """Copy keys and values from the slots `source[B, m]` (int64) to `slots[B, m]`. All are read before any is
        written."""
        for states in self.states():
            states = states[: len(source)]
            read, written = (
                x.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                for x in (source, slots)
            )
            states.scatter_(2, written, states.gather(2, read))

    def copy_row(self, source: int, row: int) -> None:
        """Copy the keys and values of row `source` to another row."""
        for states in self.states():
            states[row] = states[source]


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


def mask_over_slots(library: Callable[..., Any], mask_function: Callable[..., Tensor], **options: Any) -> Tensor | None:
    """A mask function of transformers, `library`, that knows blocks over slots: bool for "sdpa" on a CPU, else numbers
    that are added to scores. CUDA's attention would make such numbers of a bool mask in every layer anew. Where no
    block is read, it is transformers' own."""
    block = getattr(_LOCAL, "block", None)
    if block is None:
        return library(mask_function=mask_function, **options)
    mask = block.mask(mask_function)
    if library is sdpa_mask and mask.device.type != "cuda":
        return mask
    dtype = options["dtype"]
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)


def attend(
    own: bool, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' "sdpa", in the dtype of the cache; the result has the dtype of `query[B, heads, n, d]`.

    own: the attention that the code of the model defines beside its class instead, including features that torch's
        lacks, such as capped scores and sinks.
    """
    attention = sys.modules[type(module).__module__].eager_attention_forward if own else sdpa_attention_forward
    if key.device.type == "cpu":
        key, value = key.float(), value.float()
    output, weights = attention(module, query.to(key.dtype), key, value, *mask, **options)
    return output.to(query.dtype), weights


AttentionInterface.register(SDPA, partial(attend, False))
AttentionInterface.register(EAGER, partial(attend, True))
AttentionMaskInterface.register(SDPA, partial(mask_over_slots, sdpa_mask))
AttentionMaskInterface.register(EAGER, partial(mask_over_slots, eager_mask))


def set_attention(model: PreTrainedModel) -> torch.dtype:
    """Make a model attend over slots: with torch's attention if its class supports it, else with its own. Raises
    UserError if other code has registered the attention that it has.

    Returns the dtype of an eager model's KV cache: float32 on a CPU, the model's own elsewhere, and where its class
    computes attention by itself.
    """
    can_set = model._can_set_attn_implementation()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            name = module.config._attn_implementation or "eager"
            function = AttentionInterface().get(name, sdpa_attention_forward)
            is_known = " over slots of " in name or isinstance(function, partial)  # partial: flash attention of the hub
            if not (is_known or function.__module__.startswith("transformers.")):
                raise UserError(f"its attention {name!r} is not one of transformers; choose eager or sdpa")
            # torch's attention caps no scores. Older versions of transformers use it for Gemma 2 all the same.
            is_capped = getattr(module.config, "attn_logit_softcapping", None)
            module.config._attn_implementation = SDPA if model._supports_sdpa and can_set and not is_capped else EAGER
    return torch.float32 if model.device.type == "cpu" and can_set else model.dtype


def cache_bytes(config: PretrainedConfig, slots: int, dtype: torch.dtype) -> int:
    """Bytes of a KV cache with `slots` slots, of all rows together. All layers are counted as the largest."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    heads = max(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers)
    widths = [getattr(layer, "head_dim", None) or config.hidden_size // config.num_attention_heads for layer in layers]
    latent = (getattr(config, "qk_nope_head_dim", None) or 0) + (getattr(config, "qk_rope_head_dim", None) or 0)
    return 2 * config.num_hidden_layers * heads * max(*widths, latent) * slots * dtype.itemsize
