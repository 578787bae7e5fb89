"""What each rule chooses, from what it is told."""

import math
import random
from types import SimpleNamespace

import helpers
import pytest
import torch
from conftest import refused
from test_specSampling import PROMPTS, near

from decoding.lengthRules import Additive, CostAware, DraftConfidence, Fixed, RoundCosts, TargetConfidence
from decoding.tree import Tree
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import Sampling


def rows(count):
    """What a rule must know of a new batch."""
    return SimpleNamespace(prompts=[[1]] * count, numbers=list(range(count)), size=count, left=[1 << 20] * count)


def tell(rule, drafted, accepted, p_token=()):
    sure = rule.sure(torch.tensor(p_token)).tolist() if p_token else []
    rule.learn(dict(enumerate(drafted)), dict(enumerate(accepted)), dict(enumerate(sure)))


def test_additive_grows_by_one_and_halves_row_by_row():
    rule = Additive(4)
    rule.begin(rows(2))
    assert rule.gammas() == [4, 4]
    for _ in range(5):
        tell(rule, rule.gammas(), [rule.gammas()[0], 0])
    assert rule.gammas() == [9, 4]
    tell(rule, [9, 4], [8, 4])
    assert rule.gammas() == [4, 5]
    rule.begin(rows(1))
    assert rule.gammas() == [4]


def test_target_confidence_guesses_again_once_the_target_is_sure():
    rule = TargetConfidence(3, 0.5)
    rule.begin(rows(2))
    tell(rule, [3, 3], [1, 0], [0.49, 0.5])
    assert rule.gammas() == [0, 3]
    tell(rule, [0, 3], [0, 2], [0.9, 0.1])
    assert rule.gammas() == [3, 0]


def test_draft_confidence_stops_after_the_first_unsure_guess_of_each_row():
    target = helpers.tiny()
    said = []

    class Spy(DraftConfidence):
        def stop(self, q_x):
            said.append(q_x)
            return super().stop(q_x)

    _, records = specSampling(
        PROMPTS[:1],
        target,
        ModelDrafter(near(target)),
        60,
        Spy(5, 0.1),
        Sampling(1, 0, 1),
        generator=torch.Generator().manual_seed(0),
    )
    said = torch.cat(said).tolist()
    lengths = [n for n in records[0].drafted[1:] if n]
    assert len(set(lengths)) > 2 and sum(lengths) == len(said)
    for n in lengths[:-1]:  # the last round has no more room
        guesses, said = said[:n], said[n:]
        assert all(q >= 0.1 for q in guesses[:-1]) and (guesses[-1] < 0.1 or n == 5)


def simulate(rule, alpha, price, cost, tokens=4000, seed=0, drift=0.5, texts=1):
    """Tokens per second of a rule in a world where guesses pass with `alpha`, a round costs 1 + price * gamma, one
    without guesses `cost`, the first round after another length half as much again, the clock is noisy, and the machine
    now faster, now slower."""
    rng, clock, before = random.Random(seed), [0.0], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.lengthRules.time", SimpleNamespace(perf_counter=lambda: clock[0]))
        rule.begin(rows(1))
        made, seconds = 0, 0.0
        while made < tokens:
            gamma = rule.gammas()[0]
            accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
            takes = (1.0 + price * gamma if gamma else cost) * (1.5 if gamma != before else 1)
            made, seconds, before = made + accepted + 1, seconds + takes, gamma
            noise = rng.uniform(0.95, 1.1) * (20 if rng.random() < 0.003 else 1)
            clock[0] += takes * (1 + drift * math.sin(made / 200)) * noise
            rule.learn({0: gamma}, {0: accepted}, {})
    return made / seconds


class Plain(Fixed):
    def gammas(self):
        return [0]


@pytest.mark.parametrize(
    "alpha, price", [(0.0, 0.1), (0.2, 0.3), (0.5, 0.05), (0.65, 0.15), (0.8, 0.05), (0.9, 0.02), (0.95, 0.3)]
)
def test_cost_aware_is_near_the_best_length_wherever_that_is(alpha, price):
    ours = simulate(CostAware(10), alpha, price, 0.95)
    fixed = [simulate(Fixed(gamma), alpha, price, 0.95) for gamma in range(1, 11)]
    best = max(*fixed, simulate(Plain(), alpha, price, 0.95))
    assert ours > 0.93 * best  # with the rounds that tried other lengths
    if alpha == 0:
        assert best > 1.05 * max(fixed)  # in this world guessing does not pay


def test_cost_aware_follows_a_change():
    rule = CostAware(8)
    simulate(rule, 0.9, 0.05, 1.0)
    before = rule.search.best.size
    simulate(rule, 0.1, 0.3, 1.0)
    assert before > 4 and rule.search.best.size <= 1


