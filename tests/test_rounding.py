"""Rounding to a few bits: the format that it makes, and the error that it leaves."""

import pytest
import torch

from engine.quantised import inverse, rounded


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_codes_and_scales_have_the_kernels_format_and_a_small_error(bits, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    plain = ((weight.unflatten(1, (-1, 32)) / largest).round() * largest).flatten(1)
    error = (rounded(weight, bits).weight() - weight).norm()
    assert error < 0.999 * (plain - weight).norm()  # Scales are searched for.
    assert error < 2.0 ** (1 - bits) * weight.norm()
    weight[3, :32] = 0
    whole = rounded(weight, bits)
    codes, scales, _ = whole
    assert codes.dtype == torch.uint8 and codes.shape == weight.shape and int(codes.max()) < 2**bits
    assert scales.dtype == torch.bfloat16 and scales.shape == (48, 2) and scales.isfinite().all()
    assert codes.is_contiguous() and scales.is_contiguous() and not whole.weight()[3, :32].any()
    if bits < 8:
        assert set(codes.unique().tolist()) == set(range(2**bits))
    monkeypatch.setattr("engine.quantised.AT_ONCE", 5 * 64)  # 48 rows are no multiple of it.
    assert all(map(torch.equal, rounded(weight, bits)[:2], whole[:2]))
    monkeypatch.setattr("engine.quantised.inverse", lambda scale: inverse(scale).abs())  # the mistake: a sign is lost
    assert (rounded(weight, bits).weight() - weight).norm() > 2 * error
