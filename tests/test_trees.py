"""The shape of a tree of guesses, and what chooses it."""

import functools
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.lengthRules import MENU, CostAware
from decoding.tree import MOST, Tree
from utils import UserError

PLAIN = Tree.chain(0)


@st.composite
def trees(draw):
    """Any tree of up to 20 guesses: the parents of nodes in ascending order."""
    parents = [0]
    for node in range(1, draw(st.integers(1, 20))):
        parents.append(draw(st.integers(parents[-1], node)))
    return Tree(tuple(parents))


@given(trees())
def test_a_tree_is_its_text(tree):
    assert Tree.of(str(tree)) == tree


@given(trees())
def test_nodes_know_their_ancestors(tree):
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


class Clock:
    """A machine on which a round with a tree takes `seconds(tree)`, and where the best guesses are always accepted."""

    def __init__(self, monkeypatch, seconds, accepted):
        self.now, self.seconds, self.accepted = 0.0, seconds, accepted
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def play(self, rule, rounds):
        """The shapes that `rule` asks for."""
        asked = []
        rule.begin(SimpleNamespace(numbers=[0], left=[1 << 20]))
        for _ in range(rounds):
            tree = rule.shape()
            assert rule.gammas() == [tree.depth]
            self.now += self.seconds(tree)
            last = 0
            while tree.children[last] and tree.depths[last] < self.accepted:
                last = tree.children[last][0]
            rule.learn({0: tree.depth}, {0: last}, {})
            asked.append(tree)
        return asked


def test_auto_finds_the_shape_with_the_most_tokens_per_second(monkeypatch):
    """Scoring is free: the largest tree. Guesses cost as much as plain decoding and are never right: no guesses."""
    free = Clock(monkeypatch, lambda tree: 1.0 + 0.001 * tree.size, accepted=9)
    asked = free.play(CostAware(MENU), 400)
    assert max(map(asked[200:].count, MENU)) > 150
    favourite = max(MENU, key=asked[200:].count)
    assert favourite.depth == max(tree.depth for tree in MENU)
    dear = Clock(monkeypatch, lambda tree: 1.0 + tree.depth, accepted=0)
    asked = dear.play(CostAware(MENU), 400)
    assert asked[200:].count(PLAIN) > 150


def best_expected(budget, table):
    """The expected tokens of the best tree of at most `budget` guesses below a node, by dynamic programming (Sequoia,
    arXiv 2402.12374, section 3.1)."""

    @functools.cache
    def below(depth, rank, left):
        """Of the siblings from `rank` on at this depth, with `left` guesses for them and all below them."""
        if depth == len(table) or rank == len(table[depth]):
            return 0.0
        ways = (
            table[depth][rank] * (1 + below(depth + 1, 0, size - 1)) + below(depth, rank + 1, left - size)
            for size in range(1, left + 1)
        )
        return max(ways, default=0.0)

    return 1 + below(0, 0, budget)


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

    sizes = (1, 2, 4, 6, 8, 12, 16, 24, 32)
    best = max(
        rate(best_expected(size, [row] * depth), depth, size)
        for depth in range(1, 11)
        for size in sizes
        if size >= depth
    )
    assert max(rates(MENU)) > 0.91 * max(1.0, best)
    assert max(rates(MENU)) > 0.97 * max(rates(map(Tree.chain, range(11))))


def test_auto_tries_other_shapes_again(monkeypatch):
    free = Clock(monkeypatch, lambda tree: 1.0 + 0.02 * tree.size, accepted=2)
    assert len(set(free.play(CostAware(MENU), 800)[100:])) > 3


def test_auto_forgets_a_busy_start(monkeypatch):
    """While the machine was busy, every shape but plain decoding seemed slow."""
    rounds = 0

    def seconds(tree):
        nonlocal rounds
        rounds += 1
        busy = 30.0 if rounds < 20 and tree.size else 1.0
        return busy * (1.0 + 0.01 * tree.size)

    asked = Clock(monkeypatch, seconds, accepted=9).play(CostAware(MENU), 4000)
    assert asked[20:60].count(PLAIN) > 20 and asked[-500:].count(PLAIN) < 50
