"""The steps of a round whose guesses form a tree: `grow`, `score_and_verify` and `keep`.

Node i of a tree has a slot of its own in the KV caches, that of the root plus i, and the position of its depth. A node
attends to the committed tokens, its ancestors and itself. After verification, `keep` moves the keys and values of the
accepted path to the slots of their positions. Nothing is read again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from decoding.drawing import read_missed
from decoding.interfaces import TreeModel, TreeRule
from decoding.rounds import forward, uniform, use_graph
from decoding.rows import Rows, upload
from decoding.trees import MOST, Tree
from utils import Sampling


@dataclass(frozen=True)
class Places:
    """Where m nodes of a tree are.

    positions, slots: int64 `[B, m]`. root: int64 `[B]`, the slot of the tree's root. ancestors: int64 `[m]`, bit masks
    of the nodes each one attends to, see `Tree.ancestors`.
    """

    positions: Tensor
    slots: Tensor
    root: Tensor
    ancestors: Tensor

    @classmethod
    def of(cls, rows: Rows, tree: Tree) -> Places:
        """All nodes of `tree`, the root first. Positions are clamped as in `Rows.positions`; slots need
        `Rows.spare`."""
        depths, order, ancestors = numbers(tree, rows.device)
        root = rows.lengths - 1
        return cls((root[:, None] + depths).clamp_(max=rows.capacity - 1), root[:, None] + order, root, ancestors)

    def only(self, nodes: Sequence[int]) -> Places:
        """Those of some nodes."""
        return Places(
            columns(self.positions, nodes), columns(self.slots, nodes), self.root, columns(self.ancestors, nodes)
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.positions, self.slots, self.root, self.ancestors

    def to(self, device: torch.device) -> Places:
        return Places(*(x.to(device) for x in self.tensors))

    def mask(self, reach: int) -> Tensor:
        """Which of the first `reach` slots each node attends to: bool `[B, m, reach]`."""
        after = torch.arange(reach, device=self.root.device) - self.root[:, None]  # [B, reach]; the root's slot is 0
        is_ancestor = (self.ancestors[:, None] >> after.clamp(0, MOST)[:, None]) & 1 > 0
        return (after <= 0)[:, None] | (is_ancestor & (after <= MOST)[:, None])


@functools.lru_cache(maxsize=256)
def numbers(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Depths, numbers and ancestors of the nodes 0, ..., n: int64 `[n + 1]` each."""
    depths, order, ancestors = upload([tree.depths, range(tree.size + 1), tree.ancestors], device)
    return depths, order, ancestors


def columns(x: Tensor, nodes: Sequence[int]) -> Tensor:
    """`x[..., nodes]`, without an index that a GPU would wait for."""
    if list(nodes) == list(range(nodes[0], nodes[-1] + 1)):
        return x[..., nodes[0] : nodes[-1] + 1]
    return torch.stack([x[..., node] for node in nodes], -1)


@dataclass(frozen=True)
class TreeGuesses:
    """The guesses of one round, in a tree with n nodes beside the root.

    drafts: int64 `[B, n]`. q: float32 `[B, n, V]`, the law that each was drawn from. Siblings are drawn without
    replacement: the law of a later one is q without the earlier ones, renormalised. Where a row has no guess, q is 0.
    places: of all nodes, the root first.
    """

    tree: Tree
    drafts: Tensor
    q: Tensor
    places: Places

    def counts(self) -> Tensor:
        """How many guesses each row could accept, the depth of its deepest guess: int64 `[B]`; -1 if one was drawn
        from a q of nan."""
        # A distribution is nan everywhere or nowhere.
        of_drafts = self.q.gather(-1, self.drafts[..., None])[..., 0]
        depths = numbers(self.tree, self.drafts.device)[0][1:]
        return ((of_drafts > 0) * depths).amax(1).masked_fill_(of_drafts.isnan().any(1), -1)

    def limited(self, gammas: Sequence[int]) -> TreeGuesses:
        """The same guesses, where row i keeps only those down to depth `gammas[i]`: q is 0 below."""
        if min(gammas) >= self.tree.depth:
            return self
        kept = numbers(self.tree, self.drafts.device)[0][1:] <= upload(gammas, self.drafts.device)[:, None]
        return replace(self, q=self.q * kept[..., None])


