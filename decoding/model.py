"""`Model`: a language model as samplers see it, and the steps of decoding in terms of its `forward`.

Each step is a function of tensors and of the model's KV cache. It is written once, here, and computed eagerly. An
engine that computes a step by other means overrides it, and falls back on the one here.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decoding.tree import Places, Tree, columns, seen_after_nodes, siblings
from utils import Sampling, at_place, pick, probabilities, seen_after, upload

if TYPE_CHECKING:
    from decoding.drafter import Guesses
    from decoding.rows import Rows
    from decoding.treeRules import TreeRule
    from decoding.verification import Rule, VerificationRule


class Model(ABC):
    """A causal language model whose KV cache is addressed by position.

    name: its name in messages and records. vocabulary: the number of logits. context: tokens it can read.
    cache_of: the model whose KV cache it reads and writes; None: it has its own. A draft that shares the target's cache
        finds the committed tokens there, read by the target. What it writes for its guesses, the target overwrites when
        it scores them.
    features_of: the model whose features of the tokens it reads; None: it reads none. A token has a feature once that
        model has read it. So it reads its guesses of a round again when the round is over.
    remembered: tokens whose keys and values the first row of its KV cache holds. `prefill` of a single text does not
        read again those that the prompt begins with. Whoever knows what the cache holds sets it, before each prompt.
    first_row: the row of the KV cache that belongs to the first row of a block; the others follow. A cache may have
        more rows than a block.
    holds: `Rows.hold` of the call whose texts its own KV cache has.
    """

    cache_of: Model | None = None
    features_of: Model | None = None
    first_row: int = 0
    remembered: Sequence[int] = ()
    holds: Sequence[int] = ()

    name: str
    vocabulary: int
    context: int
    device: torch.device
    dtype: torch.dtype

    @property
    def keepers(self) -> list[Model]:
        """The models whose KV caches it reads."""
        return [self.cache_of or self]

    @property
    def reads_features(self) -> bool:
        return self.features_of is not None

    @abstractmethod
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """Read a block into the KV cache; float32 logits `[B, n, V]` after each token.

        tokens, positions: int64 `[B, n]`. Keys and values go to the slots named by `positions`, and a token attends to
            the slots `<=` its own position.
        places: the slots of the tokens and the nodes each attends to, if they are nodes of a tree.
        keep: int64 `[K]`, the tokens of the block whose logits are computed, `[B, K, V]`; None: all.
        """

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for the keys and values of `rows` rows of at most `capacity` tokens."""
        return

    def rows_computed(self, rows: int) -> int:
        """How many rows a forward for `rows` rows computes: at least as many."""
        return rows

    def copy_row(self, source: int, row: int) -> None:
        """Copy the keys and values of the cache's row `source` to another row."""
        raise TypeError(f"{self.name} has no rows that can be copied")

    def move(self, source: Tensor, slots: Tensor) -> None:
        """Copy keys and values from the slots `source[B, m]` (int64) to `slots[B, m]`."""
        raise TypeError(f"{self.name} has no slots that can be moved")

    def score(self, tokens: Tensor) -> Tensor:
        """Logits after each of `tokens[B, n]`, read from the start without the KV cache: float32 `[B, n, V]`."""
        raise TypeError(f"{self.name} reads no text without its KV cache")

    # What comes after a forward. Arguments and results are those of the functions of these names (utils.py, tree.py).

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return probabilities(logits, sampling, seen)

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return pick(probs, u)

    def sample(
        self, logits: Tensor, u: Tensor, sampling: Sampling, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens that `u[...]` picks from the distributions of `logits[..., V]`, and these distributions."""
        probs = self.probabilities(logits, sampling, seen)
        return self.pick(probs, u), probs

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return siblings(q, u, counts)

    def rule(self, verify: Rule) -> Rule:
        """A function that computes the verification rule `verify`."""
        return verify

    # The steps.

    def prefill(self, rows: Rows) -> Tensor:
        """Read the prompts of the fresh rows into the KV cache; float32 logits `[F, V]` after each prompt's end.

        Neighbouring rows are read together.
        """
        self.reserve(rows.batch, rows.capacity + rows.spare)
        remembered = list(self.remembered) if len(rows.prompts) == 1 else []
        known, logits = len(commonprefix([rows.prompts[0][:-1], remembered])), []
        for run in runs(rows.fresh):
            self.first_row = run[0]
            try:
                lengths = [len(rows.prompts[rows.numbers[row]]) for row in run]
                prompts = rows.padded_prompts(run).to(self.device)[:, known:]
                logits.append(self.read_prompts(prompts, [length - known for length in lengths], known))
            finally:
                self.first_row, self.remembered = 0, ()
        return torch.cat(logits)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int], first: int = 0) -> Tensor:
        """Read `prompts[R, L]`, of these lengths, from position `first` on; float32 logits `[R, V]` after each prompt's
        end.

        Shorter prompts are padded at the right. The padding is stale from the start: later tokens overwrite it.
        """
        ends = sorted(set(lengths))
        which = upload([ends.index(length) for length in lengths], self.device)
        positions = torch.arange(first, first + prompts.shape[1], device=self.device).expand_as(prompts)
        logits = self.forward(prompts, positions, keep=upload([end - 1 for end in ends], self.device))
        return at_place(logits, which)

    def first_token(self, rows: Rows, sampling: Sampling) -> None:
        """Prefill the fresh rows, draw the token after each prompt and commit it."""
        logits, seen = self.prefill(rows), rows.seen(self.vocabulary, sampling)
        u = rows.of_fresh(rows.uniform([int(row in rows.fresh) for row in range(rows.size)])[:, 0])
        seen = None if seen is None else rows.of_fresh(seen)
        rows.commit_first(self.sample(logits, u.to(logits.device), sampling, seen)[0])

    def draw(
        self,
        tokens: Tensor,
        positions: Tensor,
        u: Tensor,
        sampling: Sampling,
        seen: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read a block, draw the token after it, read that token, and so on: one token for each row of `u[n, B]`.

        tokens: int64 `[B, w]`. positions: int64 `[B, w + n - 1]`, of the block and of all drawn tokens but the last,
            which is not read.
        seen: `Rows.seen` up to the block's end, if `sampling` has a repetition penalty.
        counts: how many tokens each row needs; None: all. An engine may skip the others: q is 0 there.
        Returns the tokens `[B, n]` and the distributions `[B, n, V]` they were drawn from.
        """
        drawn, q = [], []
        for i in range(len(u)):
            width = tokens.shape[1]
            logits = self.forward(tokens, positions[:, :width])
            token, probs = self.sample(logits[:, -1], u[i], sampling, seen)
            drawn.append(token)
            q.append(probs)
            # A distribution of nan gives no token, V, which cannot be read.
            tokens, positions = token.clamp(max=logits.shape[-1] - 1)[:, None], positions[:, width:]
            if seen is not None:
                seen = seen.scatter(1, tokens, True)
        return torch.stack(drawn, 1), torch.stack(q, 1)

    def score_and_verify(
        self, rows: Rows, guesses: Guesses, u: Tensor, sampling: Sampling, verify: VerificationRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score the guesses with one forward, and verify them.

        u: float32 `[B, n + 1]`, uniform numbers for the rule `verify` (verification.py).
        Returns p `[B, n + 1, V]`, the distributions before each guess and after the last, and the rule's `accepted[B]`
        and `token[B]`.
        """
        committed, positions = rows.last(1 + rows.unread, guesses.drafts.shape[1])
        block, seen = torch.cat([committed, guesses.drafts], 1), rows.seen(self.vocabulary, sampling)
        return self.score_block(block, positions, guesses.q, u, sampling, verify, seen, guesses.limits)

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
        """`score_and_verify` of a block: int64 `block, positions [B, w]`.

        The block ends with the n drafts of q `[B, n, V]`. The token before them is the last committed one; tokens
        before that are only read. seen: `Rows.seen` up to the last committed token, if `sampling` has a repetition
        penalty. counts: how many of the drafts are guesses of each row; None: all. An engine may leave out the others.
        """
        first = block.shape[1] - q.shape[1]  # of the drafts
        logits = self.forward(block, positions)[:, first - 1 :]
        p = self.probabilities(logits, sampling, seen_after(seen, block[:, first - 1 :]))
        return p, *self.rule(verify)(p, q, block[:, first:], u)

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
        """Read a block and draw a tree after it, with one forward for each level.

        tokens, positions: int64 `[B, w]`; the last token is the tree's root. places: of all nodes.
        u: float32 `[B, tree.draws]`, uniform numbers.
        Returns the guesses `[B, n]` of nodes 1 to n, and the laws `[B, n, V]` that each was drawn from.
        """
        drafts, laws = tokens[:, :0], []
        for level in tree.levels[:-1]:
            nodes = [node for node in level if tree.children[node]]
            if nodes == [0]:
                logits = self.forward(tokens, positions)[:, -1:]
            else:
                places_of_nodes = places.only(nodes)
                block = columns(drafts, [node - 1 for node in nodes])
                logits = self.forward(block, places_of_nodes.positions, places_of_nodes)
            q = self.probabilities(logits, sampling, seen_after_nodes(seen, drafts, tree, nodes))
            counts = [len(tree.children[node]) for node in nodes]
            used = len(nodes) * max(counts)
            drawn, law = self.siblings(q, u[:, :used].unflatten(1, (len(nodes), max(counts))), counts)
            u = u[:, used:]
            # A token drawn from nan is invalid, and cannot be read: the round reports it when it commits.
            drafts = torch.cat([drafts, drawn.clamp(max=q.shape[-1] - 1)], 1)
            laws.append(law)
        return drafts, torch.cat(laws, 1)

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
        """Score a tree of guesses with one forward, and verify it.

        block: int64 `[B, n + 1]`, the tokens of all nodes, the root first. q: float32 `[B, n, V]`, the laws of the
        guesses. u: float32 `[B, n + 1]`, uniform numbers for the rule `verify` (treeRules.py).
        Returns p `[B, n + 1, V]`, the distributions after each node, and the rule's `accepted[B]`, `path[B, depth]` and
        `token[B]`.
        """
        logits = self.forward(block, places.positions, places)
        p = self.probabilities(logits, sampling, seen_after_nodes(seen, block[:, 1:], tree, range(tree.size + 1)))
        return p, *self.rule(verify)(p, q, block[:, 1:], u, tree)


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers, split where one does not follow the one before it."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in group] for _, group in groups]
