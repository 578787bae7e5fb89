"""Samplers of trees with a planted mistake, as those of plantedMistakes.py. Arguments and results of the rules are
those of decoding/treeVerification.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from decoding.interfaces import Drafter, TreeModel, TreeRule
from decoding.trees import Tree
from decoding.treeVerification import in_postorder, judge, traversal_rule
from engine.cachedModel import CachedModel
from engine.kvCache import SlotCache
from lossless.plantedMistakes import Wrong
from methods.drafters import ModelDrafter
from methods.makers import Sampler
from methods.treeSampling import TreeDrafter, treeSampling
from utils import Sampling

SHAPE = Tree.of("4,2")
UNSURE = 0.4  # A guess whose q is below this is dropped.
# The draft's temperature over the wanted one, where siblings are not renormalised. The mistake is a factor of
# 1 - q(x_1) - q(x_2) - ... in a later sibling's q, which is near 1 where the draft is unsure. On the bundled pair it
# moves 0.020 of the probability of the token after four siblings, and 0.079 with a draft at half the temperature.
COLD = 0.5


def siblings_not_renormalised(
    p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree
) -> tuple[Tensor, Tensor, Tensor]:
    """Judges a later sibling by q without the siblings before it, but does not renormalise it."""
    laws = []
    for node, rank in enumerate(tree.ranks):
        its = q[:, node - rank]  # of the first sibling
        laws.append(its.scatter(1, drafts[:, node - rank : node], 0) * (q[:, node].sum(1, keepdim=True) > 0))
    return traversal_rule(p, torch.stack(laws, 1), drafts, u, tree)


def unsure_node_dropped(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Drops a node after it was drawn: if its q is low, it is not verified."""
    q_x = q.gather(-1, drafts[..., None])
    return traversal_rule(p, q * (q_x >= UNSURE), drafts, u, tree)


def mass_not_updated(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Judges each child, and each node after its children, with the mass from before a subtree was rejected. The token
    comes from the right residual."""
    p_x = p[:, list(tree.parents)].gather(-1, drafts[..., None])[..., 0]
    q_x = q.gather(-1, drafts[..., None])[..., 0]
    weights = [torch.ones_like(p_x[:, 0])]
    for node, parent in enumerate(tree.parents):
        ratio = torch.where(q_x[:, node] > 0, p_x[:, node] / q_x[:, node], 0)
        weights.append((weights[parent] * ratio).clamp(max=1))
    passed = u[:, :-1] < torch.stack(weights[1:], 1)
    route = torch.ones_like(drafts[:, 0])
    for node in reversed(list(in_postorder(tree))[:-1]):
        route = torch.where(passed[:, node - 1], tree.ancestors[node], route)
    return judge(p, q, drafts, tree, carried=True).end(route, u[:, -1], tree)


class SeesSibling(Wrong):
    """A target whose ancestor masks have siblings in them: a node attends to all nodes before it."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor | None = None,
        mask: Tensor | None = None,
        keep: Sequence[int] | None = None,
    ) -> Tensor:
        """As `CachedModel.forward`."""
        if slots is not None and mask is not None:
            mask = torch.arange(mask.shape[-1], device=mask.device) <= slots[..., None]
        return super().forward(tokens, positions, slots, mask, keep)


class MovesWrong(Wrong):
    """A target whose keys of the accepted path are moved to wrong slots: each to the one after its own."""

    def reserve(self, rows: int, capacity: int) -> SlotCache:
        """As `CachedModel.reserve`."""
        cache: Any = super().reserve(rows, capacity)
        move = type(cache).move
        cache.move = lambda source, slots: move(cache, source.roll(1, 1), slots)
        return cache


@dataclass(frozen=True)
class TreeMistake:
    """One mistake. what: in words. verify: the verification rule. target: f(model), the target with the mistake. heat:
    the draft's temperature over the wanted one; None: that of the flags."""

    what: str
    verify: TreeRule = traversal_rule
    target: Callable[[CachedModel], CachedModel] = lambda model: model
    heat: float | None = None

    def tested(self, sampling: Sampling) -> Sampling:
        """The sampling whose distribution is wanted: that of the flags."""
        return sampling

    def sampler(self, target: CachedModel, drafter: Drafter, gamma: int, sampling: Sampling, *_: object) -> Sampler:
        """The sampler of trees with this mistake in it. `drafter` is a `ModelDrafter`; gamma is not used."""
        assert isinstance(drafter, ModelDrafter)
        wrong, heat = self.target(target), drafter.temperature
        if self.heat is not None:
            heat = self.heat * sampling.temperature
        own = TreeDrafter(cast(TreeModel, drafter.model), heat, drafter.top_p)
        return lambda prefixes, max_len, sampling, end_of_text=None, generator=None, callback=None: treeSampling(
            prefixes, wrong, own, max_len, SHAPE, sampling, end_of_text, generator, callback, self.verify
        )


TREE_MISTAKES = {
    "siblings not renormalised": TreeMistake(
        f"a later sibling is judged by a q whose sum is below 1; the draft at {COLD} times the temperature",
        siblings_not_renormalised,
        heat=COLD,
    ),
    "dropped node": TreeMistake(
        f"a node is dropped after it was drawn, if its q is below {UNSURE}", unsure_node_dropped
    ),
    "mass not updated": TreeMistake("a rejected subtree leaves the mass as it was", mass_not_updated),
    "sibling in the mask": TreeMistake("a node attends to all nodes before it, siblings too", target=SeesSibling),
    "wrong slot": TreeMistake("the keys of the accepted path are moved to wrong slots", target=MovesWrong),
}
