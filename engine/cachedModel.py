"""`CachedModel`: a Hugging Face causal language model with a `SlotCache`."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decoding.model import Model
from decoding.trees.tree import Places
from engine.kvCache import ATTENTION, SlotCache, cache_dtype


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a model of this config can read."""
    return getattr(config, "max_position_embeddings", None) or 1 << 30


class CachedModel(Model):
    """A causal language model whose KV cache is addressed by position. Its steps are computed eagerly.

    model: any transformers causal LM that takes a 4-D mask and explicit positions (tested: GPT-NeoX, Llama, GPT-2, OPT,
        Qwen2). Its attention is set to that of engine/kvCache.py.
    vocabulary: logits are cut to this many entries, the tokenizer's size: sizes of one family pad it differently.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None, name: str = "model") -> None:
        self.model = model.eval()
        self.vocabulary = vocabulary or model.config.vocab_size
        self.name = name
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        model.set_attn_implementation(ATTENTION)
        self.context = context_of(model.config)
        self.forwards = 0  # eager forwards so far
        self.parameters = sum(p.numel() for p in model.parameters())
        self.cache: SlotCache | None = None
        self.rows = 0  # of the cache
        self.cache_dtype = cache_dtype(model)
        # On a CPU, attention costs as much as it reads, so it reads only slots that some row has reached. On a GPU it
        # costs little beside the weights, and finding the highest position would be a host sync.
        self.reads_filled = self.device.type == "cpu"

    def reserve(self, rows: int, capacity: int) -> None:
        """A cache of that shape is used again as it is: what an earlier text left in it is masked like any other stale
        slot."""
        if self.cache is None or (self.rows, self.cache.capacity) != (rows, capacity):
            self.cache = SlotCache(self.model.config.num_hidden_layers, capacity, self.cache_dtype)
            self.rows, self.slots = rows, torch.arange(capacity, device=self.device)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        assert self.cache is not None, "call `reserve` first"
        slots = positions if places is None else places.slots
        reach = int(slots.max()) + 1 if self.reads_filled else self.cache.capacity
        mask = self.slots[:reach] <= positions[..., None] if places is None else places.mask(reach)
        self.cache.address(slots, reach)
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if keep is None else keep,
        ).logits
        self.forwards += 1
        return logits[..., : self.vocabulary].float()

    def move(self, source: Tensor, slots: Tensor) -> None:
        assert self.cache is not None, "call `reserve` first"
        self.cache.move(source, slots)

    @torch.inference_mode()
    def score(self, tokens: Tensor) -> Tensor:
        """The logits are on the device of `tokens`."""
        logits = self.model(input_ids=tokens.to(self.device), use_cache=False).logits[..., : self.vocabulary].float()
        return logits.to(tokens.device)
