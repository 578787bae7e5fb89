"""Slots: where keys and values go, and what attention is given. On a CPU it computes in the cache's float32."""

import helpers
import pytest
import torch

from engine import kvCache
from engine.cachedModel import CachedModel
from engine.kvCache import SlotCache


def test_states_go_to_the_slots_named_and_older_ones_stay():
    cache, generator = SlotCache(2, 2, 6, torch.float32), torch.Generator().manual_seed(0)

    def states(n):
        return torch.randn(2, 3, n, 4, generator=generator)

    first, second = states(3), states(2)
    cache.address(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    keys, values = cache.update(first, -first, 1)
    assert keys.shape == (2, 3, 6, 4) and torch.equal(values, -keys)
    assert torch.equal(keys[:, :, :3], first) and not keys[:, :, 3:].any()
    # The second row is rolled back by two tokens, the first by none.
    cache.address(torch.tensor([[3, 4], [1, 2]]), reach=5)
    keys, _ = cache.update(second, -second, 1)
    assert torch.equal(keys[0], torch.cat([first[0], second[0]], 1))
    assert torch.equal(keys[1, :, :3], torch.cat([first[1, :, :1], second[1]], 1))
    assert cache.get_seq_length() == 3  # before the block, of the five slots that attention reads


def test_states_are_kept_in_the_caches_precision():
    cache = SlotCache(1, 1, 4, torch.float32)
    cache.address(torch.tensor([[0]]))
    half = torch.rand(1, 1, 1, 2, dtype=torch.bfloat16)
    assert all(kept.dtype == torch.float32 for kept in cache.update(half, half, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_reads_the_filled_slots_in_float32_on_a_cpu(monkeypatch, dtype):
    seen = []
    whole = kvCache.sdpa_attention_forward

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((key.shape[2], key.dtype, query.dtype))
        return whole(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(kvCache, "sdpa_attention_forward", spy)
    model = helpers.tiny(layers=1)
    model = CachedModel(model.model.to(dtype), model.vocabulary)
    tokens = torch.arange(12)[None]
    model.reserve(1, 100)
    seen.clear()  # what the gate read
    blocks = [torch.arange(a, b)[None] for a, b in ((0, 7), (7, 8), (8, 12))]
    cached = torch.cat([model.forward(tokens[:, block[0]], block) for block in blocks], 1)
    assert seen == [(filled, torch.float32, torch.float32) for filled in (7, 8, 12)]
    torch.testing.assert_close(
        cached,
        model.score(tokens),
        **({"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.3}),
    )
