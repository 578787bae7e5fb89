"""The shape of a tree of guesses, the menu of shapes, and how nodes are drawn."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from decoding.lengthRules import MENU
from decoding.tree import MOST, Tree, siblings
from utils import UserError


@st.composite
def trees(draw):
    """Any tree of up to 20 guesses: the parents of nodes in ascending order."""
    parents = [0]
    for node in range(1, draw(st.integers(1, 20))):
        parents.append(draw(st.integers(parents[-1], node)))
    return Tree(tuple(parents))


@given(trees())
def test_a_tree_is_its_text_and_its_nodes_know_their_ancestors(tree):
    assert Tree.of(str(tree)) == tree
    for node in range(tree.size + 1):
        path = tree.path(node)
        assert len(path) == tree.depths[node]
        assert tree.ancestors[node] == sum(1 << other for other in [0, *path])
        assert all(tree.parents[child - 1] == node for child in tree.children[node])
    assert sorted(sum(tree.levels, ())) == list(range(tree.size + 1))
    assert [tree.children[p][k] for p, k in zip(tree.parents, tree.ranks)] == list(range(1, tree.size + 1))


def test_an_expansion_configuration_gives_every_node_of_a_level_as_many_children():
    tree = Tree.of("3,2,1,1")
    assert [len(level) for level in tree.levels] == [1, 3, 6, 6, 6]
    assert str(tree) == "3,2,1,1" and Tree.of("3/2,2,2/1/1") == tree
    assert Tree.chain(3) == Tree.of("1,1,1") and Tree.chain(3).is_chain and not tree.is_chain


@pytest.mark.parametrize("text", ["", "0", "3,0", "x", "3/1,1", "9,9", "1,2,", "2,0,1", "1000", "-1", "1.5", "3/"])
def test_what_is_no_tree_is_refused(text):
    with pytest.raises(UserError, match=f"not a tree of 1 to {MOST} guesses"):
        Tree.of(text)


def best_expected(budget, depth, row):
    """The expected tokens of the best tree of at most `budget` guesses (Sequoia, arXiv 2402.12374, section 3.1): it has
    the likeliest nodes, as no node is likelier than its parent or an earlier sibling."""
    expected, nodes = 0.0, [(-1.0, 0)]  # minus the chance that a node is accepted, and its depth
    while nodes and budget >= 0:
        chance, at = heapq.heappop(nodes)
        expected, budget = expected - chance, budget - 1
        for share in row if at < depth else ():
            heapq.heappush(nodes, (chance * share, at + 1))
    return expected


@pytest.mark.parametrize("first", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("level", [0.03, 0.25])
@pytest.mark.parametrize("node", [0.002, 0.05])
def test_the_menu_is_nearly_as_good_as_the_best_shape(first, level, node):
    row = [first]
    for share in (0.39, 0.27, 0.19, 0.15, 0.09):  # of what the siblings before leave
        row.append(share * (1 - sum(row)))

    def rate(tokens, depth, size):
        return tokens / (1 + level * depth + node * size)

    def rates(shapes):
        return [rate(tree.expected_tokens([row] * 10), tree.depth, tree.size) for tree in shapes]

    sizes, depths = (1, 2, 4, 6, 8, 12, 16, 24, 32), range(1, 11)
    shapes = [(depth, size) for depth in depths for size in sizes if size >= depth]
    best = max(rate(best_expected(size, depth, row), depth, size) for depth, size in shapes)
    assert max(rates(MENU)) > 0.91 * max(1.0, best)
    assert max(rates(MENU)) > 0.97 * max(rates(map(Tree.chain, range(11))))


# Siblings are drawn without replacement, each from the law that is returned with it.

Q = torch.tensor([[0.5, 0.0, 0.2, 0.3], [0.0, 0.0, 1.0, 0.0], [0.1, 0.6, 0.1, 0.2]])


def test_each_order_of_tokens_is_as_probable_as_it_must_be():
    rows, q = 200_000, Q[2].tolist()
    u = torch.rand(rows, 1, 3, generator=torch.Generator().manual_seed(0))
    tokens, _ = siblings(Q[2].expand(rows, 1, 4), u, (3,))
    orders = list(itertools.permutations(range(4), 3))
    found = [(tokens == torch.tensor(order)).all(1).sum().item() for order in orders]
    expected = [q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]) for a, b, c in orders]
    assert sum(found) == rows and chisquare(found, [rows * p / sum(expected) for p in expected]).pvalue > 1e-3


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
