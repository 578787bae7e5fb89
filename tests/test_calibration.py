"""The walk through a model's layers that rounds them: every layer once, the model unchanged, a nearer copy."""

import helpers
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.calibration import calibrated, weight_of
from engine.rounding import dequantised, rounded


def model_and_tokens(family, dtype=torch.float32):
    return helpers.tiny(family).model.to(dtype), torch.randint(61, (10, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt", "qwen3"])
def test_every_linear_layer_is_rounded_once_and_the_model_stays(family, dtype):
    model, tokens = model_and_tokens(family, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(tokens).logits
    found = list(calibrated(model, tokens, 5, 16))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    assert sorted(name for name, _, _ in found) == sorted(linears)
    assert linears[found[-1][0]] is model.get_output_embeddings()
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()) and after.keys() == before.keys()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(tokens).logits, logits)
    for name, codes, scales in found:
        weight = weight_of(linears[name])
        assert codes.shape == weight.shape and scales.shape == (len(weight), weight.shape[1] // 16)
        assert (dequantised(codes, scales, 5) - weight).norm() < 0.3 * weight.norm()


@pytest.mark.parametrize("stop", [1, 4, 7, 9, 14])
def test_an_interrupted_run_goes_on_where_it_stopped(stop):
    model, tokens = model_and_tokens("llama")
    whole = list(calibrated(model, tokens, 4, 16))
    done = {name: (codes, scales) for name, codes, scales in whole[:stop]}
    for (name, codes, scales), (wanted, *tensors) in zip(
        calibrated(model, tokens, 4, 16, done), whole[stop:], strict=True
    ):
        assert name == wanted and torch.equal(codes, tensors[0]) and torch.equal(scales, tensors[1])


def divergence(model, tokens, weights):
    """Mean KL divergence of the model's distributions from those with other weights."""
    exact = model(tokens).logits.log_softmax(-1)
    for name, weight in weights.items():
        weight_of(model.get_submodule(name)).copy_(weight)
    return (exact.exp() * (exact - model(tokens).logits.log_softmax(-1))).sum(-1).mean()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt"])
@torch.no_grad()
def test_the_calibrated_copy_is_nearer_to_the_model_than_the_rounded_one(family):
    model, _ = model_and_tokens(family)
    tokens, others = torch.randint(61, (2, 40, 24), generator=torch.Generator().manual_seed(1))
    *found, _ = calibrated(model, tokens, 4, 16)  # without the head, whose weight may be the input's too
    near = {name: dequantised(codes, scales, 4) for name, codes, scales in found}
    plain = {name: dequantised(*rounded(weight_of(model.get_submodule(name)), 4, 16), 4) for name in near}
    distances = [divergence(model_and_tokens(family)[0], others, weights) for weights in (near, plain)]
    assert distances[0] < 0.9 * distances[1], distances
