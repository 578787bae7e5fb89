"""The one mechanism: positions instead of rollback."""

import functools
import itertools

import helpers
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from decoding.drafter import Fixed
from decoding.rows import Rows
from decoding.tree import Places
from engine import kvCache
from engine.cachedModel import CachedModel, UncachedModel
from methods.cascade import CascadeDrafter, InnerRows
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import Sampling, pick

MODELS, LOOP = {}, {}


def model_of(family):
    return MODELS.setdefault(family, helpers.tiny(family))


def play(model, prompts, rounds, capacity=96):
    """Read ragged prompts, then blocks of which each row keeps a part; yields (cached, uncached) logits after each."""
    rows = len(prompts)
    texts = [list(p) for p in prompts]
    model.reserve(rows, capacity)
    longest = max(map(len, texts))
    padded = torch.tensor([t + [0] * (longest - len(t)) for t in texts])
    model.forward(padded, torch.arange(longest).repeat(rows, 1))
    for block, kept in rounds:
        tokens = torch.tensor(block)
        positions = torch.tensor([len(t) for t in texts])[:, None] + torch.arange(tokens.shape[1])
        got = model.forward(tokens, positions)
        for row, text in enumerate(texts):
            yield got[row], model.score(torch.tensor([text + block[row]]))[0, len(text) :]
            text += block[row][: kept[row]]


@pytest.mark.parametrize("family", helpers.FAMILIES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_cached_logits_equal_uncached_after_any_rollbacks(family, data):
    token, rows = st.integers(0, 60), 3
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=rows, max_size=rows))
    rounds = []
    for _ in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 6))
        block = data.draw(st.lists(st.lists(token, min_size=width, max_size=width), min_size=rows, max_size=rows))
        rounds.append((block, data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))))
    for got, wanted in play(model_of(family), prompts, rounds):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


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


def loop(patch, data):
    """A whole run of which everything is drawn: ragged prompts, rows that end at different times, guesses that stand or
    fall by script, the draft alone or in a cascade."""
    token, upto4 = st.integers(0, 60), st.integers(0, 4)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=3))
    lengths = st.lists(upto4, min_size=1, max_size=7)
    standing = itertools.cycle(data.draw(st.lists(upto4, min_size=1, max_size=9)))
    max_len, end, generator = data.draw(st.integers(1, 14)), data.draw(token), torch.Generator().manual_seed(0)

    def verify(p, q, drafts, u):
        guesses = (q.gather(-1, drafts[..., None]) > 0).sum((1, 2))
        accepted = torch.minimum(guesses, torch.tensor([next(standing) for _ in drafts]))
        return accepted, pick(p[torch.arange(len(p)), accepted], u[:, -1])

    models = [LOOP.setdefault(i, helpers.tiny(seed=i, layers=2 - i // 2)) for i in range(3)]
    drafter, sampling = ModelDrafter(models[1]), Sampling(1.0, 0, 1.0)
    if data.draw(st.booleans()):
        drafter = CascadeDrafter(models[2], drafter, Scripted(data.draw(lengths)), verify)
    Oracle(patch, prompts, max_len, models)
    gamma = Scripted(data.draw(lengths))
    texts, _ = specSampling(prompts, models[0], drafter, max_len, gamma, sampling, end, generator, None, verify)
    assert all(len(text) == max_len or text[-1] == end for text in texts)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_all_models_of_a_loop_read_what_is_committed_whatever_is_guessed_and_accepted(data):
    with pytest.MonkeyPatch.context() as patch:
        loop(patch, data)


@pytest.mark.parametrize("drafter", [ModelDrafter, CascadeDrafter])
def test_a_drafter_that_forgets_how_far_it_is_behind_is_caught(drafter):
    """It would not read the tokens that were committed in the place of its own."""

    @settings(max_examples=100, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.data())
    def runs(data):
        with pytest.MonkeyPatch.context() as patch:
            draft = drafter.draft

            def forgetful(self, *arguments):
                self.behind = 0
                return draft(self, *arguments)

            patch.setattr(drafter, "draft", forgetful)
            loop(patch, data)

    with pytest.raises(AssertionError, match="not close"):
        runs()


def test_the_comparison_catches_one_stale_slot():
    """The property above must fail when one rolled-back slot stays visible."""
    model = model_of("gpt_neox")
    model.reserve(1, 96)
    tokens = torch.tensor([[5, 9, 2, 7, 11, 3]])
    model.forward(tokens, torch.arange(6)[None])
    position = torch.tensor([[4]])
    stale = Places(position, position, position[0], torch.tensor([0b11]))  # It attends to slot 5 too.
    good = model.score(torch.tensor([[5, 9, 2, 7, 20]]))[0, -1]
    torch.testing.assert_close(model.forward(torch.tensor([[20]]), position)[0, 0], good, atol=1e-4, rtol=1e-4)
    model.reads_filled = False
    bad = model.forward(torch.tensor([[20]]), position, stale)[0, 0]
    assert (bad - good).abs().max() > 1e-2


RAGGED = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6]]
ROUNDS = [([[7, 8, 9], [1, 1, 1], [3, 0, 3]], [3, 0, 1]), ([[4], [5], [6]], [1, 1, 0]), ([[2, 2]] * 3, [2, 2, 2])]


class Forgetful(UncachedModel):
    """A planted mistake: the first row's tokens are not kept."""

    def forward(self, tokens, positions, places=None, keep=None):
        before = self.text.clone()
        logits = super().forward(tokens, positions, places, keep)
        self.text[0] = before[0]
        return logits


@pytest.mark.parametrize("kind, family", [(UncachedModel, "gpt_neox"), (UncachedModel, "opt"), (Forgetful, "gpt_neox")])
def test_without_a_kv_cache_each_forward_reads_the_whole_text(kind, family):
    model = kind(model_of(family))
    same = [torch.allclose(*pair, atol=1e-4, rtol=1e-4) for pair in play(model, RAGGED, ROUNDS)]
    assert all(same) == (kind is UncachedModel)
    places = Places(torch.tensor([[0]]), torch.tensor([[0]]), torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(TypeError, match="reads no tree"):
        UncachedModel(model_of(family)).forward(torch.tensor([[1]]), torch.tensor([[0]]), places)


@pytest.mark.parametrize("kind", [lambda model: model, UncachedModel])
def test_kept_logits_are_those_of_the_named_tokens(kind):
    model = kind(model_of("gpt_neox"))
    model.reserve(3, 32)
    tokens, positions = torch.randint(0, 61, (3, 7)), torch.arange(7).repeat(3, 1)
    whole, keep = model.forward(tokens, positions), torch.tensor([6, 2])
    torch.testing.assert_close(model.forward(tokens, positions, keep=keep), whole[:, keep])


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
