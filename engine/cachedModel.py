"""`CachedModel`: a Hugging Face causal language model. `SlotCache`: its KV cache, written where positions say.

Nothing is ever removed. To roll back a rejected guess, the next tokens are written at smaller positions: stale slots
behind them are masked until they are overwritten.

Attention over the slots is here too. On a CPU, torch's attention kernel for bfloat16 takes up to five times as long as
the one for float32 when one token attends to many. So there the cache is float32, and attention is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from decoding.model import Model
from decoding.rows import Rows
from decoding.trees.tree import Places

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


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a model of this config can read."""
    return getattr(config, "max_position_embeddings", None) or 1 << 30


@dataclass(frozen=True)
class Tap:
    """What makes a feature `[d]` of a token: `fuse` of its hidden states, side by side, after some of a model's layers.

    layers: counted as transformers' `hidden_states` (0: embeddings, the last one: after the last norm).
    """

    layers: tuple[int, ...]
    fuse: nn.Linear

    def __call__(self, hidden_states: Sequence[Tensor]) -> Tensor:
        return self.fuse(torch.cat([hidden_states[layer] for layer in self.layers], -1))


@dataclass
class Store:
    """Where a model finds its KV cache, and so do the models that share it. cache: None until a prompt is read. slots:
    their numbers, int64 `[capacity]`.

    tap: what makes features of the tokens that are read, if there are any. keeps: whether they are written.
    features: float32 `[rows, capacity + 1, d]` of a model with a tap. That of the token in slot s is at s + 1; before
        the first token it is 0. They follow the keys and values of their tokens. In any dtype they are few bytes beside
        the KV cache of all layers; in float32 nothing is rounded between the model that writes and the one that reads.
    """

    cache: SlotCache | None = None
    slots: Tensor = field(default_factory=lambda: torch.empty(0))
    features: Tensor | None = None
    tap: Tap | None = None
    keeps: bool = True


