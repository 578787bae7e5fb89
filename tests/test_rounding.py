"""Rounding to a few bits: the format that it makes, the error that it leaves, and the walk through a model's layers."""

import helpers
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine import quantised
from engine.copies import calibrated
from engine.decoderLayers import weight_of
from engine.quantised import codes_by_column, compensated, fitted, rounded

BITS = 4, 5, 6


def weight_and_inputs(seed=0):
    """A weight [48, 64] and correlated inputs [500, 64]."""
    torch.manual_seed(seed)
    return torch.randn(48, 64), torch.randn(500, 8) @ torch.randn(8, 64) + 0.3 * torch.randn(500, 64)


def error(weight, inputs, codes):
    return ((codes.weight() - weight) @ inputs.t()).norm() / (weight @ inputs.t()).norm()


@pytest.mark.parametrize("bits", BITS)
def test_codes_and_scales_have_the_kernels_format_and_a_small_error(bits):
    weight, inputs = weight_and_inputs()
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    plain = ((weight.unflatten(1, (-1, 32)) / largest).round() * largest).flatten(1)
    assert (rounded(weight, bits).weight() - weight).norm() < 0.99 * (plain - weight).norm()  # Scales are searched for.
    weight[3, :32] = 0
    for made in rounded(weight, bits), compensated(weight, inputs.t() @ inputs, bits):
        codes, scales, _ = made
        assert codes.dtype == torch.uint8 and codes.shape == weight.shape and codes.max() < 2**bits
        assert scales.dtype == torch.bfloat16 and scales.shape == (48, 2) and scales.isfinite().all()
        assert codes.is_contiguous() and scales.is_contiguous() and set(codes.unique().tolist()) == set(range(2**bits))
        assert error(weight, inputs, made) < 2.0 ** (1 - bits)


def gains(bits, passes):
    """The error of the outputs with compensation, as a share of the error without."""
    weight, inputs = weight_and_inputs()
    made = compensated(weight, inputs.t() @ inputs, bits, passes)
    return error(weight, inputs, made) / error(weight, inputs, rounded(weight, bits))


def test_compensation_and_each_pass_leave_a_smaller_error(monkeypatch):
    assert max(gains(bits, 0) for bits in BITS) < 0.6
    errors = [gains(4, passes) for passes in (0, 1, 2)]
    assert errors == sorted(errors, reverse=True) and errors[2] < 0.97 * errors[0]
    with monkeypatch.context() as planted:
        planted.setattr(quantised, "fitted", lambda *given: 1.1 * fitted(*given))
        assert gains(4, 2) > errors[2]
    monkeypatch.setattr(  # No error is passed on.
        quantised, "codes_by_column", lambda ideal, before, influence, *rest: codes_by_column(
            ideal, before, 0 * influence, *rest)
    )  # fmt: skip
    assert min(gains(bits, 0) for bits in BITS) > 0.9


def test_blocks_of_columns_change_no_code(monkeypatch):
    weight, inputs = weight_and_inputs()
    codes, scales, _ = compensated(weight, inputs.t() @ inputs, 4)
    monkeypatch.setattr(quantised, "BLOCK", 32)
    in_blocks, others, _ = compensated(weight, inputs.t() @ inputs, 4)
    assert (codes != in_blocks).float().mean() < 0.01 and torch.allclose(scales, others, rtol=0.05)


# The layers of a model.


def model_and_tokens(family, dtype=torch.float32):
    return helpers.tiny(family).model.to(dtype), torch.randint(61, (10, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt", "gemma3_text", "phi3", "granite", "olmo2"])
def test_every_linear_layer_is_rounded_once_and_the_model_stays(family, dtype):
    model, tokens = model_and_tokens(family, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(tokens).logits
    results = list(calibrated(model, tokens, 5, {}))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    assert sorted(name for name, _ in results) == sorted(linears)
    assert linears[results[-1][0]] is model.get_output_embeddings()
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items()) and after.keys() == before.keys()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(tokens).logits, logits)
    for name, codes in results:
        weight = weight_of(linears[name])
        assert codes.codes.shape == weight.shape and codes.scales.shape == (len(weight), weight.shape[1] // 32)
        assert (codes.weight() - weight).norm() < 0.3 * weight.norm()


def divergence(model, tokens, weights):
    """Mean KL divergence of the model's distributions from those with other weights."""
    exact = model(tokens).logits.log_softmax(-1)
    for name, codes in weights.items():
        weight_of(model.get_submodule(name)).copy_(codes.weight())
    return (exact.exp() * (exact - model(tokens).logits.log_softmax(-1))).sum(-1).mean()


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "opt"])
@torch.no_grad()
def test_the_calibrated_copy_is_nearer_to_the_model_than_the_rounded_one(family):
    model, _ = model_and_tokens(family)
    tokens, others = torch.randint(61, (2, 40, 24), generator=torch.Generator().manual_seed(1))
    *layers, _ = calibrated(model, tokens, 4, {})  # without the head, whose weight may be the input's too
    plain = {name: rounded(weight_of(model.get_submodule(name)), 4) for name, _ in layers}
    distances = [divergence(model_and_tokens(family)[0], others, weights) for weights in (dict(layers), plain)]
    assert distances[0] < 0.9 * distances[1], distances
