"""Speculative sampling with a tree of guesses: where a chain of guesses dies at its first rejection, a tree has a
second candidate (SpecInfer, Miao et al., arXiv 2305.09781; traversal verification, Weng et al., arXiv 2505.12398)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator

from decoding.draftLength import Fixed
from decoding.drawing import draw_tokens
from decoding.interfaces import Callback, EndOfText, TreeModel, TreeRule, VerificationRule
from decoding.record import Record
from decoding.rounds import first_token, uniform
from decoding.rows import Rows
from decoding.treeChoice import Always, TreeChoice
from decoding.treeRounds import TreeGuesses, grow, keep, score_and_verify
from decoding.trees import Tree
from decoding.treeVerification import top_down_rule, traversal_rule
from decoding.verification import block_rule, token_rule
from methods.drafters import ModelDrafter
from specSampling import advance as chain_round
from utils import Sampling, not_finite

# What a rule for trees is on a chain.
ON_CHAINS: dict[TreeRule, VerificationRule] = {traversal_rule: block_rule, top_down_rule: token_rule}


class TreeDrafter(ModelDrafter):
    """A `ModelDrafter` that grows trees of guesses too."""

    model: TreeModel

    def grow(self, rows: Rows, tree: Tree, sampling: Sampling, generator: Generator | None = None) -> TreeGuesses:
        """A tree for each row. As in `draft`, the last two committed tokens are read again."""
        read, self.behind = 1 + self.behind, 1
        own = sampling.but(self.temperature, self.top_p)
        return grow(self.model, rows, read, tree, own, generator)


@torch.inference_mode()
def treeSampling(
    prefixes: Sequence[Sequence[int]],
    target: TreeModel,
    drafter: TreeDrafter,
    max_len: int = 200,
    tree: Tree | TreeChoice = Tree.of("3,2,1"),
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generator | None = None,
    callback: Callback | None = None,
    verify: TreeRule = traversal_rule,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` with tokens distributed exactly as `target`'s own, in fewer forwards of `target`.

    tree: the shape of a round's guesses, or what chooses it (decoding/treeChoice.py).
    verify: which guesses to accept (decoding/treeVerification.py).
    The other arguments, both results and the errors are those of `regrSampling`.

    A round is a plain step, a round of `specSampling` if the shape is a chain, or a round with a tree. Each one adds
    tokens of the target's distribution, given the committed ones, and afterwards both caches hold the committed tokens
    at their positions. The choice of a round depends on nothing that is drawn in it. So rounds of all kinds can follow
    one another.
    """
    choice = Always(tree) if isinstance(tree, Tree) else tree
    rows = Rows(prefixes, max_len, [target, *drafter.models], end_of_text, callback, spare=choice.most)
    first_token(rows, target, sampling, generator)
    drafter.begin(rows)
    choice.begin(rows)
    while rows.remaining:
        shape = choice.tree()
        if shape is None:
            last = plain_step(rows, target, drafter, sampling, generator)
        elif shape.is_chain and verify in ON_CHAINS:
            last = advance_chain(rows, target, drafter, shape.size, sampling, ON_CHAINS[verify], generator)
        else:
            last = advance(rows, target, drafter, shape, sampling, verify, generator)
        # Learn which shape to guess in the next round. The last accepted node tells the path.
        choice.learn(last)
    return rows.tokens, rows.records


def plain_step(
    rows: Rows, target: TreeModel, drafter: TreeDrafter, sampling: Sampling, generator: Generator | None = None
) -> dict[int, int]:
    """A round without guesses: one token, as in `regrSampling`. Returns {}: no node was accepted."""
    drafter.draft(rows, 0, sampling)  # It is told of the round: it falls a token behind.
    seen = rows.seen(target.vocabulary, sampling)
    token, _ = draw_tokens(target, *rows.last(1), 1, sampling, generator, seen)
    rows.commit_one(token[:, 0])
    return {}


class Counted(Fixed):
    """Always `length` guesses; `accepted`: {row: how many the last round accepted}."""

    def learn(self, drafted: dict[int, int], accepted: dict[int, int], sure: dict[int, bool]) -> None:
        """See `LengthRule`."""
        self.accepted = accepted


def advance_chain(
    rows: Rows,
    target: TreeModel,
    drafter: TreeDrafter,
    gamma: int,
    sampling: Sampling,
    verify: VerificationRule,
    generator: Generator | None = None,
) -> dict[int, int]:
    """One round whose tree is a chain of `gamma` guesses: a round of `specSampling`.

    A node of a chain has the slot of its position, so nothing is moved. Returns as `advance`: the last accepted node of
    a chain has the number of the guesses accepted.
    """
    length = Counted(gamma)
    length.begin(rows)
    chain_round(rows, target, drafter, length, sampling, verify, generator)
    return length.accepted


def advance(
    rows: Rows,
    target: TreeModel,
    drafter: TreeDrafter,
    tree: Tree,
    sampling: Sampling,
    verify: TreeRule,
    generator: Generator | None = None,
) -> dict[int, int]:
    """One round. Returns {row: the last accepted node, or 0}, of the rows that had not ended."""
    # Draft level by level. The last token a row may add needs no guess: the target draws it.
    guesses = drafter.grow(rows, tree, sampling, generator).limited([max(0, left - 1) for left in rows.left])
    # Score all nodes in one forward of the target. Verify: accept a path, draw the token after it.
    u = uniform(len(rows.tokens), tree.size + 1, device=rows.device, generator=generator)
    _, accepted, path, token = score_and_verify(target, rows, guesses, u, sampling, verify)
    # Move the path's keys and values to the slots of its positions, in both models.
    keep((target, *drafter.models), rows, tree, path)
    # Commit the path and the token after it. Here the host waits for the device, once in the round.
    drafts = guesses.drafts.gather(1, (path - 1).clamp(min=0))
    drafted, _, last = rows.commit(drafts, accepted, token, guesses.counts(), path.amax(1))
    if min(drafted.values()) < 0:
        raise not_finite(drafter.models[0])
    return last
