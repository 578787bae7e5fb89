"""`Kernels`: the filters, draws and verification of utils.py and decoding/, as C++ kernels."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Rule, TreeRule, VerificationRule
from decoding.trees import Tree
from decoding.treeVerification import top_down_rule, traversal_rule
from decoding.verification import block_rule, token_rule
from utils import Sampling, penalised


@functools.cache
def as_tensor(sampling: Sampling) -> Tensor:
    """Temperature, top_k and top_p as float64 `[3]`: an input of a graph, which can differ between calls."""
    return torch.tensor([sampling.temperature, sampling.top_k, sampling.top_p], dtype=torch.float64)


class Kernels:
    """The operators of a model compiled on a CPU (`decoding.interfaces.Operators`)."""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        """As `utils.probabilities`."""
        return torch.ops.native.probabilities(penalised(logits.float(), sampling, seen), as_tensor(sampling))

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        """As `utils.pick`."""
        return torch.ops.native.pick(probs, u)

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As `decoding.treeDrawing.siblings`."""
        return torch.ops.native.siblings(q, u, counts)

    def rule(self, verify: Rule) -> Rule:
        """The kernel of a verification rule; the rule itself if it has none."""
        return RULES.get(verify, verify)


def by_kernel(accept: str) -> VerificationRule:
    """A verification rule that the operator of this name computes, but for the last draw."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        accepted, left = getattr(torch.ops.native, accept)(p, q, drafts, u[:, :-1])
        return accepted, torch.ops.native.pick(left, u[:, -1])

    return rule


def tree_by_kernel(traversal: bool) -> TreeRule:
    """A rule for trees, computed by its kernel but for the last draw."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        given = p, q, drafts, u[:, :-1], tree.parents, tree.depth, traversal
        accepted, path, left = torch.ops.native.accept_tree(*given)
        return accepted, path, torch.ops.native.pick(left, u[:, -1])

    return rule


RULES: dict[Any, Any] = {
    token_rule: by_kernel("accept"),
    block_rule: by_kernel("accept_block"),
    traversal_rule: tree_by_kernel(True),
    top_down_rule: tree_by_kernel(False),
}
