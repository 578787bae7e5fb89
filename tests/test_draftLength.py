"""What each rule chooses, from what it is told."""

import math
import random

import helpers
import pytest
import torch
from conftest import refused
from test_specSampling import PROMPTS, near

from decoding.draftLength import Fixed
from decoding.lengthRules import Additive, CostAware, DraftConfidence, TargetConfidence
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import Sampling


def tell(rule, drafted, accepted, p_token=()):
    sure = rule.sure(torch.tensor(p_token)).tolist() if p_token else []
    rule.learn(dict(enumerate(drafted)), dict(enumerate(accepted)), dict(enumerate(sure)), lambda: (0.5, 0.5))


def test_additive_grows_by_one_and_halves_row_by_row():
    rule = Additive(4)
    rule.begin(2)
    assert rule.gammas() == [4, 4]
    for _ in range(5):
        tell(rule, rule.gammas(), [rule.gammas()[0], 0])
    assert rule.gammas() == [9, 4]
    tell(rule, [9, 4], [8, 4])
    assert rule.gammas() == [4, 5]
    rule.begin(1)
    assert rule.gammas() == [4]


def test_target_confidence_guesses_again_once_the_target_is_sure():
    rule = TargetConfidence(3, 0.5)
    rule.begin(2)
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


def simulate(rule, alpha, price, cost, tokens=4000, seed=0, drift=0.5):
    """Tokens per second of a rule in a world where guesses pass with `alpha`, a round costs 1 + price * gamma, one
    without guesses `cost`, the clock is noisy, and the machine now faster, now slower."""
    rng = random.Random(seed)
    rule.begin(1)
    made, seconds = 0, 0.0
    while made < tokens:
        gamma = rule.gammas()[0]
        accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
        drafting, scoring = price * gamma, 1.0 if gamma else cost
        made, seconds = made + accepted + 1, seconds + drafting + scoring
        noise = [
            (1 + drift * math.sin(made / 200)) * rng.uniform(0.95, 1.1) * (20 if rng.random() < 0.003 else 1)
            for _ in range(2)
        ]
        rule.learn({0: gamma}, {0: accepted}, {}, lambda: (drafting * noise[0], scoring * noise[1]))
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
    before = rule.best
    simulate(rule, 0.1, 0.3, 1.0)
    assert before > 4 and rule.best <= 1


def test_what_makes_no_sense_is_refused():
    for rule in Fixed, Additive, DraftConfidence, TargetConfidence, CostAware:
        with refused("gamma must be 1 or more"):
            rule(0)
    for rule in DraftConfidence, TargetConfidence:
        for threshold in -0.1, 1.1, float("nan"):
            with refused("threshold", "[0, 1]"):
                rule(4, threshold)
