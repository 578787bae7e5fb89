"""`CachedModel`: a Hugging Face causal language model with a KV cache that is written where positions say; and
`UncachedModel`, which decodes without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from decoding.model import Model
from decoding.tree import Places
from engine.gate import reads_trees
from engine.kvCache import Block, SlotCache, reading, set_attention
from utils import UserError

if TYPE_CHECKING:
    from decoding.rows import Rows


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a model of this config can read. Beyond its original length, the rotary embeddings of the kind
    "longrope" depend on the longest text of a batch: texts end there."""
    names = "max_position_embeddings", "max_seq_len", "max_target_positions"  # the last two are MPT's and Whisper's
    lengths = [next((length for name in names if (length := getattr(config, name, None))), -1), 1 << 30]
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") == "longrope":
            lengths.append(each["original_max_position_embeddings"])
    return min(length for length in lengths if length > 0)


def logits_of(model: PreTrainedModel, outputs: Any, vocabulary: int) -> Tensor:
    """The float32 logits `[..., vocabulary]` of a model's outputs. A model that caps its logits makes numbers of the
    -inf that its output layer gives for tokens it leaves out (sharedWeights.py:RestrictedHead); here they are -inf."""
    logits = outputs.logits[..., :vocabulary].float()
    absent = getattr(model.get_output_embeddings(), "absent", None)
    return logits if absent is None else logits.masked_fill(absent[:vocabulary], -torch.inf)


@dataclass(frozen=True)
class Tap:
    """Computes a feature `[d]` of a token: `fuse` of its concatenated hidden states after some of a model's layers.

    layers: counted as transformers' `hidden_states` (0: embeddings, the last one: after the last norm).
    """

    layers: tuple[int, ...]
    fuse: nn.Linear

    def __call__(self, hidden_states: Sequence[Tensor]) -> Tensor:
        return self.fuse(torch.cat([hidden_states[layer] for layer in self.layers], -1))


@dataclass
class Store:
    """The KV cache of a model, and of the models that share it. cache: None until a prompt is read.

    tap: computes features of the tokens that are read, or None. keeps: whether features are written.
    features: float32 `[rows, capacity + 1, d]` of a model with a tap. That of the token in slot s is at s + 1; before
        the first token it is 0. They follow the keys and values of their tokens. In any dtype they are few bytes beside
        the KV cache of all layers; in float32 nothing is rounded between the model that writes and the one that reads.
    """

    cache: SlotCache | None = None
    features: Tensor | None = None
    tap: Tap | None = None
    keeps: bool = True


