"""Trees of guesses in graphs compiled on a CPU: the same texts as eager models write."""

import helpers
import pytest
import torch
from engine.graphs import Plan
from test_specSampling import PROMPTS, near

from decoding.trees.tree import Tree
from decoding.trees.verification import TREE_RULES
from engine.compiling import compile_model
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from utils import GREEDY, Sampling

TREE = Tree.of("3/2,1,0/1,2,0")


@pytest.fixture(scope="module")
def compiled(kernels):
    """A target and a draft with graphs for one shape of tree."""
    target = helpers.tiny(seed=0, layers=1)
    draft = near(target)
    compile_model(target, Plan(nodes=frozenset({TREE.size + 1}), prefill=False), len(PROMPTS))
    compile_model(draft, Plan(trees=frozenset({TREE}), read=2, prefill=False), len(PROMPTS))
    return target, draft


@pytest.mark.parametrize("rule", TREE_RULES)
def test_texts_are_those_of_eager_models(compiled, rule):
    target, eager = compiled[0], helpers.tiny(seed=0, layers=1)
    for sampling in (GREEDY, Sampling(0.85, 0, 0.9), Sampling(1.0, 5, 1.0, 1.3)):
        made = []
        for pair in (compiled, (eager, near(eager))):
            before = target.graphs.used
            generator = torch.Generator().manual_seed(3)
            given = PROMPTS, pair[0], TreeDrafter(pair[1]), 40, TREE, sampling, None, generator, None, TREE_RULES[rule]
            made.append(treeSampling(*given)[0])
            uses = target.graphs.used > before + 3
            assert uses == (pair is compiled)
        assert made[0] == made[1]
    plain, _ = regrSampling(PROMPTS, eager, 40, GREEDY)
    assert treeSampling(PROMPTS, target, TreeDrafter(compiled[1]), 40, TREE, GREEDY)[0] == plain
