"""Which guesses of a tree to accept, so that the tokens committed are distributed exactly as the target's own.

A rule is a pure function of p, q, the drafts, uniform random numbers u and the shape of the tree. Like a rule of
`decoding.verification` it must not synchronise with the host or keep state.

Why a node that is judged with mass m emits m. A mass is a distribution over the next token times a weight of at most 1,
the probability with which the node must accept. A child x is drawn from its law q, and judged with the mass w_x p_x for
w_x = min(1, m(x) / q(x)). If that emits what it must, the path to the child is emitted with probability
q(x) w_x = min(q(x), m(x)), and max(0, m - q) is what is missing. All children before the next one are rejected with
probability 1 - sum min(m, q), so the node must continue with the mass max(0, m - q) / (1 - sum min(m, q)). This holds
whatever x was, so the law of the next child may depend on it, as it does without replacement. When no child is left,
the node accepts with probability sum m, and emits a token of m / sum m.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from decoding.tree import Tree
from utils import at_place, pick

# verify(p, q, drafts, u, tree) -> (accepted, path, token), see `traversal_rule`.
TreeRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tree], tuple[Tensor, Tensor, Tensor]]


def traversal_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Traversal verification (Weng et al., arXiv 2505.12398): from the leaves to the root, whole paths are judged. On a
    chain it is block verification.

    p: float32 `[B, n + 1, V]`, the target's distribution after nodes 0 to n.
    q: float32 `[B, n, V]`, the laws that nodes 1 to n were really drawn from (`siblings`). Where q is 0, a
        row has no such node, and what is below it is no candidate either.
    drafts: int64 `[B, n]`, the tokens of nodes 1 to n; any token where q is 0.
    u: float32 `[B, n + 1]`, uniform on [0, 1): one number for each of nodes 1 to n, and one for the token.
    Returns how many guesses are accepted, int64 `[B]`; their nodes at depths 1, 2, ..., int64 `[B, tree.depth]`, 0
    beyond the last one; and the token after them, int64 `[B]`. The token is V if p is nan there.

    The root has the mass p, and a child w_x p_x, where w_x = min(1, m(x) / q(x)) for the mass m that the children
    before it have left. Nodes are visited in depth-first order, each after its children. The first that passes ends the
    accepted path.
    """
    masses, weights, _ = judge(p, q, drafts, tree, carried=True)
    return take_path(p, masses, first_in_postorder(u[:, :-1] < weights[:, 1:], tree), u[:, -1], tree)


def top_down_rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-round speculative sampling, from the root down (SpecInfer, arXiv 2305.09781; without replacement: Sequoia,
    arXiv 2402.12374). Arguments and results are those of `traversal_rule`. On a chain it is `token_rule`.

    The children of a node are visited in the order they were drawn. Child x is accepted with probability
    min(1, p(x) / q(x)), and then its children are visited. After each rejection p becomes norm(max(0, p - q)). The
    token comes from what is left of p.
    """
    masses, _, ratios = judge(p, q, drafts, tree, carried=False)
    return take_path(p, masses, first_passed(u[:, :-1] < ratios, tree), u[:, -1], tree)


TREE_RULES: dict[str, TreeRule] = {"traversal": traversal_rule, "topDown": top_down_rule}


def in_postorder(tree: Tree, node: int = 0) -> Iterator[int]:
    """The node and all below it, each after its children."""
    for child in tree.children[node]:
        yield from in_postorder(tree, child)
    yield node


def take_path(p: Tensor, masses: Tensor, route: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a rule. p: as in `traversal_rule`. masses: of `judge`. route: int64 `[B]`, the ancestors of the
    last accepted node as in `Tree.ancestors`. u: `[B]`, the uniform numbers for the token."""
    accepted, path = path_of(route, tree)
    at = path.amax(1)
    left = at_place(masses, at)
    # Nothing is left where p equals q up to rounding. Any token is right then, but there must be one.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, at_place(p, at))
    return accepted, path, pick(left, u)


