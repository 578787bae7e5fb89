"""The one mechanism: positions instead of rollback."""

import functools
import itertools
import random
from functools import partial

import helpers
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from decoding.drafter import Fixed
from decoding.rows import Rows
from engine import kvCache
from engine.cachedModel import CachedModel
from engine.cudaModel import CudaModel, layer_forward
from methods.cascade import CascadeDrafter, InnerRows
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import Sampling, pick

tiny = functools.cache(helpers.tiny)


class Oracle:
    """The tokens of a batch, committed or guessed, and the comparison of every forward with those tokens read without a
    cache. Positions that several tokens of a block share are left out: they lie at a row's ends, and nobody asks."""

    def __init__(self, patch, prompts, max_len, models):
        self.texts = torch.zeros(len(prompts), max(map(len, prompts)) + max_len, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.texts[row, : len(prompt)] = torch.tensor(prompt)
        for model in models:
            patch.setattr(model, "forward", functools.partial(self.compare, model, model.forward))
        # What is guessed may stay in a cache, what is committed must be there.
        for kind, name in (Rows, "commit"), (Rows, "commit_first"), (InnerRows, "sync"):
            patch.setattr(kind, name, self.then_take_over(getattr(kind, name)))
        patch.setattr(Rows, "close_ranks", lambda rows: None)  # The texts stay in their rows.

    def then_take_over(self, method):
        def both(rows, *arguments):
            result = method(rows, *arguments)
            for text, sequence, length in zip(self.texts, rows.sequence, rows.lengths.tolist()):
                text[:length] = sequence[: min(length, len(text))]
            return result

        return both

    def compare(self, model, forward, tokens, positions, places=None, keep=None):
        got = forward(tokens, positions, places, keep)
        if keep is None:
            self.texts.scatter_(1, positions, tokens)
            for row, where in enumerate(positions.tolist()):
                wanted = model.score(self.texts[row : row + 1, : max(where) + 1])[0]
                alone = [i for i, position in enumerate(where) if position not in (0, self.texts.shape[1] - 1)]
                at = [where[i] for i in alone]
                torch.testing.assert_close(got[row, alone], wanted[at], atol=1e-4, rtol=1e-4)
        return got


class Scripted(Fixed):
    """Any number of guesses in any round and row, none included."""

    lengths = None

    def __init__(self, lengths):
        self.script = itertools.cycle(lengths)

    def begin(self, rows):
        self.rows = len(rows.tokens)

    def gammas(self):
        return [next(self.script) for _ in range(self.rows)]


def loop(patch, seed):
    """A whole run of which everything is drawn: ragged prompts, rows that end at different times, guesses that stand or
    fall by script, the draft alone or in a cascade."""
    rng, sampling = random.Random(seed), Sampling(1.0, 0, 1.0)
    prompts = [rng.choices(range(61), k=rng.randint(1, 9)) for _ in range(rng.randint(1, 3))]
    max_len, end, standing = rng.randint(1, 14), rng.randrange(61), itertools.cycle(rng.choices(range(5), k=9))
    outer, within = (Scripted(rng.choices(range(5), k=rng.randint(1, 7))) for _ in range(2))

    def verify(p, q, drafts, u):
        guesses = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))
        accepted = torch.minimum(guesses, torch.tensor([next(standing) for _ in drafts]))
        return accepted, pick(p[torch.arange(len(p)), accepted], u[:, -1])

    models = [tiny(seed=i, layers=2 - i // 2) for i in range(3)]
    drafter = ModelDrafter(models[1])
    if rng.random() < 0.5:
        drafter = CascadeDrafter(models[2], drafter, within, verify)
    Oracle(patch, prompts, max_len, models)
    generator = torch.Generator().manual_seed(seed)
    texts, _ = specSampling(prompts, models[0], drafter, max_len, outer, sampling, end, generator, None, verify)
    assert all(len(text) == max_len or text[-1] == end for text in texts)


@pytest.mark.parametrize("seed", range(25))
def test_all_models_of_a_loop_read_what_is_committed_whatever_is_guessed_and_accepted(monkeypatch, seed):
    loop(monkeypatch, seed)


@pytest.mark.parametrize("drafter", [ModelDrafter, CascadeDrafter])
def test_a_drafter_that_forgets_how_far_it_is_behind_is_caught(monkeypatch, drafter):
    """It would not read the tokens that were committed in the place of its own."""
    draft = drafter.draft

    def forgetful(self, *arguments):
        self.behind = 0
        return draft(self, *arguments)

    monkeypatch.setattr(drafter, "draft", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        for seed in range(100):
            with monkeypatch.context() as patch:
                loop(patch, seed)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.05)])
def test_attention_reads_the_filled_slots_in_float32_on_a_cpu(monkeypatch, dtype, error):
    seen, attention = [], kvCache.sdpa_attention_forward

    def spy(module, query, key, value, mask, **kwargs):
        seen.append((key.shape[2], key.dtype, query.dtype))
        return attention(module, query, key, value, mask, **kwargs)

    monkeypatch.setattr(kvCache, "sdpa_attention_forward", spy)
    model = helpers.tiny(layers=1)
    model = CachedModel(model.model.to(dtype), model.vocabulary)
    tokens = torch.arange(12)[None]
    model.reserve(1, 100)
    seen.clear()  # what the gate read
    blocks = [torch.arange(a, b)[None] for a, b in ((0, 7), (7, 8), (8, 12))]
    cached = torch.cat([model.forward(tokens[:, block[0]], block) for block in blocks], 1)
    assert seen == [(filled, torch.float32, torch.float32) for filled in (7, 8, 12)]
    torch.testing.assert_close(cached, model.score(tokens), rtol=error, atol=6 * error if error > 1e-4 else error)


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.skipif(not helpers.FULL, reason="FULL=1"))]
)
@torch.inference_mode()
def test_a_forward_compiles_without_breaks(backend):
    """As a GPU's engine asks for. One compilation serves all layers. The shapes of rounds, and a new KV cache, are
    symbols in the end: they need few compilations."""
    torch._dynamo.reset()  # Compilations for other tests count against its limit.
    counter = CompileCounterWithBackend(backend)
    eager, model = helpers.tiny(layers=6), helpers.tiny(layers=6)
    model = CudaModel(model.model, model.vocabulary)
    fused = torch.compile(layer_forward, fullgraph=True, backend=counter)
    model.network = lambda tokens: partial(model.by_layers, fused)
    tokens = torch.tensor([[5, 9, 2, 11, 30, 7, 1]])
    for capacity in 64, 128:
        for each in eager, model:
            each.reads_filled = False  # as on a GPU
            CachedModel.reserve(each, 1, capacity)
        for first, n in (0, 7), (7, 1), (8, 5), (9, 2), (11, 3), (14, 4), (18, 1):
            positions = torch.arange(first, first + n)[None]
            wanted, found = (CachedModel.forward(each, tokens[:, :n], positions) for each in (eager, model))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert 0 < counter.frame_count < 9
