"""The overlaps of p and q that texts visit, against those of a verification that is watched, and by hand."""

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near

from decoding.lengthRules import DraftConfidence
from decoding.record import Record
from decoding.verification import token_rule
from experiments import sweep, theory
from experiments.acceptance import expected, overlap_by_position, visited
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.makers import loop
from specSampling import specSampling
from utils import Sampling, probabilities

DRAW = Sampling(1.0, 0, 1.0)


def test_one_round_has_the_overlaps_of_its_contexts():
    """Of three guesses the first was accepted and the second not; the next round had none."""
    target, q = helpers.tiny(), torch.rand(3, 61).softmax(-1)
    record = Record([0.1, 0.2, 0.3], [1, 2, 1], [0, 3, 0], [0, 1, 0])
    text, sampling = [7, 3, 9, 4], Sampling(0.8, 0, 0.9, 1.2)
    found = visited([5, 9], text, record, [q, q[:0]], target, sampling)
    overlaps = []
    for i, known in enumerate(([5, 9, 7], [5, 9, 7, 3])):
        seen = torch.zeros(1, 61, dtype=torch.bool).scatter(1, torch.tensor([known]), True)
        p = probabilities(target.score(torch.tensor([known]))[:, -1], sampling, seen)[0]
        overlaps.append(theory.overlap(p, q[i]).item())
    assert [position[:2] for position in found] == [(2, 1), (1, 1)]
    assert [position[2] for position in found] == pytest.approx(overlaps, abs=1e-5)
    assert expected(found) == {
        "overlap": pytest.approx(sum(overlaps) / 2, abs=1e-5),
        "tokens": pytest.approx(1 + overlaps[0] / 2 * (1 + overlaps[1]), abs=1e-5),
    }


def watched_alpha(prompts, target, drafter, max_len):
    """The mean overlap of p and q in the contexts of tested guesses, seen by a verification rule."""
    found = []

    def watched(p, q, drafts, u):
        accepted, token = token_rule(p, q, drafts, u)
        found.extend(theory.overlap(p[0, : q.shape[1]], q[0])[: int(accepted[0]) + 1].tolist())
        return accepted, token

    watched.waits = True  # int() synchronises with the host.
    for number, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(number)
        specSampling([prompt], target, drafter, max_len, 4, DRAW, generator=generator, verify=watched)
    return sum(found) / len(found)


def test_overlaps_are_those_that_verification_meets():
    target = helpers.tiny()
    draft = ModelDrafter(near(target, noise=0.3))
    found = overlap_by_position(
        lambda wrap: loop(target, wrap(draft), sweep.Fixed(4), token_rule), PROMPTS, target, DRAW, 40, None, 0
    )
    watched = watched_alpha(PROMPTS, target, draft, 40)
    assert expected(found)["overlap"] == pytest.approx(watched, abs=1e-5)
    assert sweep.overlap_alpha(PROMPTS, target, draft, DRAW, token_rule, 40, 0) == pytest.approx(watched, abs=1e-5)


@pytest.mark.parametrize("name", ["model", "unsure", "lookup", "both"])
def test_tokens_a_round_are_those_expected(name):
    target = helpers.tiny(vocabulary=12, sharpness=2.0)
    draft, lookup = ModelDrafter(near(target, noise=0.3)), LookupDrafter(12, 1)
    drafter = {"lookup": lookup, "both": LookupFirst(LookupDrafter(12, 2), draft)}.get(name, draft)
    length = DraftConfidence(4, 0.4) if name == "unsure" else sweep.Fixed(4)
    prompts = [[token % 12 for token in prompt] for prompt in PROMPTS]
    found = overlap_by_position(
        lambda wrap: loop(target, wrap(drafter), length, token_rule), prompts, target, DRAW, 60, None, 0
    )
    _, records = specSampling(
        prompts * 15, target, drafter, 60, length, DRAW, generator=torch.Generator().manual_seed(1)
    )
    rounds = sum(len(record.times) - 1 for record in records)
    measured = 1 + sum(sum(record.accepted) for record in records) / rounds
    assert expected(found)["tokens"] == pytest.approx(measured, rel=0.1) and measured > 1.1


def test_nothing_guessed_is_expected_to_be_unknown():
    target = helpers.tiny()
    found = overlap_by_position(
        lambda wrap: loop(target, wrap(ModelDrafter(target)), sweep.Fixed(4), token_rule),
        [[5]],
        target,
        DRAW,
        2,
        None,
        0,
    )
    assert found == [] and all(value != value for value in expected(found).values())
