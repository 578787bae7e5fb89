"""`Graphs`: what the two engines have in common, graphs compiled on a CPU and graphs captured on a GPU.

A graph replaces the hundreds of operator calls of a step by one call. It is made once for each shape and used in every
round, so the shapes must be few: narrower blocks are padded to the next width, and long draws are cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from decoding.interfaces import Operators, TreeRule, VerificationRule
from decoding.operators import PYTORCH
from decoding.treeRounds import Places
from decoding.trees import Tree
from engine.kvCache import SlotCache
from utils import Sampling


@dataclass(frozen=True)
class Plan:
    """The graphs worth making for one model.

    widths: tokens in the blocks it scores. draws: tokens it draws in sequence. read: tokens it reads before the first
    of them. prefill: whether it reads prompts. nodes: nodes of the trees it scores, the root among them. trees: those
    it grows.
    """

    widths: frozenset[int] = frozenset()
    draws: frozenset[int] = frozenset()
    read: int = 1
    prefill: bool = True
    nodes: frozenset[int] = frozenset()
    trees: frozenset[Tree] = frozenset()

    def __or__(self, other: Plan) -> Plan:
        read, prefill = max(self.read, other.read), self.prefill or other.prefill
        widths, draws = self.widths | other.widths, self.draws | other.draws
        return Plan(widths, draws, read, prefill, self.nodes | other.nodes, self.trees | other.trees)

    def __len__(self) -> int:
        return len(self.widths) + len(self.draws) + self.prefill + len(self.nodes) + len(self.trees)


class Graphs(ABC):
    """Graphs of the steps of one model, each for one shape.

    model: a transformers causal LM. vocabulary: the logits are cut to this many entries.
    cache_dtype: the dtype that its KV cache must have. operators: the filters, draws and verification it comes with.
    used: how many times a graph was used.
    """

    ragged = False  # Whether its prefill reads prompts of different lengths.
    verifies = True  # Whether scoring and verification are one graph; else a kernel verifies after the forward's graph.
    cache_dtype: torch.dtype
    operators: Operators = PYTORCH

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model, self.vocabulary, self.used = model, vocabulary, 0
        self.widths: dict[int, list[int]] = {}  # {rows: widths of blocks}
        self.draws: dict[int, tuple[int, list[int]]] = {}  # {rows: (tokens read, counts of tokens drawn)}
        self.prefills: set[int] = set()  # {rows}
        self.rounds: set[tuple[Graphs, int, int, int]] = set()  # {(graphs of the draft, rows, tokens read, guesses)}
        self.nodes: set[tuple[int, int]] = set()  # {(rows, nodes)}
        self.trees: set[tuple[int, int, Tree]] = set()  # {(rows, tokens read, tree)}

    def has(self, step: str, *shape: object) -> bool:
        """Whether there is a graph for a step of this shape.

        "prefill": rows, how many different lengths their prompts have. "forward", "score_and_verify": rows, width of
        the block. "draw": rows, tokens read. "round": graphs of the draft, rows, tokens read, guesses. "tree",
        "score_and_verify_tree": rows, nodes. "grow": rows, tokens read, tree. "move": rows, slots.
        """
        if step.startswith("score_and_verify") and not self.verifies:
            return False
        if step == "move":
            return bool(self.nodes or self.trees)
        sets: dict[str, Any] = {"round": self.rounds, "grow": self.trees, "tree": self.nodes}
        if step in sets or step == "score_and_verify_tree":
            return shape in sets.get(step, self.nodes)
        rows, width = shape
        if step == "prefill":
            return rows in self.prefills and (self.ragged or width == 1)
        if step == "draw":
            return rows in self.draws and width <= self.draws[rows][0]  # type: ignore[operator]
        return rows in self.widths and width <= self.widths[rows][-1]  # type: ignore[operator]

    def allocate(self, cache: SlotCache, rows: int) -> None:
        """Allocate the memory of a KV cache for `rows` rows, if a graph writes the first tokens into it. By default the
        first eager forward allocates it."""
        return

    def add_prefill(self, rows: int) -> None:
        """Make the graph that reads the prompts of a batch of `rows` rows, whatever their lengths."""
        self.prefills.add(rows)

    def add_forward(self, rows: int, width: int) -> None:
        """Make the graph for blocks `[rows, width]`. On a GPU, graphs are captured at their first use."""
        self.widths[rows] = sorted({*self.widths.get(rows, ()), width})

    def add_draw(self, rows: int, read: int, count: int) -> None:
        """Make the graph that draws `count` tokens in sequence after blocks `[rows, read]`; `read` is one number for
        all graphs of these rows."""
        self.draws[rows] = read, sorted({*self.draws.get(rows, (0, []))[1], count})

    def add_round(self, draft: Graphs, rows: int, read: int, count: int) -> None:
        """Make the graph of a whole round: `count` guesses by the model of `draft` after blocks `[rows, read]`, and
        this model's forward that scores them. It saves host time between the two forwards, which a GPU's host has to
        spare: by default no graph is made."""
        return

    def add_nodes(self, rows: int, count: int) -> None:
        """Make the graph that scores trees of `count` nodes, the root among them, whatever their shape."""
        self.nodes.add((rows, count))

    def add_tree(self, rows: int, read: int, tree: Tree) -> None:
        """Make the graph that grows this tree after blocks `[rows, read]`."""
        self.trees.add((rows, read, tree))

    def prefill(self, tokens: Tensor, lengths: Sequence[int], cache: SlotCache) -> Tensor:
        """Read prompts `tokens[B, n]` of these lengths, padded at the right, into the cache; float32 logits `[B, V]`
        after each prompt's end. The graph reads them in chunks."""
        raise LookupError("this engine makes no graphs of prefill")

    def read(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> None:
        """Read `tokens, positions [B, n]` anywhere in a text into the cache, by the graph that reads prompts."""
        raise LookupError("this engine makes no graphs of prefill")

    def forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """`CachedModel.forward` of a block: float32 logits `[B, n, V]`."""
        padded, at = self.pad_block(tokens, positions)
        return self.run_forward(padded, at, cache)[:, : tokens.shape[1]]

    def draw(
        self, tokens: Tensor, positions: Tensor, u: Tensor, sampling: Sampling, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """`drawing.draw_tokens` with the uniform numbers `u[count, B]`: tokens `[B, count]` and q `[B, count, V]`.

        Uses the longest graphs that are not too long, one after the other. If all are too long, uses the beginning of
        the shortest.
        """
        read, counts = self.draws[len(tokens)]
        first = tokens.shape[1]
        if first < read:  # The first token is read again, into the same slot.
            again = torch.arange(first - read, first, device=tokens.device).clamp_(min=0)
            tokens = tokens[:, again]
            positions = torch.cat([positions[:, :1].expand(-1, read - first), positions], 1)
        drawn: list[Tensor] = []
        q: list[Tensor] = []
        left = len(u)
        while left:
            if drawn:
                known = q[-1].shape[-1] - 1  # as in `drawing.steps`
                tokens = torch.cat([tokens, drawn[-1].clamp(max=known)], 1)[:, -read:]
            count = max((count for count in counts if count <= left), default=counts[0])
            done = len(u) - left
            numbers, at = u[done : done + count], positions[:, done : done + read + count - 1]
            if left < count:  # Tokens beyond `left` are dropped; later tokens overwrite their slots.
                numbers = torch.cat([numbers, u.new_zeros(count - left, u.shape[1])])
                at = torch.cat([at, at[:, -1:].expand(-1, count - left)], 1)
            self.used += 1
            made, p = self.run_draw(tokens.contiguous(), at.contiguous(), numbers, sampling, cache)
            drawn.append(made[:, :left])
            q.append(p[:, :left])
            left -= drawn[-1].shape[1]
        return (drawn[0], q[0]) if len(q) == 1 else (torch.cat(drawn, 1), torch.cat(q, 1))

    def score_and_verify(
        self,
        block: Tensor,
        positions: Tensor,
        q: Tensor,
        u: Tensor,
        sampling: Sampling,
        verify: VerificationRule,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`rounds.score_block`: p `[B, n + 1, V]`, accepted `[B]`, token `[B]`."""
        raise LookupError("this engine makes no graphs with verification")

    def round(
        self,
        draft: Graphs,
        tokens: Tensor,
        positions: Tensor,
        u: Tensor,
        sampling: Sampling,
        own: Sampling,
        draft_cache: SlotCache,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A round made by `add_round`: drafts `[B, n]`, q `[B, n, V]` and p `[B, n + 1, V]`.

        tokens `[B, read]`; positions `[B, read + n]`, of these and of the guesses; u `[n, B]`. sampling: the
        target's; own: the draft's.
        """
        raise LookupError("this engine makes no graphs of whole rounds")

    @abstractmethod
    def forward_tree(self, tokens: Tensor, places: Places, cache: SlotCache) -> Tensor:
        """`treeRounds.forward`: float32 logits `[B, m, V]`."""

    @abstractmethod
    def grow(
        self,
        tree: Tree,
        tokens: Tensor,
        positions: Tensor,
        places: Places,
        u: Tensor,
        sampling: Sampling,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor]:
        """`treeRounds.level_by_level` after the block `tokens, positions [B, read]`: drafts `[B, n]` and their laws
        `[B, n, V]`."""

    def score_and_verify_tree(
        self,
        tree: Tree,
        block: Tensor,
        places: Places,
        q: Tensor,
        u: Tensor,
        sampling: Sampling,
        verify: TreeRule,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`treeRounds.score_and_verify` of a block of the root and all nodes: p `[B, n + 1, V]`, accepted `[B]`, path
        `[B, depth]`, token `[B]`."""
        raise LookupError("this engine makes no graphs with verification")

    @abstractmethod
    def move(self, source: Tensor, slots: Tensor, cache: SlotCache) -> None:
        """`SlotCache.move`."""

    @abstractmethod
    def run_forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Logits of a block of a width that has a graph."""

    @abstractmethod
    def run_draw(
        self, tokens: Tensor, positions: Tensor, u: Tensor, sampling: Sampling, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """Tokens and distributions of a draw of a length that has a graph."""

    def run_model(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, keep: int | Tensor = 0
    ) -> Tensor:
        """The forward inside a graph: float32 logits `[B, n, V]`. mask: bool `[B, 1, n, slots]`. keep: int64 `[K]`, the
        tokens whose logits are computed; 0: all."""
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits[..., : self.vocabulary].float()

    def pad_block(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The block `[B, n]` padded to the next width with its last token, at the same position; both contiguous."""
        self.used += 1
        n = tokens.shape[1]
        width = next(width for width in self.widths[len(tokens)] if width >= n)
        if n < width:
            last = torch.arange(width, device=tokens.device).clamp_(max=n - 1)
            tokens, positions = tokens[:, last], positions[:, last]
        return tokens.contiguous(), positions.contiguous()
