"""Speculative sampling with a tree of guesses: where a chain of guesses dies at its first rejection, a tree has a
second candidate (SpecInfer, Miao et al., arXiv 2305.09781; traversal verification, Weng et al., arXiv 2505.12398)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator

from decoding.interfaces import Callback, EndOfText, TreeModel, TreeRule
from decoding.record import Record
from decoding.rounds import draw_tokens, first_token, prefill, uniform
from decoding.rows import Rows
from decoding.treeChoice import Always, TreeChoice
from decoding.treeRounds import grow, keep, score_and_verify
from decoding.trees import Tree
from decoding.treeVerification import traversal_rule
from utils import Sampling, not_finite


@torch.inference_mode()
def treeSampling(
    prefixes: Sequence[Sequence[int]],
    target: TreeModel,
    draft: TreeModel,
    max_len: int = 200,
    tree: Tree | TreeChoice = Tree.of("3,2,1"),
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generator | None = None,
    callback: Callback | None = None,
    verify: TreeRule = traversal_rule,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` with tokens distributed exactly as `target`'s own, in fewer forwards of `target`.

    draft: a smaller model with the target's vocabulary.
    tree: the shape of a round's guesses, or what chooses it (decoding/treeChoice.py).
    verify: which guesses to accept (decoding/treeVerification.py).
    The other arguments, both results and the errors are those of `regrSampling`.
    """
    choice = Always(tree) if isinstance(tree, Tree) else tree
    rows = Rows(prefixes, max_len, [target, draft], end_of_text, callback, spare=choice.most)
    first_token(rows, target, sampling, generator)
    prefill(draft, rows)
    choice.begin(rows)
    unread = 1  # committed tokens before the last one that the draft may not have read
    while rows.remaining:
        shape = choice.tree()
        if shape is None:
            plain_step(rows, target, choice, sampling, generator)
            unread += 1
        else:
            advance(rows, target, draft, 1 + unread, shape, choice, sampling, verify, generator)
            unread = 1
    return rows.tokens, rows.records


def plain_step(
    rows: Rows, target: TreeModel, choice: TreeChoice, sampling: Sampling, generator: Generator | None = None
) -> None:
    """A round without guesses: one token, as in `regrSampling`."""
    seen = rows.seen(target.vocabulary, sampling)
    token, _ = draw_tokens(target, *rows.last(1), 1, sampling, generator, seen)
    rows.commit_one(token[:, 0])
    choice.learn({})


def advance(
    rows: Rows,
    target: TreeModel,
    draft: TreeModel,
    read: int,
    tree: Tree,
    choice: TreeChoice,
    sampling: Sampling,
    verify: TreeRule,
    generator: Generator | None = None,
) -> None:
    """One round with a tree of guesses. The draft reads the last `read` committed tokens again."""
    # The last token a row may add needs no guess: the target draws it.
    depths = [max(0, left - 1) for left in rows.left]
    # Draft level by level: each node's children from q, without replacement.
    guesses = grow(draft, rows, read, tree, sampling, generator).limited(depths)
    # Score all nodes in one forward of the target. Verify: accept a path, draw the token after it.
    u = uniform(len(depths), tree.size + 1, device=rows.device, generator=generator)
    _, accepted, path, token = score_and_verify(target, rows, guesses, u, sampling, verify)
    # Move the path's keys and values to the slots of its positions, in both models.
    for model in (target, draft):
        keep(model, rows, tree, path)
    # Commit the path and the token after it. Here the host waits for the device, once in the round.
    drafts = guesses.drafts.gather(1, (path - 1).clamp(min=0))
    drafted, _, last = rows.commit(drafts, accepted, token, guesses.counts(), path.amax(1))
    if min(drafted.values()) < 0:
        raise not_finite(draft)
    # Learn which shape to guess in the next round. The last accepted node tells the path.
    choice.learn(last)
