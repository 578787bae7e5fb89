"""The overlaps of p and q that texts visit, against those of a verification that is watched, and by hand."""

import itertools
from functools import partial

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near

from decoding.lengthRules import DraftConfidence
from decoding.record import Record
from decoding.trees.rules import TREE_RULES
from decoding.trees.shapes import expected as tokens_of
from decoding.trees.tree import Tree
from decoding.verification import token_rule
from experiments import sweep, theory
from experiments.acceptance import RoundGuesses, acceptance_of, chances, expected, overlaps_in_text, overlaps_of
from experiments.sweep import sampler
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.samplers import Decoding, speculative, tree
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling
from utils import Sampling, probabilities, residual

DRAW = Sampling(1.0, 0, 1.0)


def test_one_round_has_the_overlaps_of_its_contexts():
    """Of three guesses the first was accepted and the second not; the next round had none."""
    target, q = helpers.tiny(), torch.rand(3, 61).softmax(-1)
    record = Record([0.1, 0.2, 0.3], [1, 2, 1], [0, 3, 0], [0, 1, 0])
    text, sampling = [7, 3, 9, 4], Sampling(0.8, 0, 0.9, 1.2)
    guesses = RoundGuesses(torch.tensor([3, 5, 5]), q, [(1,), (2,), (3,), ()])
    found = overlaps_in_text(
        [5, 9], text, record, [guesses, RoundGuesses(guesses.drafts[:0], q[:0], [()])], target, sampling
    )
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
    found = overlaps_of(lambda wrap: sampler(target, wrap(draft), 4, token_rule), PROMPTS, target, DRAW, 40, None, 0)
    watched = watched_alpha(PROMPTS, target, draft, 40)
    assert expected(found.positions)["overlap"] == pytest.approx(watched, abs=1e-5)
    in_sweep = sweep.overlaps(4, PROMPTS, target, draft, DRAW, token_rule, 40, 0)
    assert expected(in_sweep)["overlap"] == pytest.approx(watched, abs=1e-5)


@pytest.mark.parametrize("name", ["model", "unsure", "lookup", "both"])
def test_tokens_a_round_are_those_expected(name):
    target = helpers.tiny(vocabulary=12, sharpness=2.0)
    draft, lookup = ModelDrafter(near(target, noise=0.3)), LookupDrafter(12, worth=0)
    drafter = {"lookup": lookup, "both": LookupFirst(LookupDrafter(12, 2, worth=0), draft)}.get(name, draft)
    length = DraftConfidence(4, 0.4) if name == "unsure" else sweep.Fixed(4)
    prompts = [[token % 12 for token in prompt] for prompt in PROMPTS]
    found = overlaps_of(
        lambda wrap: partial(specSampling, target=target, drafter=wrap(drafter), gamma=length),
        prompts,
        target,
        DRAW,
        60,
        None,
        0,
    )
    _, records = specSampling(
        prompts * 15, target, drafter, 60, length, DRAW, generator=torch.Generator().manual_seed(1)
    )
    rounds = sum(len(record.times) - 1 for record in records)
    measured = 1 + sum(sum(record.accepted) for record in records) / rounds
    assert expected(found.positions)["tokens"] == pytest.approx(measured, rel=0.1) and measured > 1.1


def test_the_share_of_each_sibling_is_what_it_adds_on_average():
    """Against the verification of every pair of siblings that may be drawn."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5, 0.3, 0.2, 0.0])
    found, wanted = torch.zeros(2), torch.zeros(2)
    for x, y in itertools.permutations(range(3), 2):
        second = q.clone()
        second[x] = 0
        second /= second.sum()
        first = (p[x] / q[x]).clamp(max=1)
        left = residual(p, q)
        drawn = q[x] * second[y]
        wanted += drawn * torch.stack([first, (1 - first) * (left[y] / second[y]).clamp(max=1)])
        found += drawn * torch.tensor(chances(p, torch.stack([q, second]), torch.tensor([x, y])))
    torch.testing.assert_close(found, wanted)
    assert found[0] == pytest.approx(float(theory.overlap(p, q)))


@pytest.mark.parametrize(
    "rule, shape",
    [("topDown", "3,2,1"), ("topDown", None), ("traversal", "3,2,1"), *[("topDown", "2/2,1")] * helpers.FULL],
)
def test_tokens_a_round_with_trees_are_those_expected(rule, shape):
    """The traversal rule accepts more: it judges whole paths."""
    target = helpers.tiny(vocabulary=12, sharpness=2.0)
    draft = near(target, noise=0.3)
    prompts = [[token % 12 for token in prompt] for prompt in PROMPTS]

    def make(wrap):
        drafter, choice = (
            wrap(TreeDrafter(draft)),
            Tree.of(shape) if shape else helpers.InTurn(*map(Tree.of, ("1,1", "3,1"))),
        )
        return partial(treeSampling, target=target, drafter=drafter, tree=choice, verify=TREE_RULES[rule])

    found = overlaps_of(make, prompts * 8, target, DRAW, 40, None, 0)
    ratio = (1 + found.accepted / found.rounds) / expected(found.positions)["tokens"]
    assert ratio == pytest.approx(1, abs=0.05) if rule == "topDown" else 1 < ratio < 1.3
    if shape:
        forecast = tokens_of(Tree.of(shape), acceptance_of(found.positions).table(3, 3))
        assert forecast == pytest.approx(expected(found.positions)["tokens"], rel=0.1)


def test_a_chain_has_the_same_overlaps_whether_it_is_called_a_tree_or_not():
    target = helpers.tiny()
    models = {"target": target, "draft": near(target, noise=0.3)}
    found = [
        overlaps_of(lambda wrap: make(models, decoding, wrap), PROMPTS, target, DRAW, 30, None, 0)  # noqa: B023
        for make, decoding in (
            (speculative("fixed", "block"), Decoding(gamma=3)),
            (tree("traversal"), Decoding(tree="1,1,1")),
        )
    ]
    assert found[0] == found[1] and len(found[0].positions) == 3


def test_nothing_guessed_is_expected_to_be_unknown():
    target = helpers.tiny()
    found = overlaps_of(
        lambda wrap: sampler(target, wrap(ModelDrafter(target)), 4, token_rule), [[5]], target, DRAW, 2, None, 0
    )
    assert found == ([], 1, 0) and all(value != value for value in expected(found.positions).values())