def test_cost_aware_times_whole_rounds_and_only_those_after_one_of_their_length(monkeypatch):
    """By a clock that only drafting and scoring move."""
    clock, learnt = [0.0], []
    monkeypatch.setattr("decoding.lengthRules.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(RoundCosts, "learn", lambda costs, kind, seconds: learnt.append((kind.size, seconds)))

    def takes(seconds, work):
        def slower(*args, **options):
            clock[0] += seconds
            return work(*args, **options)

        return slower

    target, drafter = helpers.tiny(), ModelDrafter(helpers.tiny(seed=1))
    drafter.draft, target.forward = takes(1.0, drafter.draft), takes(10.0, target.forward)
    specSampling(PROMPTS[:1], target, drafter, 20, CostAware(4))
    assert [size for size, _ in learnt[:3]] == [0, 1, 2] and {seconds for _, seconds in learnt} == {11.0}


def simulate_batch(rule, alphas, cost, tokens=20_000, seed=0):
    """Tokens per second of a rule where row i's guesses pass with `alphas[i]` and a round costs `cost(guesses of all
    rows)`."""
    rng, clock, made = random.Random(seed), [0.0], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decoding.lengthRules.time", SimpleNamespace(perf_counter=lambda: clock[0]))
        rule.begin(rows(len(alphas)))
        while made < tokens:
            gammas = rule.gammas()
            accepted = [
                next((i for i in range(gamma) if rng.random() >= alpha), gamma) for gamma, alpha in zip(gammas, alphas)
            ]
            made += sum(accepted) + len(alphas)
            clock[0] += cost(sum(gammas)) * rng.uniform(0.95, 1.1)
            rule.learn(dict(enumerate(gammas)), dict(enumerate(accepted)), {})
    return made / clock[0]


@pytest.mark.parametrize("rows_, price", [(1, 0.05), (8, 0.05), (32, 0.05), (32, 0.01), (16, 0.2)])
def test_cost_aware_is_near_the_best_gamma_of_a_batch(rows_, price):
    """Guesses of one row are cheap; those of 32 cost more than they bring."""

    def cost(guesses):
        return 1 + price * guesses

    alphas = [0.7] * rows_
    fixed = [simulate_batch(Fixed(gamma), alphas, cost) for gamma in range(1, 9)]
    best = max(*fixed, rows_ / (cost(0) * 1.025))
    assert simulate_batch(CostAware(8), alphas, cost) > 0.93 * best


def test_rows_that_fail_guess_less_than_rows_that_pass():
    alphas = [0.9, 0.9, 0.1, 0.1] * 2

    def cost(guesses):
        return 1 + 0.05 * guesses

    rule = CostAware(8)
    ours = simulate_batch(rule, alphas, cost)
    gammas = rule.gammas()
    assert min(gammas[0::4] + gammas[1::4]) > max(gammas[2::4] + gammas[3::4])
    assert ours > 1.05 * max(simulate_batch(Fixed(gamma), alphas, cost) for gamma in range(1, 9))


def test_a_smaller_batch_begins_with_what_a_larger_one_learnt():
    rule = CostAware(8)
    simulate_batch(rule, [0.9] * 8, lambda guesses: 1 + 0.01 * guesses)
    assert rule.search_for(4).best == rule.searches[8].best == rule.search_for(4).opening[0]


def test_a_larger_batch_finds_its_own_length():
    """What pays for 8 rows costs more than it brings for 32."""
    rule = CostAware(8)
    simulate_batch(rule, [0.7] * 8, lambda guesses: 1 + 0.05 * guesses)
    assert rule.search.best.size > 0
    plain = 32 / 1.025
    assert simulate_batch(rule, [0.7] * 32, lambda guesses: 1 + 0.05 * guesses) > 0.93 * plain
    assert rule.search.best.size == 0


def test_a_length_that_was_slow_once_is_tried_again():
    """As when a graph was made in its first rounds."""
    rule = CostAware(4)
    rule.begin(rows(1))
    costs = rule.search_for(1).costs
    for chain in rule.shapes:
        for _ in range(2):
            costs.learn(chain, 100.0 if chain.size == 2 else 1.0 + 0.3 * chain.size)
    one, two = Tree.chain(1), Tree.chain(2)
    assert costs.seconds(two) > 2.5
    simulate(rule, 0.62, 0.3, 1.0)
    assert costs.seconds(two) == pytest.approx(costs.seconds(one) * 1.6 / 1.3, rel=0.2)


def test_a_length_that_is_far_too_long_is_never_tried():
    rule, tried = CostAware(500), set()
    rule.begin(rows(1))
    for _ in range(1000):
        length = rule.gammas()[0]
        tried.add(length)
        rule.learn({0: length}, {0: 0}, {})
    assert 0 in tried and max(tried) <= 10


def test_what_makes_no_sense_is_refused():
    for rule in Fixed, Additive, DraftConfidence, TargetConfidence, CostAware:
        with refused("gamma must be 1 or more"):
            rule(0)
    for rule in DraftConfidence, TargetConfidence:
        for threshold in -0.1, 1.1, float("nan"):
            with refused("threshold", "[0, 1]"):
                rule(4, threshold)
