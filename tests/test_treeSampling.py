"""Speculative sampling with trees of guesses: greedy equality, distributions, planted mistakes, ragged rows."""

from dataclasses import replace

import helpers
import pytest
import torch
from conftest import refused
from helpers import DRAWS
from test_specSampling import FREE, PROMPTS, near

from decoding import tree as trees
from decoding.drafter import Fixed
from decoding.lengthRules import Additive
from decoding.rows import Rows
from decoding.tree import Places, Tree
from decoding.treeRules import TREE_RULES, synthetic_tree, traversal_rule
from methods import treeSampling as loop
from methods.drafters import ModelDrafter
from methods.treeSampling import ON_CHAINS, TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling


@pytest.fixture(scope="module")
def pair():
    target = helpers.tiny(seed=0)
    return target, near(target)


def written(pair, shape="3,2,1", max_len=40, sampling=GREEDY, **options):
    """Texts and records of `PROMPTS`. pair: target and draft."""
    shape = Tree.of(shape) if isinstance(shape, str) else shape
    return treeSampling(PROMPTS, pair[0], TreeDrafter(pair[1]), max_len, shape, sampling, **options)


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_greedy_rows_equal_plain_greedy(family):
    target = helpers.tiny(family)
    plain, _ = regrSampling(PROMPTS, target, 24, GREEDY)
    for rule in TREE_RULES.values():
        texts, records = written((target, near(target)), "3/2,1,0/1,2,0", 24, verify=rule)
        assert texts == plain and {0, 3} <= {accepted for record in records for accepted in record.accepted[1:]}


@pytest.mark.parametrize("shape", ["1", "2", "3,2", "2/2,1/1,0,1", "1,1,1"])
def test_greedy_rows_equal_plain_greedy_for_every_shape_and_with_a_repetition_penalty(pair, shape):
    for sampling in (GREEDY, Sampling(0.0, 0, 1.0, 1.3)):
        texts, records = written(pair, shape, 24, sampling)
        assert texts == regrSampling(PROMPTS, pair[0], 24, sampling)[0]
    assert len({accepted for record in records for accepted in record.accepted[1:]}) > 1


