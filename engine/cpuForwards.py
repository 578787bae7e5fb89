"""`CpuForwards`: what a graph on a CPU consists of. torch traces these functions, and cpuGraphs.py calls the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from decoding.drawing import steps
from decoding.treeRounds import Places, level_by_level
from decoding.trees import Tree
from engine.graphs import Graphs
from engine.kvCache import Whole


class CpuForwards(Graphs):
    """The forwards and draws of a model whose linear layers are packed, to be compiled."""

    def prefill_logits(
        self, tokens: Tensor, positions: Tensor, last: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The forward of a chunk of a prompt that is compiled; logits after the tokens `last[K]` alone."""
        return self.logits(tokens, positions, keys, values, last)

    def logits(
        self, tokens: Tensor, positions: Tensor, keys: list[Tensor], values: list[Tensor], keep: int | Tensor = 0
    ) -> Tensor:
        """The forward that is compiled.

        keys, values: the cache of each layer, `[B, heads, capacity, d]`. keep: int64 `[K]`, the tokens whose
        logits are computed; 0: all.
        """
        return self.read_block(tokens, positions, positions, None, keys, values, keep)

    def tree_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        root: Tensor,
        ancestors: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """The forward of nodes of a tree that is compiled; see `treeRounds.Places`."""
        return self.read_block(tokens, positions, slots, (root, ancestors), keys, values)

    def read_block(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        tree: tuple[Tensor, Tensor] | None,
        keys: list[Tensor],
        values: list[Tensor],
        keep: int | Tensor = 0,
    ) -> Tensor:
        """Logits after `tokens`, whose keys and values go to `slots`. tree: see `engine.kvCache.Whole`."""
        for kept in keys + values:  # They share one capacity, so that each call is checked once, not for each layer.
            torch._check(kept.shape[2] == keys[0].shape[2])
        cache = Cache(layers=[Slots(k, v, slots, tree) for k, v in zip(keys, values)])
        mask = positions[:, None, None] == positions[:, None, :, None]  # Not used, but transformers takes 4 axes as is.
        return self.run_model(tokens, positions, mask, cache, keep)

    def draw_steps(
        self, tokens: Tensor, positions: Tensor, u: Tensor, sampling: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The draws that are compiled, as `drawing.steps`. sampling: float64 `[3]`, see `as_tensor`."""

        def forward(tokens: Tensor, at: Tensor) -> Tensor:
            return self.logits(tokens, at, keys, values)

        def distribution(logits: Tensor) -> Tensor:
            return distributions(logits, sampling)

        drawn, q = zip(*steps(forward, distribution, torch.ops.native.pick, tokens, positions, u))
        return torch.stack(drawn, 1), torch.stack(q, 1)


class Round:
    """A whole round to be compiled: draws by the model of `draft`, then a forward of `target`."""

    def __init__(self, draft: CpuForwards, target: CpuForwards) -> None:
        self.draft, self.target = draft, target

    def work(
        self,
        tokens: Tensor,
        positions: Tensor,
        u: Tensor,
        sampling: Tensor,
        own: Tensor,
        their_keys: list[Tensor],
        their_values: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts, q and p, as `Graphs.round`."""
        drafts, q = self.draft.draw_steps(tokens, positions[:, :-1], u, own, their_keys, their_values)
        drafts = drafts.clamp(max=self.draft.vocabulary - 1)  # A guess from nan is no token, as in `drawing.guess`.
        block = torch.cat([tokens[:, -1:], drafts], 1)
        logits = self.target.logits(block, positions[:, -block.shape[1] :], keys, values)
        return drafts, q, distributions(logits, sampling)


class Growth:
    """The growth of one tree to be compiled: a forward of the draft for each level."""

    def __init__(self, draft: CpuForwards, tree: Tree) -> None:
        self.draft, self.tree = draft, tree

    def work(
        self,
        tokens: Tensor,
        positions: Tensor,
        node_positions: Tensor,
        slots: Tensor,
        root: Tensor,
        ancestors: Tensor,
        u: Tensor,
        sampling: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Drafts and their laws, as `Graphs.grow`."""
        places = Places(node_positions, slots, root, ancestors)

        def forward(tokens: Tensor, nodes: Sequence[int]) -> Tensor:
            if nodes[0] == 0:
                return self.draft.logits(tokens, positions, keys, values)
            return self.draft.tree_logits(tokens, *places.only(nodes).tensors, keys, values)

        def distribution(logits: Tensor, nodes: Sequence[int], drafts: Tensor) -> Tensor:
            return distributions(logits, sampling)

        return level_by_level(forward, distribution, siblings, self.tree, tokens, u)


class Slots(StaticLayer):
    """One layer's keys and values `[B, heads, capacity, d]` inside a graph, written at `slots`. tree: see `Whole`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, tree: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.is_initialized = True
        self.keys, self.values, self.slots, self.tree = keys, values, slots, tree

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Whole, Whole]:
        """The new states with the slots they go to: the attention kernel writes them."""
        written = self.slots, self.tree
        return Whole(key_states, self.keys, *written), Whole(value_states, self.values, *written)

    def get_seq_length(self) -> int:
        """Always 0, as in `engine.kvCache`."""
        return 0


def distributions(logits: Tensor, sampling: Tensor) -> Tensor:
    """`utils.probabilities` by a kernel."""
    return torch.ops.native.probabilities(logits.contiguous(), sampling)


def siblings(q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`treeDrawing.siblings` by a kernel."""
    return torch.ops.native.siblings(q.contiguous(), u.contiguous(), list(counts))
