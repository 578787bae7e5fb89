"""On a CPU attention is computed in the cache's float32 and reads the slots that are filled."""

import helpers
import pytest
import torch

from engine import attention
from engine.cachedModel import CachedModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_reads_the_filled_slots_in_float32_on_a_cpu(monkeypatch, dtype):
    seen = []
    whole = attention.sdpa_attention_forward

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((key.shape[2], key.dtype, query.dtype))
        return whole(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", spy)
    model = helpers.tiny(layers=1)
    model = CachedModel(model.model.to(dtype), model.vocabulary)
    tokens = torch.arange(12)[None]
    model.reserve(1, 100)
    blocks = [torch.arange(a, b)[None] for a, b in ((0, 7), (7, 8), (8, 12))]
    cached = torch.cat([model.forward(tokens[:, block[0]], block) for block in blocks], 1)
    assert seen == [(filled, torch.float32, torch.float32) for filled in (7, 8, 12)]
    torch.testing.assert_close(
        cached,
        model.score(tokens),
        **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.3}),
    )
