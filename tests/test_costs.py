"""What a round of each kind is expected to take, from what was timed."""

import math
import random

import pytest

from decoding.lengthRules import RoundCosts

CHAINS = {"plain": 1.0, "chain of 2": 1.5, "tree": 2.0, "chain of 8": 3.0}


def timed(costs, seconds, rounds=30):
    for _ in range(rounds):
        for kind, own in seconds.items():
            costs.learn(kind, own)


def test_before_anything_was_timed_costs_are_as_expected():
    costs = RoundCosts(CHAINS)
    assert {kind: costs.seconds(kind) for kind in CHAINS} == CHAINS


def test_what_was_timed_is_known_and_the_rest_lies_between():
    costs = RoundCosts(CHAINS)
    costs.learn("plain", 0.2)
    assert [costs.seconds(kind) for kind in CHAINS] == pytest.approx([0.2 * cost for cost in CHAINS.values()])
    costs.learn("tree", 0.6)  # half as much again as expected
    assert costs.seconds("plain") == pytest.approx(0.2) and costs.seconds("tree") == pytest.approx(0.6)
    assert costs.seconds("chain of 2") == pytest.approx(0.3 * math.sqrt(1.5))
    assert costs.seconds("chain of 8") == pytest.approx(0.9)


def test_costs_are_learnt_whatever_was_expected():
    seconds = {"plain": 0.3, "chain of 2": 0.2, "tree": 5.0, "chain of 8": 0.1}
    costs = RoundCosts(dict.fromkeys(CHAINS, 1.0))
    timed(costs, seconds)
    for kind, own in seconds.items():
        assert costs.seconds(kind) == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize("slower", [3.0, 0.3])
def test_a_machine_that_gets_slower_changes_all_kinds_by_the_rounds_of_one(slower):
    costs = RoundCosts(CHAINS)
    timed(costs, CHAINS)
    for i in range(300):
        costs.learn("tree", CHAINS["tree"] * slower ** (i / 300))
    for _ in range(50):
        costs.learn("tree", CHAINS["tree"] * slower)
    assert costs.seconds("tree") == pytest.approx(slower * CHAINS["tree"], rel=0.03)
    assert costs.seconds("plain") == pytest.approx(slower * CHAINS["plain"], rel=0.25)


def test_a_hiccup_counts_for_at_most_twice_the_time_and_is_forgotten():
    costs = RoundCosts(CHAINS)
    costs.learn("plain", 1.0)
    costs.learn("tree", 1000.0)
    assert costs.seconds("tree") == pytest.approx(4.0)
    for _ in range(8):
        costs.learn("plain", 1.0)
        costs.learn("tree", 2.0)
    assert costs.seconds("tree") == pytest.approx(2.0, rel=0.1)
    costs.learn("plain", 1000.0)
    assert costs.seconds("plain") < 1.3


def test_the_first_round_of_all_may_be_a_hiccup():
    costs = RoundCosts(CHAINS)
    costs.learn("plain", 50.0)
    timed(costs, CHAINS)
    for kind, own in CHAINS.items():
        assert costs.seconds(kind) == pytest.approx(own, rel=0.1)


def test_noise_evens_out():
    rng, costs = random.Random(0), RoundCosts(CHAINS)
    for _ in range(1000):
        costs.learn("tree", 2 * rng.uniform(0.9, 1.1))
    assert costs.seconds("tree") == pytest.approx(2.0, rel=0.05)
    costs.learn("plain", 0.0)  # a clock that stands still
    assert costs.seconds("plain") > 0
