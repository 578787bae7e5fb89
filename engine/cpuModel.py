"""`CpuModel`: on a CPU, a forward is one call of the C++ kernels, for blocks of any shape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.tree import Places, Tree
from decoding.treeRules import top_down_rule, traversal_rule
from decoding.verification import Rule, VerificationRule, block_rule, token_rule
from engine.cachedModel import CachedModel, Tap
from engine.decoderLayers import Description
from engine.kernels import loader
from utils import Sampling, UserError, penalised


class CpuModel(CachedModel):
    """A model whose steps are computed by the kernels. Its layers are packed for them, for good.

    Raises OSError or CalledProcessError if there is no C++ compiler, RuntimeError if no kernels compute this model.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        loader.load()
        super().__init__(*args, **options)
        self.description = Description(self.model, self.vocabulary, self.tap)
        self.decoder = self.description.pack()
        self.bound: tuple[object, ...] = (None, None)  # the memory that the decoder reads and writes
        # 16-bit layers give 16-bit keys. A 16-bit cache holds the same numbers in half the bytes.
        self.cache_dtype = self.dtype

    def reserve(self, rows: int, capacity: int) -> None:
        super().reserve(rows, capacity)
        assert self.cache is not None
        if not self.cache.layers[-1].is_initialized:  # Memory, or time, may have ended at a layer before.
            shape = rows, self.description.groups, self.description.width
            self.cache.early_initialization(*shape, self.cache_dtype, self.device)

    def kernels(self) -> Any:
        """The `Decoder`, which reads and writes `self.cache` and the features."""
        features = self.features if self.keeps_features or self.reads_features else None
        if self.cache is not None and (self.bound[0] is not self.cache or self.bound[1] is not features):
            self.decoder.bind(*self.keys_values(), *self.description.angles(self.cache.capacity), features)
            self.bound = self.cache, features
        return self.decoder

    def keys_values(self) -> tuple[list[Tensor], list[Tensor]]:
        """The keys of all layers in the cache, and the values."""
        assert self.cache is not None
        return [layer.keys for layer in self.cache.layers], [layer.values for layer in self.cache.layers]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        places: Places | None = None,
        keep: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """keep: may also be `[B, K]`, with other tokens for each row.

        counts: int64 `[B]`; only the first `counts[b]` tokens of row b are computed. The logits of the others are 0,
            and nothing of them is written.
        """
        nodes = (None, None, None) if places is None else (places.slots, places.root, places.ancestors)
        return self.kernels().forward(tokens, positions, *nodes, keep, counts, self.first_row)

    def draw(
        self,
        tokens: Tensor,
        positions: Tensor,
        u: Tensor,
        sampling: Sampling,
        seen: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows without draws read nothing."""
        if seen is not None:  # The penalty depends on what is drawn.
            return super().draw(tokens, positions, u, sampling, seen)
        needed = None if counts is None else torch.tensor(counts)
        return self.kernels().draw(tokens, positions, u, as_tensor(sampling), needed, self.first_row)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int], first: int = 0) -> Tensor:
        """The padding of shorter prompts is not computed."""
        counts, positions = torch.tensor(lengths), torch.arange(first, first + prompts.shape[1]).expand_as(prompts)
        return self.forward(prompts, positions, keep=counts[:, None] - 1, counts=counts)[:, 0]

    def score_block(
        self,
        block: Tensor,
        positions: Tensor,
        q: Tensor,
        u: Tensor,
        sampling: Sampling,
        verify: VerificationRule,
        seen: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Positions after a row's last guess are not computed; p is 0 there. Without guesses this is a plain step."""
        if not q.shape[1] and seen is None:
            drawn, p = self.draw(block, positions, u.T, sampling)
            return p, torch.zeros_like(drawn[:, 0]), drawn[:, 0]
        if counts is None or seen is not None:
            return super().score_block(block, positions, q, u, sampling, verify, seen)
        first, guesses = block.shape[1] - q.shape[1], torch.tensor(counts)  # first: of the drafts
        logits = self.forward(block, positions, counts=first + guesses)[:, first - 1 :]
        p = self.probabilities(logits, sampling, counts=1 + guesses)
        return p, *self.rule(verify)(p, q, block[:, first:], u)

    def score(self, tokens: Tensor) -> Tensor:
        return self.score_over_slots(tokens)

    def move(self, source: Tensor, slots: Tensor) -> None:
        keys, values = self.keys_values()
        torch.ops.native.move(keys + values, source, slots, self.first_row)
        if self.store.features is not None:
            torch.ops.native.move([self.store.features[:, None]], source + 1, slots + 1, self.first_row)

    def keep_features(self, tap: Tap) -> None:
        raise UserError(f"{self.name} is compiled: load its head before that")

    def probabilities(
        self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """counts: int64 `[B]`, of logits `[B, n, V]`; distributions beyond the first `counts[b]` of row b are 0."""
        return torch.ops.native.probabilities(penalised(logits.float(), sampling, seen), as_tensor(sampling), counts)

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return torch.ops.native.pick(probs, u)

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.ops.native.siblings(q, u, list(counts))

    def rule(self, verify: Rule) -> Rule:
        return RULES.get(verify, verify)


@functools.cache
def as_tensor(sampling: Sampling) -> Tensor:
    """Temperature, top_k and top_p as the kernels take them, float64 `[3]`."""
    return torch.tensor([sampling.temperature, sampling.top_k, sampling.top_p], dtype=torch.float64)


def by_kernel(operator: str, *options: bool) -> Callable[..., tuple[Tensor, ...]]:
    """A verification rule, of a chain or a `Tree`, that this operator computes, but for the last draw."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree | None = None) -> tuple[Tensor, ...]:
        shape = () if tree is None else (tree.parents, tree.depth)
        *accepted, left = getattr(torch.ops.native, operator)(p, q, drafts, u[:, :-1], *shape, *options)
        return *accepted, torch.ops.native.pick(left, u[:, -1])

    return rule


RULES: dict[Any, Any] = {
    token_rule: by_kernel("accept"),
    block_rule: by_kernel("accept_block"),
    traversal_rule: by_kernel("accept_tree", True),
    top_down_rule: by_kernel("accept_tree", False),
}