def path_of(route: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """How many nodes a path has, `[B]`, and which, `[B, tree.depth]`, 0 beyond the last. route: int64 `[B]`, the
    ancestors of its last node as in `Tree.ancestors`."""
    nodes = torch.arange(1, tree.size + 1, device=route.device)
    is_on_path = (route[:, None] >> nodes) & 1
    # A node on the path has a number above its ancestors'; the other nodes go to a column that is cut off.
    column = torch.where(is_on_path > 0, is_on_path.cumsum(1) - 1, tree.depth)
    path = route.new_zeros(len(route), tree.depth + 1).scatter(1, column, is_on_path * nodes)
    return is_on_path.sum(1), path[:, : tree.depth]


def first_in_postorder(passed: Tensor, tree: Tree) -> Tensor:
    """The route to the first node that passes, each visited after its children: `passed[B, n]` -> int64 `[B]`."""
    route = torch.ones_like(passed[:, 0], dtype=torch.long)
    for node in reversed(list(in_postorder(tree))[:-1]):  # All but the root. The first one that passes is written last.
        route = torch.where(passed[:, node - 1], tree.ancestors[node], route)
    return route


def first_passed(passed: Tensor, tree: Tree) -> Tensor:
    """The route from the root down, at each node to the first child that passes: `passed[B, n]` -> int64 `[B]`."""
    route = torch.ones_like(passed[:, 0], dtype=torch.long)
    for node, children in enumerate(tree.children):
        here = route == tree.ancestors[node]  # The path leads to the node, and no child was accepted yet.
        for child in reversed(children):  # The first one that passes is written last.
            route = torch.where(here & passed[:, child - 1], tree.ancestors[child], route)
    return route


def judge(p: Tensor, q: Tensor, drafts: Tensor, tree: Tree, carried: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Whether each node accepts, if it is reached. Goes through the tree level by level: what a node's children leave
    of its mass does not depend on what is below them, so all nodes of a level are computed together.

    carried: a child's mass is w_x p_x (traversal); else p_x, because it is visited only if w_x accepted it (top-down).
    Returns what is left of the mass of each node after its children, `[B, n + 1, V]`; its sum, the probability that the
    node accepts then, `[B, n + 1]`; and w_x of nodes 1 to n, `[B, n]`, 0 where a row has no such node.
    """
    begin = {0: torch.ones_like(p[:, 0, 0])}
    masses: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    ratios: dict[int, Tensor] = {}
    for level in tree.levels:
        w = torch.stack([begin[node] for node in level], 1)
        weights.update(zip(level, w.unbind(1)))
        masses.update(zip(level, (w[..., None] * p[:, level[0] : level[-1] + 1]).unbind(1)))
        for k in range(max(len(tree.children[node]) for node in level)):
            parents = [node for node in level if len(tree.children[node]) > k]
            children = [tree.children[node][k] for node in parents]
            mass, w = (torch.stack([of[node] for node in parents], 1) for of in (masses, weights))
            law, x = (torch.stack([of[:, child - 1] for child in children], 1) for of in (q, drafts))
            ratio, mass, w = after_child(mass, w, law, x)
            ratios.update(zip(children, ratio.unbind(1)))
            weights.update(zip(parents, w.unbind(1)))
            masses.update(zip(parents, mass.unbind(1)))
            begin.update(zip(children, (ratio if carried else torch.ones_like(ratio)).unbind(1)))
    left, sums, w = (torch.stack([of[node] for node in sorted(of)], 1) for of in (masses, weights, ratios))
    return left, sums, w


def after_child(mass: Tensor, w: Tensor, law: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Judge a child x `[B, m]` that was drawn from `law[B, m, V]`, for parents of `mass[B, m, V]`, whose sum is w.

    Returns w_x = min(1, m(x) / q(x)), 0 if there is no child; and the mass with which the parents continue if it is
    rejected: max(0, m - q) / (1 - sum min(m, q)), and its sum.
    """
    q_x, m_x = (dist.gather(-1, x[..., None])[..., 0] for dist in (law, mass))
    drawn = (q_x > 0) & (m_x >= 0)  # Neither is nan.
    ratio = torch.where(drawn, (m_x / q_x).clamp(max=1), 0)
    left = (mass - law).clamp_(min=0)
    s = left.sum(-1)
    # 1 - sum min(m, q) = s + 1 - w. It is 0 only if m equals q: then no child is rejected.
    rejected = (s + (1 - w)).clamp(min=torch.finfo(mass.dtype).tiny)
    return ratio, torch.where(drawn[..., None], left / rejected[..., None], mass), torch.where(drawn, s / rejected, w)


@functools.cache
def synthetic_tree(alpha: float, rule: TreeRule = traversal_rule) -> TreeRule:
    """`decoding.verification.synthetic` for trees: the k-th child of a node is accepted with probability alpha / k,
    if its parent was and those before it were not. rule: computed as usual; its token is used."""

    def verify(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        token = rule(p, q, drafts, u, tree)[2]
        passed = torch.stack([u[:, node] < alpha / (rank + 1) for node, rank in enumerate(tree.ranks)], 1)
        passed &= q.gather(-1, drafts[..., None])[..., 0] > 0  # It is 0 where a row has no such node.
        return *path_of(first_passed(passed, tree), tree), token

    return verify
