"""What a GPU records, run again without one."""

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near

from capturedForward import CapturedForward
from drafters import ModelDrafter
from regrSampling import regrSampling
from runs import run
from specSampling import specSampling
from utils import GREEDY, Sampling


def test_recorded_forwards_are_the_same_without_a_gpu():
    """The steps of a recording, copied inputs and filled-up blocks, run again where a GPU would replay them."""
    eager, target, draft = helpers.tiny(), helpers.tiny(), near(helpers.tiny(), noise=0.1)
    for model, widths, runs in ((target, (1, 5), [(1, 1)]), (draft, (2,), [(2, 4)])):
        model._graphs, model._reads_filled = CapturedForward(model.model, model.vocabulary), False
        for width in widths:
            model._graphs.add(1, width)
        for width, count in runs:
            model._graphs.add_run(1, width, count)
    for prompt in PROMPTS:
        wanted = regrSampling([prompt], eager, 40, GREEDY)[0]
        assert specSampling([prompt], target, ModelDrafter(draft), 40, 4, GREEDY)[0] == wanted
        assert regrSampling([prompt], target, 40, GREEDY)[0] == wanted
    assert target._graphs.used > 100 and set(target._graphs._recordings) == {(1, 1), (1, 5), (1, 1, 1, GREEDY)}
    assert set(draft._graphs._recordings) == {(1, 2, 4, GREEDY)}


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 2, 4), (3, 5)])
@pytest.mark.parametrize("block", [1, 2])
def test_a_run_by_graphs_of_any_lengths_is_the_run_step_by_step(counts, block):
    """Longer ones are cut into those there are, the last one is cut short; a block too narrow is filled up."""
    eager, model = helpers.tiny(), helpers.tiny()
    model._graphs, model._reads_filled = CapturedForward(model.model, model.vocabulary), False
    for count in counts:
        model._graphs.add_run(2, 2, count)
    prompts = torch.tensor([[5, 9, 2, 11], [7, 7, 30, 1]])
    for wanted in range(1, 8):
        found = []
        for each in eager, model:
            each.reserve(2, 20)
            each.forward(prompts, torch.arange(4).expand(2, 4))
            positions = torch.arange(4 - block, 3 + wanted).expand(2, -1)
            generator = torch.Generator().manual_seed(wanted)
            found.append(run(each, prompts[:, -block:], positions, wanted, Sampling(0.9, 40, 0.95), generator))
        assert torch.equal(found[0][0], found[1][0]) and found[1][0].shape == (2, wanted)
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-4)
    assert model._graphs.used >= 7