def level_by_level(
    forward: Callable[[Tensor, Sequence[int]], Tensor],
    distribution: Callable[[Tensor, Sequence[int], Tensor], Tensor],
    siblings: Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, Tensor]],
    tree: Tree,
    tokens: Tensor,
    u: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw a tree with one forward of the draft for each level: drafts `[B, n]` and their laws `[B, n, V]`.

    forward(tokens, nodes): the logits `[B, m, V]` after some nodes of a level, those with children. At the root,
        `tokens[B, w]` are the last committed ones; elsewhere they are the nodes'.
    distribution(logits, nodes, drafts): the probabilities `[B, m, V]` of what may follow these nodes, when `drafts` are
        the tokens of all nodes drawn so far.
    siblings: `treeDrawing.siblings`. u: float32 `[B, tree.draws]`, uniform numbers.
    Eager code and graphs share this loop.
    """
    drafts, laws, used = tokens[:, :0], [], 0
    for level in tree.levels[:-1]:
        nodes = [node for node in level if tree.children[node]]
        counts = tuple(len(tree.children[node]) for node in nodes)
        block = columns(drafts, [node - 1 for node in nodes]) if nodes != [0] else tokens
        q = distribution(forward(block, nodes)[:, -len(nodes) :], nodes, drafts)
        own = u[:, used : used + len(nodes) * max(counts)].unflatten(1, (len(nodes), max(counts)))
        used += len(nodes) * max(counts)
        drawn, law = siblings(q, own, counts)
        # A token drawn from nan is none, and cannot be read: `advance` reports it.
        drafts = torch.cat([drafts, drawn.clamp(max=q.shape[-1] - 1)], 1)
        laws.append(law)
    return drafts, torch.cat(laws, 1)


def forward_tree(model: TreeModel, tokens: Tensor, places: Places, reach: int) -> Tensor:
    """Logits after each of the nodes `tokens[B, m]`, float32 `[B, m, V]`. No row has filled more than `reach` slots."""
    if use_graph(model, "tree", *tokens.shape):
        return model.graphs.forward_tree(tokens, places, model.cache)
    return model.forward(tokens, places.positions, slots=places.slots, mask=places.mask(reach))


@torch.inference_mode()
def grow(
    model: TreeModel, rows: Rows, read: int, tree: Tree, sampling: Sampling, generator: Generator | None = None
) -> TreeGuesses:
    """A tree of guesses of a draft model for each row, after reading the last `read` committed tokens again.

    sampling: the draft's. The draft may be on a device of its own, as in `drawing.guess`.
    """
    places, there = Places.of(rows, tree), model.device
    read = read_missed(model, rows, read)
    u = uniform(len(rows.tokens), tree.draws, device=there, generator=generator)
    tokens, positions = (each.to(there) for each in rows.last(read))
    drafts, q = grown_by(model, rows, tree, tokens, positions, places.to(there), u, sampling)
    return TreeGuesses(tree, drafts.to(rows.device), q.to(rows.device), places)


def grown_by(
    model: TreeModel,
    rows: Rows,
    tree: Tree,
    tokens: Tensor,
    positions: Tensor,
    places: Places,
    u: Tensor,
    sampling: Sampling,
) -> tuple[Tensor, Tensor]:
    """`level_by_level` of a draft model, after the block `tokens, positions [B, read]`."""
    seen, reach = rows.seen(model.vocabulary, sampling), reached(rows, tree)
    if use_graph(model, "grow", *tokens.shape, tree, seen=seen):
        return model.graphs.grow(tree, tokens, positions, places, u, sampling, model.cache)
    held = None if seen is None else seen.to(model.device)

    def read(tokens: Tensor, nodes: Sequence[int]) -> Tensor:
        if nodes[0] == 0:
            return forward(model, tokens, positions)
        return forward_tree(model, tokens, places.only(nodes), reach)

    def distribution(logits: Tensor, nodes: Sequence[int], drafts: Tensor) -> Tensor:
        return model.operators.probabilities(logits, sampling, seen_after_nodes(held, drafts, tree, nodes))

    return level_by_level(read, distribution, model.operators.siblings, tree, tokens, u)


def reached(rows: Rows, tree: Tree) -> int:
    """Slots that some row reaches with its tree. The host knows it."""
    return max(map(len, rows.texts)) + tree.size


def seen_after_nodes(seen: Tensor | None, drafts: Tensor, tree: Tree, nodes: Sequence[int]) -> Tensor | None:
    """The tokens in the text that ends with each of some nodes: bool `[B, m, V]`. seen: see `Rows.seen`; None stays
    None."""
    if seen is None:
        return None
    paths = [[other for other in range(1, node + 1) if tree.ancestors[node] >> other & 1] for node in nodes]
    return torch.stack(
        [seen.scatter(1, columns(drafts, [i - 1 for i in path]), True) if path else seen for path in paths], 1
    )


@torch.inference_mode()
def score_and_verify(
    target: TreeModel, rows: Rows, guesses: TreeGuesses, u: Tensor, sampling: Sampling, verify: TreeRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score a tree of guesses with one forward of the target, and verify it.

    u: float32 `[B, n + 1]`, uniform numbers for the rule `verify` (treeVerification.py).
    Returns p `[B, n + 1, V]`, the target's distributions after each node, and the rule's `accepted[B]`,
    `path[B, depth]` and `token[B]`.
    """
    tree, drafts, q, places = guesses.tree, guesses.drafts, guesses.q, guesses.places
    block, seen = torch.cat([rows.last(1)[0], drafts], 1), rows.seen(target.vocabulary, sampling)
    if use_graph(target, "score_and_verify_tree", *block.shape, seen=seen, verify=verify):
        return target.graphs.score_and_verify_tree(tree, block, places, q, u, sampling, verify, target.cache)
    logits = forward_tree(target, block, places, reached(rows, tree))
    p = target.operators.probabilities(logits, sampling, seen_after_nodes(seen, drafts, tree, range(tree.size + 1)))
    return p, *target.operators.rule(verify)(p, q, drafts, u, tree)


@torch.inference_mode()
def keep(models: Iterable[TreeModel], rows: Rows, tree: Tree, path: Tensor) -> None:
    """Move the keys and values of the accepted nodes `path[B, depth]` to the slots of their positions, in all models.

    Where a path is shorter, its nodes are 0: the root's keys and values go to slots that the next tokens overwrite. The
    last committed token's are among these, since each model reads it again.
    """
    root = (rows.lengths - 1)[:, None]
    source, slots = root + path, root + rows.offsets(1, tree.depth)
    for model in models:
        moved = source.to(model.device), slots.to(model.device)
        if use_graph(model, "move", *slots.shape):
            model.graphs.move(*moved, model.cache)
        else:
            model.cache.move(*moved)
