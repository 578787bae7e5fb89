"""`siblings`: draws the guesses of one level of a tree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from utils import pick


def siblings(q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw `counts[i]` children for node i of a level. No token is drawn twice for a node.

    q: float32 `[B, m, V]`, the draft's distribution after each of the m nodes.
    u: float32 `[B, m, K]`, uniform on [0, 1), K >= max(counts). The k-th child of a node is drawn with its `u[..., k]`.
    Returns the tokens, int64 `[B, sum(counts)]`, and the laws that each was really drawn from, float32
    `[B, sum(counts), V]`: the children of node 0 in the order they are drawn, then those of node 1, and so on. The law
    of a first child is q; that of a later one is q without the children before it, renormalised. If fewer tokens are
    left than children, the missing children have the law 0 and the token of the first child. If q is nan, so
    are the laws, and the tokens are V, as those of `utils.pick` are.

    It must not synchronise with the host: an engine may record its work and repeat it.
    """
    drawn: list[list[tuple[Tensor, Tensor]]] = [[] for _ in counts]
    going = list(range(len(counts)))
    left = q
    for k in range(max(counts)):
        parents = [i for i, node in enumerate(going) if counts[node] > k]
        if len(parents) < len(going):
            left, going = torch.stack([left[:, i] for i in parents], 1), [going[i] for i in parents]
        total = left.sum(-1, keepdim=True)
        law = left if k == 0 else left / total.masked_fill(total == 0, 1)
        tokens = pick(law, torch.stack([u[:, node, k] for node in going], 1))
        if k > 0:
            first = torch.stack([drawn[node][0][0] for node in going], 1)
            tokens = torch.where(total[..., 0] == 0, first, tokens)
        for i, node in enumerate(going):
            drawn[node].append((tokens[:, i], law[:, i]))
        left = law.scatter(-1, tokens.clamp(max=q.shape[-1] - 1)[..., None], 0)  # V, drawn from nan, is no index.
    pairs = [pair for node in drawn for pair in node]
    return torch.stack([token for token, _ in pairs], 1), torch.stack([law for _, law in pairs], 1)
