"""The best shapes are those that a search through all trees finds; acceptance is learnt from rounds."""

import itertools
import random

import pytest

from decoding.trees.shapes import Acceptance, best_by_cost, best_tree, expected
from decoding.trees.tree import Tree

LARGEST = 6


def all_trees(size):
    """Every tree of that many guesses."""
    for parents in itertools.combinations_with_replacement(range(size), size):
        if all(parent <= i for i, parent in enumerate(parents)):
            yield Tree(parents)


TREES = [tree for size in range(1, LARGEST + 1) for tree in all_trees(size)]


def table_of(seed, depth=4, ranks=4):
    """Random acceptance, not always less for a later sibling."""
    source = random.Random(seed)
    shares = [[source.random() ** 2 for _ in range(ranks + 1)] for _ in range(depth)]
    return [[share / sum(row) for share in row[:-1]] for row in shares]


def test_expected_tokens():
    table = [[0.6, 0.2], [0.5, 0.1]]
    assert expected(Tree.of("2/1,2"), table) == pytest.approx(1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * (0.5 + 0.1))
    assert expected(Tree.chain(3), table) == pytest.approx(1 + 0.6 + 0.3)
    assert expected(Tree.of("3"), table) == pytest.approx(1.8)


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_is_better_than_the_best(seed):
    table = table_of(seed)
    for budget in range(1, LARGEST + 1):
        best = best_tree(budget, table)
        assert best.size <= budget
        wanted = max(expected(tree, table) for tree in TREES if tree.size <= budget)
        assert expected(best, table) == pytest.approx(wanted)


@pytest.mark.parametrize("most_children, depth", [(1, None), (2, 2), (None, 1), (3, 3)])
def test_the_limits_of_a_shape(most_children, depth):
    def within(tree):
        return tree.depth <= (depth or 9) and max(map(len, tree.children)) <= (most_children or 9)

    table = table_of(7)
    best = best_tree(LARGEST, table, most_children, depth)
    assert within(best)
    assert expected(best, table) == pytest.approx(max(expected(tree, table) for tree in TREES if within(tree)))


def test_a_larger_budget_is_never_worse():
    table = [[0.64, 0.14, 0.06, 0.03, 0.02, 0.01]] * 10
    values = [expected(best_tree(budget, table), table) for budget in range(1, 63)]
    assert values == sorted(values) and values[-1] > values[15] + 0.5
    assert best_tree(1, [[0.0]]) == Tree.chain(1)
    assert best_tree(8, [[0.5, 0.5]]) == Tree.of("2")  # The other six would add nothing.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level, token", [(0.1, 0.01), (0.3, 0.1), (0.01, 0.3), (3.0, 3.0)])
def test_no_shape_is_faster_than_the_best_by_cost(seed, level, token):
    def scoring(count):
        return 1 + token * (count - 1)

    def rate(tree):
        return expected(tree, table) / (tree.depth * level + scoring(tree.size + 1))

    table = table_of(seed)
    best, found = best_by_cost(table, level, scoring, range(1, LARGEST + 1))
    assert found == pytest.approx(max([1.0, *map(rate, TREES)]))
    assert found == pytest.approx(rate(best) if best else 1.0) and (best is None or level < 3)
    assert best_by_cost(table, level, [scoring(n) for n in range(LARGEST + 2)], range(1, LARGEST + 1)) == (best, found)


def test_chains_and_plain_decoding_are_among_the_choices():
    agreeing, disagreeing = [[0.9, 0.0]] * 5, [[0.01, 0.01]] * 5
    assert best_by_cost(agreeing, 0.05, lambda n: 1.0, [8])[0] == Tree.chain(5)
    assert best_by_cost(agreeing, 0.2, lambda n: 1.0 if n <= 4 else 9.0, [8])[0] == Tree.chain(3)
    assert best_by_cost(disagreeing, 0.1, lambda n: 2.0, [4, 8]) == (None, 0.5)
    assert best_by_cost(agreeing, 0.1, lambda n: 2.0, []) == (None, 0.5)


def test_acceptance_is_learnt_from_rounds():
    """Rounds in which a first sibling is accepted 6 times of 10, a second twice, at each depth alike."""
    source, learnt, tree = random.Random(0), Acceptance(), Tree.of("3,2,1")
    for _ in range(2000):
        node = 0
        while tree.children[node]:
            rank = source.choices((0, 1, None), (6, 2, 2))[0]
            if rank is None or rank >= len(tree.children[node]):
                break
            node = tree.children[node][rank]
        learnt.add(tree, [node])
    table = learnt.table(5, 4)
    assert [len(row) for row in table] == [4] * 5
    for at in range(2):
        assert table[at][:2] == pytest.approx([0.6, 0.2], abs=0.06)
    assert table[2][0] == pytest.approx(0.6, abs=0.08) and table[0][2] < 0.02
    assert table[3] == pytest.approx(table[4]) and table[2][1] == pytest.approx(table[1][1])  # What no round has shown.
    assert all(sum(row) <= 1 for row in table)


def test_before_the_first_round_there_is_hope():
    table = Acceptance().table(3, 3)
    assert table[0] == table[2] and table[0][0] == Acceptance.HOPE
    assert table[0][0] > table[0][1] > table[0][2] > 0 and sum(table[0]) < 1


def test_a_sibling_that_is_missing_was_not_accepted():
    learnt, tree = Acceptance(), Tree.of("2")
    learnt.add(tree, [1, 0, 2, 1])
    assert learnt.reached == {(0, 0): 4.0, (0, 1): 4.0} and learnt.accepted == {(0, 0): 2.0, (0, 1): 1.0}
    learnt.add(tree, [1])
    assert learnt.reached[0, 0] == pytest.approx(5, abs=0.01) and learnt.accepted[0, 0] == pytest.approx(3, abs=0.01)
