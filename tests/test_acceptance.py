"""The overlaps of p and q that texts visit, against those of a verification that is watched, and by hand."""

import itertools
from functools import partial

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near

from decoding.drafter import Guesses
from decoding.lengthRules import DraftConfidence
from decoding.record import Record
from decoding.tree import Tree
from decoding.treeRules import TREE_RULES
from decoding.verification import token_rule
from experiments import sweep, theory
from experiments.acceptance import OverlapObserver, acceptance_of, chances, expected, overlaps_of
from experiments.sweep import sampler
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.samplers import Decoding, chains, trees
from methods.treeSampling import TreeDrafter, treeSampling
from specSampling import specSampling
from utils import Sampling, residual

DRAW = Sampling(1.0, 0, 1.0)


def test_rounds_have_the_overlaps_of_their_contexts():
    """Of three guesses the first was accepted and the second not; the next round had none. In the last the text ended
    at the first of three accepted guesses."""
    p, q = torch.rand(4, 61).softmax(-1), torch.rand(3, 61).softmax(-1)
    record, observer = Record([0.1] * 4, [1, 2, 1, 1], [0, 3, 0, 1], [0, 1, 0, 1]), OverlapObserver()
    for count, last in (3, 1), (0, 0), (3, 3):
        guesses = Guesses(torch.tensor([[3, 5, 5]])[:, :count], q[None, :count])
        observer(None, guesses, p[None, : count + 1], torch.tensor([last]))
    found = observer.positions(record)
    overlaps = theory.overlap(p[:3], q)
    assert [position[:2] for position in found] == [(3, 2), (2, 1)]
    assert [position[2] for position in found] == pytest.approx([2 * overlaps[0].item(), overlaps[1].item()])
    assert expected(found) == {
        "overlap": pytest.approx((2 * overlaps[0] + overlaps[1]).item() / 3),
        "tokens": pytest.approx((1 + 2 * overlaps[0] / 3 * (1 + overlaps[1] / 2)).item()),
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
    found = overlaps_of(sampler(target, draft, 4, token_rule), PROMPTS, "cpu", DRAW, 40, None, 0)
    watched = watched_alpha(PROMPTS, target, draft, 40)
    assert expected(found.positions)["overlap"] == pytest.approx(watched, abs=1e-5)
    in_sweep = sweep.costs(PROMPTS, target, draft, DRAW, token_rule, 40, 0, "cpu")
    assert in_sweep["alpha"] == pytest.approx(watched, abs=1e-5) and len(in_sweep["overlap_by_position"]) == 10


@pytest.mark.parametrize("name", ["model", "unsure", "lookup", "both"])
def test_tokens_a_round_are_those_expected(name):
    target = helpers.tiny(vocabulary=12, sharpness=2.0)
    draft, lookup = ModelDrafter(near(target, noise=0.3)), LookupDrafter(12, worth=0)
    drafter = {"lookup": lookup, "both": LookupFirst(LookupDrafter(12, 2, worth=0), draft)}.get(name, draft)
    length = DraftConfidence(4, 0.4) if name == "unsure" else sweep.Fixed(4)
    prompts = [[token % 12 for token in prompt] for prompt in PROMPTS]
    method = partial(specSampling, target=target, drafter=drafter, gamma=length)
    found = overlaps_of(method, prompts, "cpu", DRAW, 60, None, 0)
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
    drafter = TreeDrafter(draft)
    choice = Tree.of(shape) if shape else helpers.InTurn(*map(Tree.of, ("1,1", "3,1")))
    method = partial(treeSampling, target=target, drafter=drafter, tree=choice, verify=TREE_RULES[rule])
    found = overlaps_of(method, prompts * 8, "cpu", DRAW, 40, None, 0)
    ratio = (1 + found.accepted / found.rounds) / expected(found.positions)["tokens"]
    assert ratio == pytest.approx(1, abs=0.05) if rule == "topDown" else 1 < ratio < 1.3
    if shape:
        forecast = Tree.of(shape).expected_tokens(acceptance_of(found.positions).table(3, 3))
        assert forecast == pytest.approx(expected(found.positions)["tokens"], rel=0.1)


def test_a_chain_has_the_same_overlaps_whether_it_is_called_a_tree_or_not():
    target = helpers.tiny()
    models = {"target": target, "draft": near(target, noise=0.3)}
    found = [
        overlaps_of(method, PROMPTS, "cpu", DRAW, 30, None, 0)
        for method in (
            chains(models, Decoding(gamma=3), "fixed", "block"),
            trees(models, Decoding(tree="1,1,1"), "traversal"),
        )
    ]
    assert found[0] == found[1] and len(found[0].positions) == 3


def test_nothing_guessed_is_expected_to_be_unknown():
    target = helpers.tiny()
    found = overlaps_of(sampler(target, ModelDrafter(target), 4, token_rule), [[5]], "cpu", DRAW, 2, None, 0)
    assert found == ([], 1, 0) and all(value != value for value in expected(found.positions).values())
