"""Rounding to a few bits: the format that it makes and the error that it leaves."""

import pytest
import torch

import engine.rounding
from engine.rounding import compensated, dequantised, fitted, rounded, swept

BITS = 4, 5, 6


def weight_and_inputs(seed=0):
    """A weight [48, 64] and correlated inputs [500, 64]."""
    torch.manual_seed(seed)
    return torch.randn(48, 64), torch.randn(500, 8) @ torch.randn(8, 64) + 0.3 * torch.randn(500, 64)


def error(weight, inputs, codes, scales, bits):
    return ((dequantised(codes, scales, bits) - weight) @ inputs.t()).norm() / (weight @ inputs.t()).norm()


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bits", BITS)
def test_codes_and_scales_have_the_kernels_format(bits, group):
    weight, inputs = weight_and_inputs()
    weight[3, :group] = 0
    for codes, scales in rounded(weight, bits, group), compensated(weight, inputs.t() @ inputs, bits, group):
        assert codes.dtype == torch.uint8 and codes.shape == weight.shape and codes.max() < 2**bits
        assert scales.dtype == torch.bfloat16 and scales.shape == (48, 64 // group) and scales.isfinite().all()
        assert codes.is_contiguous() and scales.is_contiguous() and set(codes.unique().tolist()) == set(range(2**bits))
        assert error(weight, inputs, codes, scales, bits) < 2.0 ** (1 - bits)


@pytest.mark.parametrize("bits", BITS)
def test_searched_scales_leave_a_smaller_error_than_the_largest_number(bits):
    weight, _ = weight_and_inputs()
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1) / (2 ** (bits - 1) - 1)
    plain = (weight.unflatten(1, (-1, 32)) / largest[..., None]).round() * largest[..., None]
    found = dequantised(*rounded(weight, bits, 32), bits)
    assert (found - weight).norm() < 0.99 * (plain.flatten(1) - weight).norm()


def gains(bits, **passes):
    """The error of the outputs with compensation, as a share of the error without."""
    weight, inputs = weight_and_inputs()
    with_it = compensated(weight, inputs.t() @ inputs, bits, 32, **passes)
    return error(weight, inputs, *with_it, bits) / error(weight, inputs, *rounded(weight, bits, 32), bits)


@pytest.mark.parametrize("bits", BITS)
def test_compensation_keeps_the_outputs_of_correlated_inputs(bits, monkeypatch):
    assert gains(bits, passes=0) < 0.6
    monkeypatch.setattr(  # A planted mistake: no error is passed on.
        "engine.rounding.swept", lambda ideal, before, influence, *rest: swept(ideal, before, 0 * influence, *rest)
    )
    assert gains(bits, passes=0) > 0.9


def test_each_pass_leaves_a_smaller_error(monkeypatch):
    errors = [gains(4, passes=passes) for passes in (0, 1, 2)]
    assert errors == sorted(errors, reverse=True) and errors[2] < 0.97 * errors[0]
    monkeypatch.setattr("engine.rounding.fitted", lambda *given: 1.1 * fitted(*given))  # A planted mistake.
    assert gains(4, passes=2) > errors[2]


def test_blocks_of_columns_change_no_code(monkeypatch):
    weight, inputs = weight_and_inputs()
    codes, scales = compensated(weight, inputs.t() @ inputs, 4, 16)
    monkeypatch.setattr(engine.rounding, "BLOCK", 16)
    in_blocks, others = compensated(weight, inputs.t() @ inputs, 4, 16)
    assert (codes != in_blocks).float().mean() < 0.01 and torch.allclose(scales, others, rtol=0.05)