class CachedModel(Model):
    """A causal language model whose KV cache is addressed by position. Its steps are computed eagerly.

    model: any transformers causal LM that takes a 4-D mask and explicit positions (tested: GPT-NeoX, Llama, GPT-2, OPT,
        Qwen2). Its attention is set to that of engine/cachedModel.py.
    vocabulary: logits are cut to this many entries, the tokenizer's size: sizes of one family pad it differently.
    cache_of: see `Model`. That model has the same layers, and reserves the cache.
    features: what makes features of its hidden states; or, for a head, the model whose features it reads (head.py).
    """

    cache_of: CachedModel | None
    features_of: CachedModel | None
    store: Store

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: int | None = None,
        name: str = "model",
        cache_of: CachedModel | None = None,
        features: Tap | CachedModel | None = None,
    ) -> None:
        self.model = model.eval()
        self.vocabulary = vocabulary or model.config.vocab_size
        self.name = name
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        model.set_attn_implementation(ATTENTION)
        self.context = context_of(model.config)
        self.forwards = 0  # eager forwards so far
        self.parameters = sum(p.numel() for p in model.parameters())
        self.cache_of = cache_of
        self.store = Store() if cache_of is None else cache_of.store
        if isinstance(features, Tap):
            self.store.tap = features
        self.features_of = features if isinstance(features, CachedModel) else None
        self.cache_dtype = cache_dtype(model)
        # On a CPU, attention costs as much as it reads, so it reads only slots that some row has reached. On a GPU it
        # costs little beside the weights, and finding the highest position would be a host sync.
        self.reads_filled = self.device.type == "cpu"

    @property
    def cache(self) -> SlotCache | None:
        """Its KV cache."""
        return self.store.cache

    @property
    def tap(self) -> Tap | None:
        """What makes features of its hidden states."""
        return self.store.tap

    @property
    def keeps_features(self) -> bool:
        """Whether its forwards write features."""
        return self.store.tap is not None and self.store.keeps

    @property
    def is_spread(self) -> bool:
        """Whether its layers are on several devices."""
        return len(set((getattr(self.model, "hf_device_map", None) or {}).values())) > 1

    @property
    def rows(self) -> int:
        """Rows of the cache."""
        return self.cache.rows if self.cache else 0

    def reserve(self, rows: int, capacity: int) -> None:
        """A cache of that shape is used again as it is: what an earlier text left in it is masked like any other stale
        slot."""
        if self.cache is None or (self.rows, self.cache.capacity) != (rows, capacity):
            self.store.cache = SlotCache(self.model.config.num_hidden_layers, rows, capacity, self.cache_dtype)
            self.store.slots = torch.arange(capacity, device=self.device)
            self.store.features = None
        if self.tap is not None and self.store.features is None:
            d = self.tap.fuse.out_features
            self.store.features = torch.zeros(rows, capacity + 1, d, device=self.device)

    def prefill(self, rows: Rows) -> Tensor:
        """Features are written only if a model of these rows reads them."""
        self.store.keeps = any(model.reads_features for model in rows.models)
        return super().prefill(rows)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        assert self.cache is not None, "call `reserve` first"
        slots = positions if places is None else places.slots
        reach = int(slots.max()) + 1 if self.reads_filled else self.cache.capacity
        mask = self.store.slots[:reach] <= positions[..., None] if places is None else places.mask(reach)
        self.cache.address(slots, reach, self.first_row)
        before = {} if self.features_of is None else {"features": self.features_before(slots, places)}
        outputs = self.model(
            input_ids=tokens,
            **before,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if keep is None else keep,
            output_hidden_states=self.keeps_features or self.reads_features,
        )
        if self.keeps_features and self.tap is not None:
            self.write_features(self.tap(outputs.hidden_states), slots)
        elif self.reads_features and keep is None:
            # Its own last hidden state stands for the feature of a token that the other model has not read: the last
            # one of a block, or a node. If only some logits are asked for, the block is a text that was read before.
            last = slice(-1 if places is None else 0, None)
            self.write_features(outputs.hidden_states[-1][:, last], slots[:, last])
        self.forwards += 1
        return outputs.logits[..., : self.vocabulary].float()

    def keep_features(self, tap: Tap) -> None:
        """From now on, its forwards write features beside the KV cache."""
        self.store.tap = tap

    @property
    def features(self) -> Tensor | None:
        """The features that it reads or writes, `Store.features`."""
        return (self.features_of or self).store.features

    def features_of_rows(self, count: int) -> Tensor:
        """The features of the first rows of a block, `[count, capacity + 1, d]`."""
        assert self.features is not None, "the model whose features these are must read a prompt first"
        return self.features[self.first_row : self.first_row + count]

    def features_before(self, slots: Tensor, places: Places | None) -> Tensor:
        """The features `[B, n, d]` of the tokens before those in `slots[B, n]`: of the parents of a tree's nodes."""
        at = slots if places is None else places.parents + 1
        features = self.features_of_rows(len(slots))
        return features.gather(1, at[..., None].expand(-1, -1, features.shape[-1])).to(self.dtype)

    def write_features(self, features: Tensor, slots: Tensor) -> None:
        """Write `features[B, n, d]` of the tokens in `slots[B, n]`."""
        self.features_of_rows(len(slots)).scatter_(1, (slots + 1)[..., None].expand_as(features), features.float())

    def move(self, source: Tensor, slots: Tensor) -> None:
        assert self.cache is not None, "call `reserve` first"
        self.cache.move(source, slots)
        if self.store.features is not None:
            features = self.store.features[: len(source)]
            read, written = ((x + 1)[..., None].expand(-1, -1, features.shape[-1]) for x in (source, slots))
            features.scatter_(1, written, features.gather(1, read))

    def copy_row(self, source: int, row: int) -> None:
        assert self.cache is not None, "call `reserve` first"
        self.cache.copy_row(source, row)
        if self.store.features is not None:
            self.store.features[row] = self.store.features[source]

    @torch.inference_mode()
    def score(self, tokens: Tensor) -> Tensor:
        """The logits are on the device of `tokens`."""
        if self.features_of is not None:
            return self.score_after(self.features_of, tokens)
        logits = self.model(input_ids=tokens.to(self.device), use_cache=False).logits[..., : self.vocabulary].float()
        return logits.to(tokens.device)

    def score_after(self, other: CachedModel, tokens: Tensor) -> Tensor:
        """`score` for a model that reads the features of `other`, which reads the text first. Both use KV caches of
        their own."""
        models = other, self
        before = [model.store for model in models]
        text, positions = tokens.to(self.device), torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        try:
            for model in models:
                model.store = Store(tap=model.tap)
                model.reserve(*text.shape)
                logits = model.forward(text, positions)
            return logits.to(tokens.device)
        finally:
            for model, store in zip(models, before):
                model.store = store
