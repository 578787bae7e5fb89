"""What trees are expected to give, and how acceptance is learnt from rounds."""

import random

import pytest

from decoding.lengthRules import Acceptance
from decoding.tree import Tree


def test_expected_tokens():
    table = [[0.6, 0.2], [0.5, 0.1]]
    assert Tree.of("2/1,2").expected_tokens(table) == pytest.approx(1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * (0.5 + 0.1))
    assert Tree.chain(3).expected_tokens(table) == pytest.approx(1 + 0.6 + 0.3)
    assert Tree.of("3").expected_tokens(table) == pytest.approx(1.8)


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
        learnt.add(tree, {0: node}, {0: 3})
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


def test_a_guess_that_was_not_asked_for_does_not_count():
    learnt, tree = Acceptance(), Tree.of("2,1")
    learnt.add(tree, dict(enumerate([1, 0, 2, 1])), dict.fromkeys(range(4), 1))
    assert learnt.reached == {(0, 0): 4.0, (0, 1): 4.0} and learnt.accepted == {(0, 0): 2.0, (0, 1): 1.0}
    learnt.add(tree, {0: 3}, {0: 2})  # the first child, and its child
    assert learnt.reached[0, 0] == pytest.approx(5, abs=0.01) and learnt.accepted[0, 0] == pytest.approx(3, abs=0.01)
    assert learnt.reached[1, 0] == learnt.accepted[1, 0] == 1