def p_value(shape="2,1", rule=traversal_rule, sampling=FREE, draws=DRAWS // 2):
    """The chi-square p-value of texts of a few rounds, each drawn in a row of its own; the rows are ragged."""
    # Unlike but not opposed: trees are accepted to all depths.
    target = helpers.tiny(vocabulary=4, layers=1, sharpness=2.0)
    prefixes, options = [[1, 2, 0, 1, 2], [1]], {"verify": rule, "generator": torch.Generator().manual_seed(0)}
    shape, drafter = Tree.of(shape) if isinstance(shape, str) else shape, TreeDrafter(near(target, noise=0.5))
    texts, _ = treeSampling(prefixes * (draws // 2), target, drafter, 4, shape, sampling, **options)
    return min(
        helpers.chi_square(texts[row::2], helpers.joint_distribution(target, prefix, 4, sampling), target.vocabulary)
        for row, prefix in enumerate(prefixes)
    )


@pytest.mark.parametrize(
    "rule,shape,sampling",
    [
        ("traversal", "3,2", FREE),
        ("traversal", "2/2,1", Sampling(0.85, 0, 0.9)),
        ("traversal", "4,1", Sampling(1.5, 2, 1.0)),  # fewer tokens than siblings
        ("traversal", "2,1,1", Sampling(1.0, 0, 0.95, 1.5)),
        ("topDown", "2/2,1", FREE),
    ],
)
def test_texts_have_the_targets_distribution(rule, shape, sampling):
    assert p_value(shape, TREE_RULES[rule], sampling) > 1e-5


# Planted mistakes.


def scores(pair):
    """The target's scores of a tree of guesses, and those of each path read as a text of its own."""
    tree, rows = Tree.of("3,2"), Rows(PROMPTS, 8, pair, spare=9)
    drafter = TreeDrafter(pair[1])
    drafter.begin(rows)
    pair[0].first_token(rows, GREEDY)
    drafter.read_prompts(rows)
    places = Places.of(rows, tree)
    guesses = drafter.grow(rows, tree, places, FREE)
    block = torch.cat([rows.last(1)[0], guesses.drafts], 1)
    found = pair[0].forward(block, places.positions, places)
    paths = [[0, *tree.path(node)] for node in range(tree.size + 1)]
    alone = [
        [pair[0].score(torch.tensor([text[:-1] + block[row, path].tolist()]))[0, -1] for path in paths]
        for row, text in enumerate(rows.texts)
    ]
    return found, torch.stack([torch.stack(row) for row in alone])


def test_each_node_is_scored_as_if_its_path_were_the_text(pair):
    torch.testing.assert_close(*scores(pair), atol=1e-4, rtol=1e-4)


def test_an_ancestor_mask_with_a_sibling_in_it_is_caught(monkeypatch, pair):
    def with_siblings(tree, device, honest=trees.numbers.__wrapped__):
        depths, order, ancestors = honest(tree, device)
        elder = [1 << node - 1 if tree.ranks[node - 1] else 0 for node in range(1, tree.size + 1)]
        return depths, order, ancestors | torch.tensor([0, *elder])

    monkeypatch.setattr(trees, "numbers", with_siblings)
    found, alone = scores(pair)
    assert (found - alone).abs().max() > 0.1


@pytest.mark.parametrize("model", [0, 1])
def test_keys_moved_to_a_wrong_slot_are_caught(monkeypatch, pair, model):
    """The target's change its texts. The draft's do not: they only make its guesses worse."""

    def one_too_far(models, rows, tree, path, honest=loop.move_path):
        for which in models:
            honest([which], rows, tree, path if which is not pair[model] else path.roll(1, 1))

    plain, records = written(pair, max_len=60)
    monkeypatch.setattr(loop, "move_path", one_too_far)
    texts, worse = written(pair, max_len=60)
    assert (texts != plain) == (model == 0)
    assert model == 0 or sum(sum(r.accepted) for r in worse) < sum(sum(r.accepted) for r in records)


@pytest.mark.parametrize("rule", TREE_RULES.values())
def test_laws_that_are_not_those_of_the_draws_are_caught(monkeypatch, rule):
    """All siblings have the law of the first."""

    def grow(*given, honest=TreeDrafter.grow):
        guesses = honest(*given)
        first = [node - rank for node, rank in enumerate(guesses.tree.ranks)]
        return replace(guesses, q=guesses.q[:, first])

    monkeypatch.setattr(TreeDrafter, "grow", grow)
    assert p_value("3,1", rule, draws=10_000) < 1e-6


@pytest.mark.parametrize("rule, on_chains", ON_CHAINS.items())
def test_a_chain_takes_the_rounds_of_a_chain(pair, rule, on_chains):
    """The texts and the records are those of `specSampling`."""
    for gamma in (1, 3):
        generators = [torch.Generator().manual_seed(1) for _ in range(2)]
        texts, records = written(pair, Tree.chain(gamma), 20, FREE, generator=generators[0], verify=rule)
        wanted, theirs = specSampling(
            PROMPTS, pair[0], ModelDrafter(pair[1]), 20, gamma, FREE, generator=generators[1], verify=on_chains
        )
        assert texts == wanted and [r.accepted for r in records] == [r.accepted for r in theirs]


@pytest.mark.parametrize("rule", TREE_RULES.values())
def test_rounds_of_all_kinds_follow_one_another(pair, rule):
    """Plain decoding, chains and trees in turn."""
    shapes = Tree.chain(2), Tree.of("3,1"), Tree.chain(0), Tree.chain(0), Tree.chain(3), Tree.of("2/2,1")
    choice = helpers.InTurn(*shapes)
    texts, records = written(pair, choice, verify=rule)
    assert texts == regrSampling(PROMPTS, pair[0], 40, GREEDY)[0]
    for row, record in enumerate(records):
        told = [last.get(row, 0) for last in choice.last[: len(record.accepted) - 1]]
        assert [node > 0 for node in told] == [accepted > 0 for accepted in record.accepted[1:]]
    assert p_value(helpers.InTurn(*shapes), rule) > 1e-4


def test_rows_end_at_their_own_token_and_at_max_len(pair):
    plain, _ = regrSampling(PROMPTS, pair[0], 30, GREEDY)
    end = plain[0][7]
    for max_len in (1, 2, 3, 30):
        texts, records = written(pair, "3,2,1,1", max_len, end_of_text=end)
        assert texts == regrSampling(PROMPTS, pair[0], max_len, GREEDY, end_of_text=end)[0]
        assert [sum(r.committed) for r in records] == list(map(len, texts))


def test_a_full_context_leaves_no_room_for_positions_beyond_it():
    target = helpers.tiny(context=32)
    texts, _ = treeSampling([[1] * 12], target, TreeDrafter(near(target)), 20, Tree.of("3,2,1,1"), GREEDY)
    assert texts == regrSampling([[1] * 12], target, 20, GREEDY)[0]


@pytest.mark.parametrize("shape", [Additive(3), Fixed(Tree.chain(63))])
def test_a_rule_of_ones_own_needs_shapes_that_fit(shape):
    """Their slots are reserved, and a node's ancestors are the bits of a number."""
    verify, target = synthetic_tree(0.5, traversal_rule), helpers.tiny()
    with refused("verifies chains as trees: give the shapes, each of at most 62 guesses"):
        treeSampling(PROMPTS, target, TreeDrafter(near(target)), 40, shape, verify=verify)
