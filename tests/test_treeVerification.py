"""The rules for trees: on a chain they are those of verification.py, and what they emit is distributed as the target's
own text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import at, joint, number, pairs, softmaxes

from decoding import treeRules as treeVerification
from decoding.tree import MOST, Tree
from decoding.treeRules import TREE_RULES, after_child, in_postorder, top_down_rule, traversal_rule
from decoding.verification import block_rule, token_rule
from lossless.mistakes import mass_not_updated, siblings_not_renormalised, unsure_node_dropped
from utils import pick


@pytest.mark.parametrize("rule, chain_rule", [(traversal_rule, block_rule), (top_down_rule, token_rule)])
def test_on_a_chain_it_is_the_rule_for_chains(rule, chain_rule):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2000, 6, 30, generator=generator).mul(1.5).softmax(-1)
    q = 0.2 * torch.randn(2000, 5, 30, generator=generator).softmax(-1) + 0.8 * p[:, :5]
    drafts = pick(q, torch.rand(q.shape[:-1], generator=generator))
    q[:300, 3:] = 0  # These rows have fewer guesses.
    u = torch.rand(2000, 6, generator=generator)
    accepted, path, token = rule(p, q, drafts, u, Tree.chain(5))
    wanted = chain_rule(p, q, drafts, u)
    assert torch.equal(accepted, wanted[0]) and torch.equal(token, wanted[1])
    order = torch.arange(1, 6)
    assert torch.equal(path, order * (order <= accepted[:, None]))


SHAPES = ("1", "3", "5", "1,1", "2,1", "1,3", "2,2", "3/2,1,0", "3/0,2,1", "1,1,1", "2,1,1", "1,2,1", "2/1,2/2,0,1")


def tokens_of(shape):
    """A vocabulary for a tree: in some, more siblings are wanted than there are tokens."""
    return {"3": 5, "5": 3, "2,1": 5, "1,3": 4, "3/0,2,1": 4}.get(shape, 3)


class Asked:
    """In the place of u: notes the chance that each node passes with."""

    def __getitem__(self, at):
        return self

    def __lt__(self, chance):
        self.chance = chance
        return torch.zeros_like(chance, dtype=torch.bool)


def all_drafts(p, q, tree):
    """Every way to draw the nodes of a tree: the drafts, the laws that they were drawn from, p after each node, and the
    probability, float64. p and q are trees of distributions as in outcomes.py."""
    vocabulary = p[0].shape[1]
    drafts, laws = torch.zeros(1, 0, dtype=torch.long), p[0].new_zeros(1, 0, vocabulary)
    weight = torch.ones(1, dtype=torch.float64)
    for node, parent in enumerate(tree.parents, 1):
        law = at(q, text_of(drafts, tree, parent))
        for child in tree.children[parent][: tree.ranks[node - 1]]:
            law = law.scatter(1, drafts[:, child - 1, None], 0)
            law = law * (laws[:, child - 1].sum(1, keepdim=True) > 0)
        if parent:
            law = law * (laws[:, parent - 1].sum(1, keepdim=True) > 0)
        law = law / law.sum(1, keepdim=True).clamp(min=1e-30)
        chance = law.double() / law.double().sum(1, keepdim=True)
        chance = torch.where(chance.isnan(), torch.eye(vocabulary, dtype=torch.float64)[node % vocabulary], chance)
        rows, token = (weight[:, None] * chance).nonzero().unbind(1)
        weight = weight[rows] * chance[rows, token]
        drafts, laws = torch.cat([drafts[rows], token[:, None]], 1), torch.cat([laws[rows], law[rows, None]], 1)
    after = [at(p, text_of(drafts, tree, node)) for node in range(tree.size + 1)]
    return drafts, laws, torch.stack(after, 1), weight


def text_of(drafts, tree, node):
    """The tokens of the path to a node, `[B, its depth]`."""
    return drafts[:, [other - 1 for other in range(1, node + 1) if tree.ancestors[node] >> other & 1]]


def decisions(rule, tree, last):
    """{node: whether it passes} that make `last` the end of the accepted path; no other node matters."""
    if rule is not top_down_rule:
        order = list(in_postorder(tree))
        return {node: node == last for node in order[: order.index(last) + 1] if node}
    needed = dict.fromkeys(tree.children[last], False)
    for node in range(1, last + 1):
        if tree.ancestors[last] >> node & 1:
            siblings = tree.children[tree.parents[node - 1]]
            needed |= dict.fromkeys(siblings[: siblings.index(node)], False) | {node: True}
    return needed


def round_of(rule, p, q, tree):
    """What `rule` makes of all drafts: the distribution of the first depth + 1 tokens, float64, of which p itself adds
    what the round leaves open, and the mean number of accepted guesses.

    For each node, the uniform numbers are set so that the accepted path must end there. Those that cannot matter are 0
    in one call of the rule and nearly 1 in another."""
    drafts, laws, after, weight = all_drafts(p, q, tree)
    vocabulary, mean, emitted, asked, picked = p[0].shape[1], 0.0, 0.0, Asked(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(treeVerification, "pick", lambda left, u: picked.append(left))
        rule(after, laws, drafts, asked, tree)
        chance = asked.chance.clamp(0, 1)
        for last in range(tree.size + 1):
            reached, needed = weight, decisions(rule, tree, last)
            both = [after.new_full((len(drafts), tree.size + 1), free) for free in (0, 1 - 2**-24)]
            for node, passes in needed.items():
                its = chance[:, node - 1]
                reached = reached * (its if passes else 1 - its).double()
                for u in both:
                    u[:, node - 1] = its / 2 if passes else (1 + its) / 2
            rows = reached > 0
            results = [rule(after[rows], laws[rows], drafts[rows], u[rows], tree)[:2] for u in both]
            for accepted, path in results:
                assert (accepted == tree.depths[last]).all()
                assert not last or (path.amax(1) == last).all()
            left = picked[-1].double() * (reached[rows] / picked[-1].double().sum(1))[:, None]
            share = torch.zeros(vocabulary ** tree.depths[last], vocabulary, dtype=torch.float64)
            share.index_add_(0, number(text_of(drafts[rows], tree, last), vocabulary), left)
            emitted = emitted + joint(p, share.flatten())
            mean += tree.depths[last] * reached.sum().item()
    return emitted, mean


def variation(rule, p, q, tree):
    """The total variation between what is emitted and the target's own text."""
    return (round_of(rule, p, q, tree)[0] - joint(p)).abs().sum().item() / 2


