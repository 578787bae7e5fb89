"""Speculative sampling with a tree of guesses: where a chain of guesses ends at its first rejection, a tree has a
second candidate (SpecInfer, Miao et al., arXiv 2305.09781; traversal verification, Weng et al., arXiv 2505.12398)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from decoding.drafter import Fixed, Guesses, LengthRule, Observer
from decoding.model import Model
from decoding.rows import Callback, EndOfText, Generators, Record, Rows
from decoding.tree import MOST, Places, Tree
from decoding.treeRules import TreeRule, top_down_rule, traversal_rule
from decoding.verification import VerificationRule, block_rule, token_rule
from methods.drafters import ModelDrafter
from specSampling import advance
from utils import Sampling, UserError

# What a rule for trees is on a chain.
ON_CHAINS: dict[TreeRule, VerificationRule] = {traversal_rule: block_rule, top_down_rule: token_rule}


class TreeDrafter(ModelDrafter):
    """A `ModelDrafter` that grows trees of guesses too."""

    def grow(self, rows: Rows, tree: Tree, places: Places, sampling: Sampling) -> Guesses:
        """A tree for each row. places: of all nodes, the root first."""
        model, seen = self.model, rows.seen(self.model.vocabulary, sampling)
        seen = None if seen is None else seen.to(model.device)
        u = rows.uniform([tree.draws] * rows.size).to(model.device)
        tokens, positions = (x.to(model.device) for x in rows.last(1 + self.unread(tree.depth)))
        draft_sampling = sampling.but(self.temperature, self.top_p)
        drafts, q = model.grow(tree, tokens, positions, places.to(model.device), u, draft_sampling, seen)
        return Guesses(drafts.to(rows.device), q.to(rows.device), tree=tree)


@torch.inference_mode()
def treeSampling(
    prefixes: Sequence[Sequence[int]],
    target: Model,
    drafter: TreeDrafter,
    max_len: int = 200,
    tree: Tree | LengthRule = Tree.of("3,2,1"),
    sampling: Sampling = Sampling(),
    end_of_text: EndOfText = None,
    generator: Generators = None,
    callback: Callback | None = None,
    verify: TreeRule = traversal_rule,
    batch: int | None = None,
    observer: Observer | None = None,
) -> tuple[list[list[int]], list[Record]]:
    """Continue each of `prefixes` with tokens distributed exactly as `target`'s own, in fewer forwards of `target`.

    tree: the shape of a round's guesses, or a rule that chooses it (decoding/lengthRules.py).
    verify: which guesses to accept (decoding/treeRules.py).
    observer: as in `specSampling`.
    The other arguments, both results and the errors are those of `regrSampling`.

    A round whose shape is a chain, or plain decoding, is a round of `specSampling`. Rounds of all kinds can follow one
    another: each adds tokens of the target's distribution, given the committed ones, and afterwards both caches hold
    the committed tokens at their positions.
    """
    rule = tree if isinstance(tree, LengthRule) else Fixed(tree)
    if verify not in ON_CHAINS and (rule.shapes is None or any(shape.size > MOST for shape in rule.shapes)):
        raise UserError(f"this rule verifies chains as trees: give the shapes, each of at most {MOST} guesses")
    spare = max((shape.size for shape in rule.shapes or ()), default=0)
    rows = Rows(prefixes, max_len, [target, *drafter.models], end_of_text, callback, spare, generator, batch)
    drafter.begin(rows)
    rule.begin(rows)
    with rows:
        while rows.refill():
            if rows.fresh:  # Prompts that are new in the batch.
                target.first_token(rows, sampling)
                drafter.read_prompts(rows)
            elif rule.shape().is_chain and (verify in ON_CHAINS or not rule.shape().size):
                on_chains = ON_CHAINS.get(verify, token_rule)
                advance(rows, target, drafter, rule, sampling, on_chains, observer)
            else:
                advance_tree(rows, target, drafter, rule, sampling, verify, observer)
    return rows.tokens, rows.records


def advance_tree(
    rows: Rows,
    target: Model,
    drafter: TreeDrafter,
    rule: LengthRule,
    sampling: Sampling,
    verify: TreeRule,
    observer: Observer | None = None,
) -> None:
    """One round, as `specSampling.advance`."""
    tree = rule.shape()
    places = Places.of(rows, tree)
    # Draft level by level. The last token a row may add needs no guess: the target draws it.
    gammas = [max(0, min(gamma, left - 1)) for gamma, left in zip(rule.gammas(), rows.left)]
    guesses = drafter.grow(rows, tree, places, sampling).limited(gammas)
    # Score all nodes in one forward of the target. Verify: accept a path, draw the token after it.
    u = rows.uniform([tree.size + 1] * rows.size)
    block, seen = torch.cat([rows.last(1)[0], guesses.drafts], 1), rows.seen(target.vocabulary, sampling)
    p, accepted, path, token = target.score_tree(tree, block, places, guesses.q, u, sampling, verify, seen)
    if observer:
        observer(rows, guesses, p, path.amax(1))
    # Move the path's keys and values to the slots of its positions, in both models.
    move_path((target, *drafter.models), rows, tree, path)
    # Commit the path and the token after it. Here the host waits for the device, once in the round.
    drafts = guesses.drafts.gather(1, (path - 1).clamp(min=0))
    drafted, _, last = rows.commit(drafts, accepted, token, guesses.counts(), path.amax(1))
    if min(drafted.values()) < 0:
        raise drafter.not_finite()
    # Learn which shape to guess in the next round. The last accepted node tells the path.
    rule.learn(drafted, last, {})


def move_path(models: Iterable[Model], rows: Rows, tree: Tree, path: Tensor) -> None:
    """Move the keys and values of the accepted nodes `path[B, depth]` to the slots of their positions, in all models.

    Where a path is shorter, its nodes are 0: the root's keys and values go to slots that the next tokens overwrite. The
    last committed token's are among these, since each model reads it again.
    """
    root = (rows.lengths - 1)[:, None]
    source, slots = root + path, root + rows.offsets(1, tree.depth)
    for model in dict.fromkeys(model.cache_of or model for model in models):
        model.move(source.to(model.device), slots.to(model.device))
