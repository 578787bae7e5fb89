"""What a GPU records, run again without one."""

import helpers
from test_specSampling import PROMPTS, near

from capturedForward import CapturedForward
from drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY


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
