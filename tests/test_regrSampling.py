"""The baseline. That its tokens are `transformers`' own is in test_specSampling.py, beside the speculative ones."""

import helpers
import pytest
import torch
from outcomes import largest_error, small

from regrSampling import regrSampling
from utils import Sampling, UserError


def test_logits_that_are_not_finite_are_refused():
    broken = helpers.tiny()
    with torch.no_grad():
        broken.model.lm_head.weight[3] = float("inf")
    with pytest.raises(UserError, match="gpt_neox-0 gives logits that are not finite in float32"):
        regrSampling([[1, 2]], broken, 4)


def test_texts_have_the_models_probabilities():
    (target,), sampling = small(1, 4), Sampling(0.8, 3, 0.95, 1.2)
    assert largest_error(lambda prefixes: regrSampling(prefixes, target, 4, sampling)[0], target, 4, sampling) < 1e-6
