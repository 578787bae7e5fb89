"""`CachedModel`: a Hugging Face causal language model with a `SlotCache`, and one `forward(tokens, positions)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from decoding.interfaces import Operators
from decoding.operators import PYTORCH
from decoding.rows import Rows, upload
from engine.graphs import Graphs
from engine.kvCache import ATTENTION, SlotCache, cache_dtype


def context_of(config: PretrainedConfig) -> int:
    """Tokens that a model of this config can read."""
    return getattr(config, "max_position_embeddings", None) or 1 << 30


class CachedModel:
    """A causal language model whose KV cache is addressed by position.

    model: any transformers causal LM that takes a 4-D mask and explicit positions (tested: GPT-NeoX, Llama, GPT-2, OPT,
        Qwen2). Its attention is set to that of engine/kvCache.py.
    vocabulary: logits are cut to this many entries, the tokenizer's size: sizes of one family pad it differently.
    name: what messages and records call it.
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
        self.graphs: Graphs | None = None
        self.operators: Operators = PYTORCH
        self.cache: SlotCache | None = None
        self._shape: tuple[int, int] | None = None
        self._cache_dtype = cache_dtype(model)
        # On a CPU, attention costs as much as it reads, so it reads only slots that some row has reached. On a GPU it
        # costs little beside the weights, and finding the highest position would be a host sync.
        self._reads_filled = self.device.type == "cpu"

    def use(self, graphs: Graphs) -> None:
        """From now on, compute the steps that have a graph by these graphs (engine/compiling.py makes them)."""
        self.graphs, self.operators, self._cache_dtype = graphs, graphs.operators, graphs.cache_dtype
        self.cache = self._shape = None

    def reserve(self, rows: int, capacity: int) -> SlotCache:
        """The KV cache for `rows` rows of at most `capacity` tokens. A cache of that shape is used again as it is: what
        an earlier text left in it is masked like any other stale slot."""
        if self.graphs and self.device.type == "cuda" and self._shape and self._shape[0] == rows:
            capacity = max(capacity, self._shape[1])  # Captured graphs live as long as their cache: keep a longer one.
        if self.cache is None or self._shape != (rows, capacity):
            self.cache = SlotCache(self.model.config.num_hidden_layers, capacity, self._cache_dtype)
            self._shape = (rows, capacity)
            self._order = torch.arange(capacity, device=self.device)
            if self.graphs:
                self.graphs.allocate(self.cache, rows)
        return self.cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor | None = None,
        mask: Tensor | None = None,
        keep: Sequence[int] | None = None,
    ) -> Tensor:
        """Read a block of tokens eagerly and return the logits after each.

        tokens, positions: int64 `[B, n]`. Keys and values go to the slots named by `positions`, and a token attends to
            the slots `<=` its own position.
        slots `[B, n]` and mask (bool `[B, n, reach]`, of the first `reach` slots): needed where a slot is not a
            position, as in a tree of guesses. There siblings share a position, not a slot, and a node attends to its
            ancestors.
        keep: the index of one token of the block in each row; only its logits are computed.
        Returns float32 logits `[B, n, vocabulary]`, or `[B, vocabulary]` with `keep`.
        """
        assert self.cache is not None, "call `reserve` first"
        if mask is None:
            reach = int(positions.max()) + 1 if self._reads_filled else len(self._order)
            mask = self._order[:reach] <= positions[..., None]
        reach = mask.shape[-1]
        self.cache.address(positions if slots is None else slots, reach)
        kept = sorted(set(keep or ()))
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=upload(kept, self.device) if kept else 0,
        ).logits
        self.forwards += 1
        if keep is not None:
            own = upload([[kept.index(each)] for each in keep], self.device)
            logits = logits.gather(1, own[..., None].expand(-1, 1, logits.shape[-1]))[:, 0]
        return logits[..., : self.vocabulary].float()

    def read_prompt(self, rows: Rows) -> Tensor:
        """Prefill in one eager forward, as `rounds.read_prompt`."""
        positions = torch.arange(rows.prompt.shape[1], device=self.device).repeat(len(rows.prompt), 1)
        return self.forward(rows.prompt.to(self.device), positions, keep=[length - 1 for length in rows.prompt_lengths])

    @torch.inference_mode()
    def score(self, tokens: Tensor) -> Tensor:
        """Logits after each of `tokens[B, n]`, read from the start without the cache: float32 `[B, n, vocabulary]`, on
        the device of `tokens`."""
        logits = self.model(input_ids=tokens.to(self.device), use_cache=False).logits[..., : self.vocabulary].float()
        return logits.to(tokens.device)
