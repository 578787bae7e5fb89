"""Siblings are drawn without replacement, each from the law that is returned with it."""

import itertools

import pytest
import torch
from scipy.stats import chisquare

from decoding.tree import siblings

Q = torch.tensor([[0.5, 0.0, 0.2, 0.3], [0.0, 0.0, 1.0, 0.0], [0.1, 0.6, 0.1, 0.2]])


def without_replacement(q, count):
    """{drawn tokens: probability} of `count` draws from `q[V]`, each from what the draws before it leave."""
    outcomes = {(): 1.0}
    for _ in range(count):
        outcomes = {
            (*drawn, x): chance * q[x] / (1 - sum(q[y] for y in drawn))
            for drawn, chance in outcomes.items()
            for x in range(len(q))
            if q[x] > 0 and x not in drawn
        }
    return outcomes


def test_each_order_of_tokens_is_as_probable_as_it_must_be():
    rows, q = 200_000, Q[2]
    u = torch.rand(rows, 1, 3, generator=torch.Generator().manual_seed(0))
    tokens, _ = siblings(q.expand(rows, 1, 4), u, (3,))
    wanted = without_replacement(q.tolist(), 3)
    assert set(wanted) == set(itertools.permutations(range(4), 3))
    found = [(tokens == torch.tensor(drawn)).all(1).sum().item() for drawn in wanted]
    expected = [chance * rows / sum(wanted.values()) for chance in wanted.values()]
    assert sum(found) == rows and chisquare(found, expected).pvalue > 1e-3


def test_the_laws_are_q_without_the_siblings_before():
    counts = (3, 0, 2)
    u = torch.rand(50, 3, 3, generator=torch.Generator().manual_seed(1))
    tokens, laws = siblings(Q.expand(50, 3, 4), u, counts)
    assert tokens.shape == (50, 5) and laws.shape == (50, 5, 4)
    at = 0
    for node, count in enumerate(counts):
        left = Q[node].repeat(50, 1)
        for k in range(at, at + count):
            torch.testing.assert_close(laws[:, k], left / left.sum(-1, keepdim=True))
            assert (laws[:, k].gather(1, tokens[:, k, None]) > 0).all()
            left = left.scatter(1, tokens[:, k, None], 0)
        at += count
    assert torch.equal(laws[:, 0], Q[0].expand(50, 4))


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_too_few_tokens_are_left(u):
    tokens, laws = siblings(Q[None], torch.full((1, 3, 4), u), (4, 3, 0))
    assert (laws.sum(-1)[0] > 0).tolist() == [True, True, True, False, True, False, False]
    assert set(tokens[0, :3].tolist()) == {0, 2, 3} and tokens[0, 3] == tokens[0, 0]
    assert tokens[0, 4:].tolist() == [2, 2, 2]


def test_from_nan_comes_no_token():
    q = Q[None].clone()
    q[0, 2] = torch.nan
    tokens, laws = siblings(q, torch.full((1, 3, 2), 0.3), (1, 1, 2))
    assert tokens[0, 2:].tolist() == [4, 4] and laws[0, 2:].isnan().all() and laws[0, :2].isfinite().all()
