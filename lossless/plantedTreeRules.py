"""Rules for trees with a planted mistake. Arguments and results are those of decoding/treeVerification.py."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.trees import Tree
from decoding.treeVerification import TreeRule, in_postorder, judge, traversal_rule

UNSURE = 0.4  # A guess whose q is below this is dropped.


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


TREE_MISTAKES: dict[str, TreeRule] = {
    "siblings not renormalised": siblings_not_renormalised,
    "dropped node": unsure_node_dropped,
    "mass not updated": mass_not_updated,
}