def filtered(levels, seed):
    """Distributions with zeros: a third of the tokens, but not all of any."""
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for level in levels:
        level = level * (torch.rand(level.shape, generator=generator) > 1 / 3)
        level[:, seed % level.shape[1]] += level.sum(1) == 0
        kept.append(level / level.sum(1, keepdim=True))
    return kept


def pair(shape, seed, filters):
    """p and q for a tree, in float64. filters: whether each has zeros."""
    tree = Tree.of(shape)
    both = [[level.double() for level in levels] for levels in softmaxes(tokens_of(shape), tree.depth, seed)]
    both = [[level / level.sum(1, keepdim=True) for level in levels] for levels in both]
    return *(filtered(levels, seed + i) if on else levels for i, (levels, on) in enumerate(zip(both, filters))), tree


@pytest.mark.parametrize("shape", SHAPES)
def test_the_targets_own_text_is_emitted_and_traversal_accepts_at_least_as_many_as_top_down(shape):
    gained = 0.0
    for seed, filters in enumerate([(False, False), (True, False), (False, True), (True, True)]):
        p, q, tree = pair(shape, seed, filters)
        (text, more), (other, fewer) = (round_of(rule, p, q, tree) for rule in (traversal_rule, top_down_rule))
        for each in text, other:
            assert (each - joint(p)).abs().sum() / 2 < 1e-12
        assert more > fewer - 1e-9
        gained += more - fewer
        if filters[0] == filters[1]:
            p, q = ([level.float() for level in levels] for levels in (p, q))
            assert max(variation(rule, p, q, tree) for rule in TREE_RULES.values()) < 1e-6
    assert gained > 1e-3 or tree.depth == 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(pairs(vocabularies=(2, 3), gammas=(2, 2)), st.sampled_from(("2,1", "2,2", "3/0,2,1", "1,3")))
def test_extreme_distributions(trees, shape):
    """Very unequal probabilities, q nearly p or what p excludes, and rows without some of the nodes."""
    tree = Tree.of(shape)
    for rule in TREE_RULES.values():
        assert variation(rule, *trees, tree) < 1e-6


RULE_MISTAKES = siblings_not_renormalised, unsure_node_dropped, mass_not_updated


@pytest.mark.parametrize("rule", [*RULE_MISTAKES, *TREE_RULES.values()])
def test_a_planted_mistake_is_caught(rule, monkeypatch):
    """A wrong rule; or masses that stay as they were, in a right one."""
    if rule in TREE_RULES.values():
        stay = lambda mass, w, law, x: (after_child(mass, w, law, x)[0], mass, w)  # noqa: E731
        monkeypatch.setattr(treeVerification, "after_child", stay)
    assert variation(rule, *pair("2,2", 0, (False, False))) > 1e-3


@pytest.mark.parametrize("rule", TREE_RULES.values())
def test_the_largest_tree(rule):
    tree = Tree.chain(MOST)
    p = torch.full((1, MOST + 1, 3), 1 / 3)
    drafts = torch.zeros(1, MOST, dtype=torch.long)
    accepted, path, _ = rule(p, p[:, :MOST], drafts, torch.full((1, MOST + 1), 0.5), tree)
    assert accepted.item() == MOST and path[0].tolist() == list(range(1, MOST + 1))