class CachedModel(Model):
    """A causal language model whose KV cache is addressed by position. Its steps are computed eagerly.

    model: a transformers causal language model. Its attention is set to that of engine/kvCache.py.
    vocabulary: logits are cut to this many entries, the tokenizer's size: sizes of one family pad it differently.
    cache_of: see `Model`. That model has the same layers, and reserves the cache.
    features: the `Tap` of its hidden states; or, for a head, the model whose features it reads (head.py).
    reads_trees: whether it reads trees of guesses. Where alibi counts slots as positions, it does not.

    Raises UserError if models of its type are not decoded correctly (gate.py).
    """

    passes_gate = True
    reads_trees: bool
    stays_eager = False  # whether it cannot be compiled, as was said

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
        if (default := torch.get_default_device()).type != "cpu":  # Some tensors are created without a device.
            raise UserError(f"torch's default device is {default}: call torch.set_default_device('cpu') first")
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        known = min(config.vocab_size, getattr(model.get_output_embeddings(), "out_features", config.vocab_size))
        self.vocabulary = vocabulary or known
        if self.vocabulary > known:
            raise UserError(f"{name} knows {known} tokens, fewer than the {vocabulary} that are asked for")
        self.name = name
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        # RoBERTa and its kin number positions from the id that pads.
        padding = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
        self.first_position = 0 if padding is None else padding + 1
        self.context = context_of(config) - self.first_position
        self.forwards = 0  # eager forwards so far
        self.parameters = sum(p.numel() for p in model.parameters())
        self.cache_of = cache_of
        self.store = Store() if cache_of is None else cache_of.store
        if isinstance(features, Tap):
            self.store.tap = features
        self.features_of = features if isinstance(features, CachedModel) else None
        self.reads_trees = cache_of.reads_trees if cache_of else True
        if self.passes_gate and cache_of is None and self.features_of is None:
            self.reads_trees = bool(reads_trees(model.config, type(model), Ungated, model))
        self.cache_dtype = set_attention(model)  # Now, because the gate compares with the attention that the model had.
        # On a CPU, attention costs as much as it reads, so it reads only slots that some row has reached. On a GPU it
        # costs little beside the weights, and finding the highest position would be a host sync.
        self.reads_filled = self.device.type == "cpu"

    @property
    def cache(self) -> SlotCache | None:
        return self.store.cache

    @property
    def tap(self) -> Tap | None:
        """The `Tap` of its hidden states, or None."""
        return self.store.tap

    @property
    def keeps_features(self) -> bool:
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
        """A cache of the same shape is reused: slots of an earlier text are stale like any others, and masked. On CUDA
        the capacity is a multiple of 64: attention would else copy the mask of every layer to align its rows."""
        if self.device.type == "cuda":
            capacity = -(-capacity // 64) * 64
        if self.cache is None or (self.rows, self.cache.capacity) != (rows, capacity):
            self.store.cache = SlotCache(
                self.model.config.get_text_config(decoder=True).num_hidden_layers, rows, capacity, self.cache_dtype
            )
            self.store.features, self.remembered = None, ()
        if self.tap is not None and self.store.features is None:
            d = self.tap.fuse.out_features
            self.store.features = torch.zeros(rows, capacity + 1, d, dtype=torch.float32, device=self.device)

    def prefill(self, rows: Rows) -> Tensor:
        """Features are written only if a model of these rows reads them. What was read without, is read again."""
        keeps = any(model.reads_features for model in rows.models)
        if keeps and not self.store.keeps:
            self.remembered = ()
        self.store.keeps = keeps
        return super().prefill(rows)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        assert self.cache is not None, "call `reserve` first"
        if places is not None and not self.reads_trees:
            raise UserError(f"{self.name} cannot verify trees of guesses; use a method without a tree")
        slots = positions if places is None else places.slots
        reach = int(slots.max()) + 1 if self.reads_filled else self.cache.capacity
        seen = torch.arange(reach, device=self.device) <= positions[..., None] if places is None else places.mask(reach)
        self.cache.address(slots, reach, self.first_row)
        before = {} if self.features_of is None else {"features": self.features_before(slots, places)}
        with reading(Block(positions, seen, places)):
            outputs = self.network(tokens)(
                input_ids=tokens,
                **before,
                position_ids=positions + self.first_position if self.first_position else positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=0 if keep is None else keep,
                output_hidden_states=self.keeps_features or self.reads_features,
            )
        if self.keeps_features and self.tap is not None:
            self.write_features(self.tap(outputs.hidden_states), slots)
        elif self.reads_features and keep is None:
            # Its own last hidden state stands for the feature of a token that the other model has not read: the last
            # one of a block, or a node. If only some logits are requested, the block is a text that was read before.
            last = slice(-1 if places is None else 0, None)
            self.write_features(outputs.hidden_states[-1][:, last], slots[:, last])
        self.forwards += 1
        logits = logits_of(self.model, outputs, self.vocabulary)
        # Some classes do not know `logits_to_keep`, and give the logits of all tokens.
        return logits if keep is None or logits.shape[1] == len(keep) else logits[:, keep]

    def network(self, tokens: Tensor) -> Callable[..., Any]:
        """What computes the forward of a block."""
        return self.model

    def keep_features(self, tap: Tap) -> None:
        """From now on, its forwards write features beside the KV cache."""
        self.store.tap = tap

    @property
    def features(self) -> Tensor | None:
        """The features that it reads or writes, `Store.features`."""
        return (self.features_of or self).store.features

    def features_of_rows(self, count: int) -> Tensor:
        """The features of the first rows of a block, `[count, capacity + 1, d]`."""
        if self.features is None:
            raise UserError(
                f"{self.name} reads the features of another model, which has read nothing; if one of them was "
                "compiled, compile the other too: `compiled(head, target)`"
            )
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
            return self.score_over_slots(tokens)
        outputs = self.model(input_ids=tokens.to(self.device), use_cache=False)
        return logits_of(self.model, outputs, self.vocabulary).to(tokens.device)

    def score_over_slots(self, tokens: Tensor) -> Tensor:
        """`score` with a temporary KV cache. The model whose features it reads reads the text first, likewise."""
        models = [model for model in (self.features_of, self) if model is not None]
        before = [model.store for model in models]
        text, positions = tokens.to(self.device), torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        try:
            for model in models:
                model.store = Store(tap=model.tap if model is self.features_of else None)
                model.reserve(*text.shape)
                logits = model.forward(text, positions)
            return logits.to(tokens.device)
        finally:
            for model, store in zip(models, before):
                model.store = store


class Ungated(CachedModel):
    """A model that is not checked, because the gate itself is running on it."""

    passes_gate = False


def check_kind(config: PretrainedConfig, kind: type[PreTrainedModel]) -> bool | None:
    """Whether models of class `kind` with this configuration read trees of guesses; None if that is not known before
    they are loaded. Raises UserError if it is known that they are not decoded correctly."""
    return reads_trees(config, kind, Ungated)


class UncachedModel(Model):
    """Wraps a model; each forward reads the whole text again, without a KV cache, as in the course report's code. Its
    steps are computed eagerly.

    It stores the tokens of each row instead of their keys and values. Rows may be ragged: a row is read past its
    end up to the longest one, and causal attention hides that from its own logits. It does not read trees.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.name = model, f"{model.name} without a KV cache"
        self.vocabulary, self.context = model.vocabulary, model.context
        self.device, self.dtype = model.device, model.dtype
        self.text = torch.zeros(0, 0, dtype=torch.int64, device=self.device)  # `[B, capacity]`

    def reserve(self, rows: int, capacity: int) -> None:
        if self.text.shape != (rows, capacity):
            self.text.resize_(rows, capacity).zero_()  # In place: shallow copies of this model share the tensor.

    def copy_row(self, source: int, row: int) -> None:
        self.text[row] = self.text[source]

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        if places is not None:
            raise TypeError(f"{self.name} reads no tree of guesses")
        text = self.text[self.first_row : self.first_row + len(tokens)]
        text.scatter_(1, positions, tokens)
        logits = self.score(text[:, : int(positions.max()) + 1])
        at = positions if keep is None else positions[:, keep]
        return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))

    def score(self, tokens: Tensor) -> Tensor:
        return self.model.score(tokens)
