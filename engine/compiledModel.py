"""`CompiledModel`: a model whose steps are computed by graphs, as on a GPU (cudaModel.py).

A graph replaces the hundreds of operator calls of a step by one call. It is made once for each shape and used in every
round, so the shapes must be few: narrower blocks are padded to the next width, and long draws are cut into pieces.
Which shapes there are to be is found by a rehearsal (`asked`): samplers run once, and each model notes the shapes
of the steps that it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.model import Model
from decoding.rows import upload
from decoding.trees.rules import TreeRule
from decoding.trees.tree import Places, Tree
from decoding.verification import VerificationRule
from engine.cachedModel import CachedModel, Tap
from engine.kvCache import cache_shape
from engine.steps import Block, Draw, Growth, Nodes, Prompt, Shape, read_block, read_chunk
from utils import Sampling

LONGEST = 6  # Tokens drawn by one graph at most.
Step = Callable[..., Any]  # step(model, *inputs): tensors from tensors and the model's cache


class CompiledModel(CachedModel, ABC):
    """A `CachedModel` that computes a step by a graph if there is one for its shape, else eagerly.

    An engine is a subclass. It says in `by_graph` how a step becomes a graph, and how the graph is called.
    chunk: tokens of a prompt that one graph reads. used: how many times a graph was used.
    """

    chunk: int

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: int | None = None,
        name: str = "model",
        cache_of: CachedModel | None = None,
        features: Tap | CachedModel | None = None,
    ) -> None:
        super().__init__(model, vocabulary, name, cache_of, features)
        self.asked: set[Shape] | None = None  # In a rehearsal: the shapes asked for so far.
        self.inside = False  # Whether a graph is being made: then its steps are computed as they are.
        self.used = 0
        self.forget()

    def reserve(self, rows: int, capacity: int) -> None:
        """The memory is allocated at once: a graph may be the first to write to it."""
        super().reserve(rows, capacity)
        if self.cache is not None and not self.cache.allocated:
            if self.reads_features:  # There are none yet.
                self.cache.early_initialization(rows, *cache_shape(self.model.config), self.cache_dtype, self.device)
            else:
                zero = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
                self.eagerly(CachedModel.forward, zero, zero)

    def forget(self) -> None:
        """Compute all steps eagerly."""
        self.shapes: set[Shape] = set()  # that have a graph
        self.widths: dict[int, list[int]] = {}  # {rows: the widths of `Block`, ascending}
        self.counts: dict[int, list[int]] = {}  # {rows: the counts of `Draw`, ascending}
        self.reads: dict[int, int] = {}  # {rows: tokens that all graphs of `Draw` and `Growth` read}

    def add(self, asked: set[Shape]) -> list[Shape]:
        """From now on, compute steps of these shapes by graphs. Returns the shapes to make."""
        for shape in asked:
            if isinstance(shape, (Draw, Growth)):
                # The fewest that were asked for: what a draft missed besides is read by the graph of prefill. A model
                # that decodes alone reads one token. It can as well read the one before it again. A head reads many
                # tokens in nearly every round.
                known, read = self.reads.get(shape.rows, 1), shape.read
                most = self.reads_features or 1 in (known, read)
                self.reads[shape.rows] = max(known, read) if most else min(known, read)
        made = list(dict.fromkeys(part for shape in sorted(asked, key=str) for part in self.parts(shape)))
        self.shapes |= set(made)
        for shape in made:
            if isinstance(shape, Block):
                self.widths[shape.rows] = sorted({*self.widths.get(shape.rows, ()), shape.width})
            elif isinstance(shape, Draw):
                self.counts[shape.rows] = sorted({*self.counts.get(shape.rows, ()), shape.count})
        return made

    def parts(self, shape: Shape) -> list[Shape]:
        """The shapes of the graphs that compute a step of that shape."""
        if isinstance(shape, Draw):
            counts = {min(shape.count, LONGEST), shape.count % LONGEST or LONGEST}
            return [Draw(shape.rows, self.reads[shape.rows], count) for count in sorted(counts)]
        return [replace(shape, read=self.reads[shape.rows])] if isinstance(shape, Growth) else [shape]

    def make(self, shape: Shape) -> bool:
        """Make the graph for a shape. Returns True; raises if it cannot be made."""
        self.reserve(shape.rows, 2)
        shape.call(self)
        return True

    def run(self, step: Step, *inputs: Any) -> Any:
        """`step(self, *inputs)` by a graph; in a rehearsal without one.

        inputs: tensors, `Places`, and compiled models, whose caches the step may use too; `Sampling`, `Tree` and rules.
        """
        if self.asked is not None:
            return self.eagerly(step, *inputs)
        self.used += 1
        return self.by_graph(step, *inputs)

    @abstractmethod
    def by_graph(self, step: Step, *inputs: Any) -> Any:
        """`step(self, *inputs)` by the graph for these shapes, which is made if there is none."""

    def eagerly(self, step: Step, *inputs: Any) -> Any:
        """`step(self, *inputs)` without any graph of this model."""
        before, self.inside = self.inside, True
        try:
            return step(self, *inputs)
        finally:
            self.inside = before

    def ready(
        self, shape: Shape, seen: Tensor | None = None, verify: VerificationRule | TreeRule | None = None
    ) -> bool:
        """Whether a graph computes a step. If any line is false, the step is computed eagerly.

        seen, verify: what the step depends on, if it does.
        """
        possible = (
            not self.inside  # The step is not part of a graph.
            and self.cache is not None  # A prompt was read.
            and seen is None  # No repetition penalty: a graph is not given the tokens seen so far.
            and not getattr(verify, "waits", False)  # The verification rule does not synchronise with the host.
        )
        if possible and self.asked is not None:
            self.asked.add(shape)
            return True
        return possible and self.has(shape)

    def has(self, shape: Shape) -> bool:
        """Whether there are graphs for this shape."""
        if isinstance(shape, Block):
            return shape.rows in self.widths and shape.width <= self.widths[shape.rows][-1]
        if isinstance(shape, Draw):
            return shape.rows in self.counts and self.reads_up_to(shape.rows, shape.read)
        if isinstance(shape, Growth):
            kept = replace(shape, read=self.reads.get(shape.rows, 0))
            return kept in self.shapes and self.reads_up_to(shape.rows, shape.read)
        return shape in self.shapes

    def reads_up_to(self, rows: int, read: int) -> bool:
        """Whether so many tokens can be read before one is drawn: by the graph that draws, or the first by that of
        prefill."""
        return read <= self.reads[rows] or Prompt(rows) in self.shapes

    # The steps.

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        rows, width = tokens.shape
        if places is not None and self.ready(Nodes(rows, width)):
            return self.run(read_block, tokens, positions, places)
        if places is None and keep is None and self.ready(Block(rows, width)):
            return self.run(read_block, *self.padded(tokens, positions))[:, :width]
        return super().forward(tokens, positions, places, keep)

    def padded(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The block `[B, n]` padded to the next width with its last token, at the same position."""
        rows, n = tokens.shape
        width = n if self.asked is not None else next(width for width in self.widths[rows] if width >= n)
        if n < width:
            last = torch.arange(width, device=tokens.device).clamp_(max=n - 1)
            tokens, positions = tokens[:, last], positions[:, last]
        return tokens, positions

    def rows_computed(self, rows: int) -> int:
        """The next number of rows that has graphs serves fewer rows too."""
        return min((shape.rows for shape in self.shapes if shape.rows >= rows), default=rows)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int]) -> Tensor:
        """The prompts are read in chunks. A prompt that is new in a batch is read eagerly: a graph reads all rows."""
        alike, whole = len(set(lengths)) == 1, len(lengths) == self.rows
        if not alike or not whole or not self.ready(Prompt(len(lengths))):
            return super().read_prompts(prompts, lengths)
        return self.read(prompts, torch.arange(prompts.shape[1], device=self.device).expand_as(prompts))

    def read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read `tokens, positions [B, n]` in chunks; float32 logits `[B, V]` after the last."""
        for start in range(0, tokens.shape[1], self.chunk):
            # The last chunk is padded with its last token, at the same position.
            at = torch.arange(start, start + self.chunk, device=self.device).clamp_(max=tokens.shape[1] - 1)
            last = upload([min(self.chunk, tokens.shape[1] - start) - 1], self.device)
            logits = self.run(read_chunk, tokens[:, at], positions[:, at], last)
        return logits[:, 0]

    def at_most(self, read: int, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The last `read` tokens of a block `[B, w]` and the positions from there on, after the tokens before them were
        read. A narrower block begins with its first token several times, in the same slot."""
        first = tokens.shape[1] - read
        if first > 0:
            self.read(tokens[:, :first], positions[:, :first])
            return tokens[:, first:], positions[:, first:]
        if first < 0:
            tokens = torch.cat([tokens[:, :1].expand(-1, -first), tokens], 1)
            positions = torch.cat([positions[:, :1].expand(-1, -first), positions], 1)
        return tokens, positions

    def draw(
        self,
        tokens: Tensor,
        positions: Tensor,
        u: Tensor,
        sampling: Sampling,
        seen: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The longest graphs that are not too long draw one after the other. If all are too long, the beginning of the
        shortest is used."""
        rows, width = tokens.shape
        if not self.ready(Draw(rows, width, len(u)), seen=seen):
            return super().draw(tokens, positions, u, sampling, seen)
        if self.asked is not None:
            return self.run(Model.draw, tokens, positions, u, sampling)
        read, counts = self.reads[rows], self.counts[rows]
        tokens, positions = self.at_most(read, tokens, positions)
        drawn: list[Tensor] = []
        q: list[Tensor] = []
        done = 0
        while done < len(u):
            if drawn:  # A distribution of nan gives no token, V, which cannot be read.
                tokens = torch.cat([tokens, drawn[-1].clamp(max=self.vocabulary - 1)], 1)[:, -read:]
            left = len(u) - done
            count = max((count for count in counts if count <= left), default=counts[0])
            numbers, at = u[done : done + count], positions[:, done : done + read + count - 1]
            if left < count:  # Tokens beyond `left` are dropped; later tokens overwrite their slots.
                numbers = torch.cat([numbers, u.new_zeros(count - left, rows)])
                at = torch.cat([at, at[:, -1:].expand(-1, count - left)], 1)
            piece, piece_q = self.run(Model.draw, tokens, at, numbers, sampling)
            drawn.append(piece[:, :left])
            q.append(piece_q[:, :left])
            done += count
        return (drawn[0], q[0]) if len(q) == 1 else (torch.cat(drawn, 1), torch.cat(q, 1))

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
        """A block without guesses is a step of plain decoding. In a padded block, the tokens beyond its drafts count as
        drafts with q = 0, which are no guesses."""
        (rows, width), n = block.shape, q.shape[1]
        if n == 0 and self.ready(Draw(rows, width, 1), seen=seen, verify=verify):
            drawn, p = self.draw(block, positions, u.T, sampling)
            return p, torch.zeros_like(drawn[:, 0]), drawn[:, 0]
        if not self.ready(Block(rows, width), seen=seen, verify=verify):
            return super().score_block(block, positions, q, u, sampling, verify, seen)
        block, positions = self.padded(block, positions)
        beyond = block.shape[1] - width
        if beyond:
            q, u = pad(q, (0, 0, 0, beyond)), torch.cat([pad(u[:, :n], (0, beyond)), u[:, n:]], 1)
        p, accepted, token = self.run(Model.score_block, block, positions, q, u, sampling, verify)
        return p[:, : n + 1], accepted, token

    def grow(
        self,
        tree: Tree,
        tokens: Tensor,
        positions: Tensor,
        places: Places,
        u: Tensor,
        sampling: Sampling,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, width = tokens.shape
        if not self.ready(Growth(rows, width, tree), seen=seen):
            return super().grow(tree, tokens, positions, places, u, sampling, seen)
        if self.asked is None:
            tokens, positions = self.at_most(self.reads[rows], tokens, positions)
        return self.run(Model.grow, tree, tokens, positions, places, u, sampling)

    def score_tree(
        self,
        tree: Tree,
        block: Tensor,
        places: Places,
        q: Tensor,
        u: Tensor,
        sampling: Sampling,
        verify: TreeRule,
        seen: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not self.ready(Nodes(*block.shape), seen=seen, verify=verify):
            return super().score_tree(tree, block, places, q, u, sampling, verify, seen)
        return self.run(Model.score_tree, tree, block, places, q, u, sampling, verify)
