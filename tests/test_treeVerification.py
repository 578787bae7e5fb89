"""The rules for trees: on a chain they are those of verification.py, and what they emit is distributed as the target's
own text."""

import pytest
import torch

from decoding.trees import Tree
from decoding.treeVerification import TREE_RULES, top_down_rule, traversal_rule
from decoding.verification import block_rule, token_rule
from utils import draw


@pytest.mark.parametrize("rule, chain_rule", [(traversal_rule, block_rule), (top_down_rule, token_rule)])
def test_on_a_chain_it_is_the_rule_for_chains(rule, chain_rule):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(2000, 6, 30, generator=generator).mul(1.5).softmax(-1)
    q = 0.2 * torch.randn(2000, 5, 30, generator=generator).softmax(-1) + 0.8 * p[:, :5]
    drafts = draw(q, generator)
    q[:300, 3:] = 0  # These rows have fewer guesses.
    u = torch.rand(2000, 6, generator=generator)
    accepted, path, token = rule(p, q, drafts, u, Tree.chain(5))
    wanted = chain_rule(p, q, drafts, u)
    assert torch.equal(accepted, wanted[0]) and torch.equal(token, wanted[1])
    order = torch.arange(1, 6)
    assert torch.equal(path, order * (order <= accepted[:, None]))


@pytest.mark.parametrize("rule", TREE_RULES.values())
def test_from_nan_comes_no_token(rule):
    """If p is nan where the path ends, the token is V. A guess from a q of nan is not accepted."""
    tree = Tree.of("2/1,1")
    p, q = torch.full((3, 5, 4), 0.25), torch.full((3, 4, 4), 0.25)
    drafts = torch.tensor([0, 1, 2, 3]).expand(3, 4)
    p[0], p[1, 1], q[2, 0] = torch.nan, torch.nan, torch.nan
    accepted, path, token = rule(p, q, drafts, torch.full((3, 5), 0.5), tree)
    assert accepted.tolist() == [0, 1, 2] and path.tolist() == [[0, 0], [1, 0], [2, 4]]
    assert token.tolist()[:2] == [4, 4] and token[2] < 4
