"""Speculative sampling with a tree of guesses: where a chain of guesses dies at its first rejection, a tree has a
second candidate (SpecInfer, Miao et al., arXiv 2305.09781; traversal verification, Weng et al., arXiv 2505.12398)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decoding.drafter import Observer
from decoding.lengthRules import Fixed
from decoding.model import Model
from decoding.record import Record
from decoding.rows import Callback, EndOfText, Generators, Rows
from decoding.trees.guesses import TreeGuesses
from decoding.trees.rules import TreeRule, top_down_rule, traversal_rule
from decoding.trees.shapes import FixedTree, TreeChoice
from decoding.trees.tree import Places, Tree
from decoding.verification import VerificationRule, block_rule, token_rule
from methods.drafters import ModelDrafter
from specSampling import advance as chain_round
from utils import Sampling, not_finite

# What a rule for trees is on a chain.
ON_CHAINS: dict[TreeRule, VerificationRule] = {traversal_rule: block_rule, top_down_rule: token_rule}


class TreeDrafter(ModelDrafter):
    """A `ModelDrafter` that grows trees of guesses too."""

    def grow(self, rows: Rows, tree: Tree, sampling: Sampling) -> TreeGuesses:
        """A tree for each row."""
        model = self.model
        places, seen = Places.of(rows, tree), rows.seen(model.vocabulary, sampling)
        u = rows.uniform([tree.draws] * rows.size).to(model.device)
        tokens, positions = (x.to(model.device) for x in rows.last(1 + self.unread(tree.depth)))
        drafts, q = model.grow(
            tree,
            tokens,
            positions,
            places.to(model.device),
            u,
            sampling.but(self.temperature, self.top_p),
            None if seen is None else seen.to(model.device),
        )
        return TreeGuesses(tree, drafts.to(rows.device), q.to(rows.device), places)


@torch.inference_mode()
def treeSampling(
    prefixes: Sequence[Sequence[int]],
    target: Model,
    drafter: TreeDrafter,
    max_len: int = 200,
    tree: Tree | TreeChoice = Tree.of("3,2,1"),
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generators = None,
    callback: Callback | None = None,
    verify: TreeRule = traversal_rule,
    batch: int | None = None,
    observer: Observer | None = None,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` with tokens distributed exactly as `target`'s own, in fewer forwards of `target`.

    tree: the shape of a round's guesses, or what chooses it (decoding/trees/shapes.py).
    verify: which guesses to accept (decoding/trees/rules.py).
    observer: as in `specSampling`.
    The other arguments, both results and the errors are those of `regrSampling`.

    A round is a plain step, a round of `specSampling` if the shape is a chain, or a round with a tree. Each one adds
    tokens of the target's distribution, given the committed ones, and afterwards both caches hold the committed tokens
    at their positions. The choice of a round depends on nothing that is drawn in it. So rounds of all kinds can follow
    one another.
    """
    choice = FixedTree(tree) if isinstance(tree, Tree) else tree
    rows = Rows(prefixes, max_len, [target, *drafter.models], end_of_text, callback, choice.most, generator, batch)
    drafter.begin(rows)
    choice.begin(rows)
    while rows.refill():
        if rows.fresh:  # Prompts that are new in the batch.
            target.first_token(rows, sampling)
            drafter.read_prompts(rows)
            continue
        shape = choice.tree()
        if shape is None:
            last = plain_step(rows, target, drafter, sampling, observer)
        elif shape.is_chain and verify in ON_CHAINS:
            last = advance_chain(rows, target, drafter, shape.size, sampling, ON_CHAINS[verify], observer)
        else:
            last = advance(rows, target, drafter, shape, sampling, verify, observer)
        # Learn which shape to guess in the next round. The last accepted node tells the path.
        choice.learn(last)
    return rows.tokens, rows.records


def plain_step(
    rows: Rows, target: Model, drafter: TreeDrafter, sampling: Sampling, observer: Observer | None
) -> dict[int, int]:
    """A round without guesses: one token, as in `regrSampling`. Returns {}: no node was accepted."""
    guesses = drafter.draft(rows, [0] * rows.size, sampling)  # It is told of the round: it falls a token behind.
    seen = rows.seen(target.vocabulary, sampling)
    token, p = target.draw(*rows.last(1), rows.uniform([1] * rows.size).T, sampling, seen)
    if observer:
        observer(rows, guesses, p, torch.zeros_like(token[:, 0]))
    rows.commit_one(token[:, 0])
    return {}


class FixedObserver(Fixed):
    """Always `length` guesses; `accepted`: {text: how many the last round accepted}."""

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        self.accepted = accepted


def advance_chain(
    rows: Rows,
    target: Model,
    drafter: TreeDrafter,
    gamma: int,
    sampling: Sampling,
    verify: VerificationRule,
    observer: Observer | None,
) -> dict[int, int]:
    """One round whose tree is a chain of `gamma` guesses: a round of `specSampling`.

    A node of a chain has the slot of its position, so nothing is moved. Returns as `advance`: the last accepted node of
    a chain has the number of the guesses accepted.
    """
    length = FixedObserver(gamma)
    length.begin(rows)
    chain_round(rows, target, drafter, length, sampling, verify, observer)
    return length.accepted


def advance(
    rows: Rows,
    target: Model,
    drafter: TreeDrafter,
    tree: Tree,
    sampling: Sampling,
    verify: TreeRule,
    observer: Observer | None,
) -> dict[int, int]:
    """One round. Returns {text: the last accepted node, or 0}, of the texts that had not ended."""
    # Draft level by level. The last token a row may add needs no guess: the target draws it.
    guesses = drafter.grow(rows, tree, sampling).limited([max(0, left - 1) for left in rows.left])
    # Score all nodes in one forward of the target. Verify: accept a path, draw the token after it.
    u = rows.uniform([tree.size + 1] * rows.size)
    block, seen = torch.cat([rows.last(1)[0], guesses.drafts], 1), rows.seen(target.vocabulary, sampling)
    p, accepted, path, token = target.score_tree(tree, block, guesses.places, guesses.q, u, sampling, verify, seen)
    if observer:
        observer(rows, guesses, p, path.amax(1))
    # Move the path's keys and values to the slots of its positions, in both models.
    move_path((target, *drafter.models), rows, tree, path)
    # Commit the path and the token after it. Here the host waits for the device, once in the round.
    drafts = guesses.drafts.gather(1, (path - 1).clamp(min=0))
    drafted, _, last = rows.commit(drafts, accepted, token, guesses.counts(), path.amax(1))
    if min(drafted.values()) < 0:
        raise not_finite(drafter.models[0])
    return last


def move_path(models: Iterable[Model], rows: Rows, tree: Tree, path: Tensor) -> None:
    """Move the keys and values of the accepted nodes `path[B, depth]` to the slots of their positions, in all models.

    Where a path is shorter, its nodes are 0: the root's keys and values go to slots that the next tokens overwrite. The
    last committed token's are among these, since each model reads it again.
    """
    root = (rows.lengths - 1)[:, None]
    source, slots = root + path, root + rows.offsets(1, tree.depth)
    for model in dict.fromkeys(model.cache_of or model for model in models):
        model.move(source.to(model.device), slots.to(model.device))
