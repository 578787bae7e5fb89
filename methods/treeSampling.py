"""Speculative sampling with a tree of guesses: where a chain of guesses dies at its first rejection, a tree has a
second candidate (SpecInfer, Miao et al., arXiv 2305.09781; traversal verification, Weng et al., arXiv 2505.12398)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator

from decoding.drawing import draw_tokens
from decoding.interfaces import Callback, EndOfText, TreeModel, TreeRule
from decoding.record import Record
from decoding.rounds import first_token, prefill, uniform
from decoding.rows import Rows
from decoding.treeChoice import Always, TreeChoice
from decoding.treeRounds import TreeGuesses, grow, keep, score_and_verify
from decoding.trees import Tree
from decoding.treeVerification import traversal_rule
from utils import Sampling, not_finite


class TreeDrafter:
    """A smaller model with the target's vocabulary grows trees of guesses.

    temperature, top_p: of the draft alone, as in `ModelDrafter`.
    """

    def __init__(self, model: TreeModel, temperature: float | None = None, top_p: float | None = None) -> None:
        self.model, self.temperature, self.top_p = model, temperature, top_p

    def begin(self, rows: Rows) -> None:
        """Read the prompts."""
        prefill(self.model, rows)
        self.behind = 1

    def draft(self, rows: Rows, tree: Tree, sampling: Sampling, generator: Generator | None = None) -> TreeGuesses:
        """A tree for each row. As in `ModelDrafter`, the last two committed tokens are read again."""
        read, self.behind = 1 + self.behind, 1
        own = sampling.but(self.temperature, self.top_p)
        return grow(self.model, rows, read, tree, sampling, own, generator)


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
    """
    choice = Always(tree) if isinstance(tree, Tree) else tree
    rows = Rows(prefixes, max_len, [target, drafter.model], end_of_text, callback, spare=choice.most)
    first_token(rows, target, sampling, generator)
    drafter.begin(rows)
    choice.begin(rows)
    while rows.remaining:
        shape = choice.tree()
        if shape is None:
            last = plain_step(rows, target, sampling, generator)
            drafter.behind += 1
        else:
            last = advance(rows, target, drafter, shape, sampling, verify, generator)
        # Learn which shape to guess in the next round. The last accepted node tells the path.
        choice.learn(last)
    return rows.tokens, rows.records


def plain_step(rows: Rows, target: TreeModel, sampling: Sampling, generator: Generator | None = None) -> dict[int, int]:
    """A round without guesses: one token, as in `regrSampling`. Returns {}: no node was accepted."""
    seen = rows.seen(target.vocabulary, sampling)
    token, _ = draw_tokens(target, *rows.last(1), 1, sampling, generator, seen)
    rows.commit_one(token[:, 0])
    return {}


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
    guesses = drafter.draft(rows, tree, sampling, generator).limited([max(0, left - 1) for left in rows.left])
    # Score all nodes in one forward of the target. Verify: accept a path, draw the token after it.
    u = uniform(len(rows.tokens), tree.size + 1, device=rows.device, generator=generator)
    _, accepted, path, token = score_and_verify(target, rows, guesses, u, sampling, verify)
    # Move the path's keys and values to the slots of its positions, in both models.
    keep((target, drafter.model), rows, tree, path)
    # Commit the path and the token after it. Here the host waits for the device, once in the round.
    drafts = guesses.drafts.gather(1, (path - 1).clamp(min=0))
    drafted, _, last = rows.commit(drafts, accepted, token, guesses.counts(), path.amax(1))
    if min(drafted.values()) < 0:
        raise not_finite(drafter.model)
    return last
