"""A queue of texts in a batch: rows that end make room, and no text depends on its neighbours. Ragged rows: what is
refused, where tokens lie, how rows end."""

import copy
import functools

import helpers
import pytest
import torch
from conftest import refused

from decoding.lengthRules import Additive, DraftConfidence, TargetConfidence
from decoding.rows import Rows
from decoding.tree import Tree
from decoding.verification import block_rule
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from lossless.mistakes import PredecessorTarget
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling

FREE = Sampling(1.0, 0, 1.0)
ENDS = {3, 17, 40}  # Tokens that end a text: texts have many lengths.
TEXTS = 12
PROMPTS = [[(7 * i + j) % 60 for j in range(1 + 5 * i % 9)] for i in range(TEXTS)]


@functools.cache
def models(engine):
    target, draft, mid = (helpers.tiny(seed=seed, layers=1, sharpness=2.0) for seed in (0, 0, 1))
    noise = torch.Generator().manual_seed(5)
    for weight in draft.model.parameters():  # A draft that is often right.
        weight.data += 0.02 * torch.randn(weight.shape, generator=noise)
    return [compiled(CachedModel(copy.deepcopy(m.model), m.vocabulary)) if engine else m for m in (target, draft, mid)]


METHODS = {
    "plain": lambda t, d, m: (regrSampling, {}),
    "fixed": lambda t, d, m: (specSampling, {"drafter": ModelDrafter(d), "gamma": 3}),
    "block": lambda t, d, m: (specSampling, {"drafter": ModelDrafter(d), "gamma": 4, "verify": block_rule}),
    "additive": lambda t, d, m: (specSampling, {"drafter": ModelDrafter(d), "gamma": Additive(1)}),
    "draftConfidence": lambda t, d, m: (specSampling, {"drafter": ModelDrafter(d), "gamma": DraftConfidence(5, 0.3)}),
    "targetConfidence": lambda t, d, m: (specSampling, {"drafter": ModelDrafter(d), "gamma": TargetConfidence(3, 0.2)}),
    "lookup": lambda t, d, m: (specSampling, {"drafter": LookupDrafter(61, worth=0.05), "gamma": 4}),
    "lookupFirst": lambda t, d, m: (
        specSampling,
        {"drafter": LookupFirst(LookupDrafter(61, 1, worth=0.1), ModelDrafter(d)), "gamma": 3},
    ),
    "cascade": lambda t, d, m: (specSampling, {"drafter": CascadeDrafter(m, ModelDrafter(d)), "gamma": 3}),
    "tree": lambda t, d, m: (treeSampling, {"drafter": TreeDrafter(d), "tree": Tree.of("3,2")}),
}


def written(method, batch, target, draft, mid, sampling=FREE, texts=TEXTS):
    sampler, options = METHODS[method](target, draft, mid)
    generators = [torch.Generator().manual_seed(i) for i in range(texts)]
    return sampler(
        PROMPTS[:texts],
        target=target,
        max_len=24,
        sampling=sampling,
        end_of_text=lambda text, token: token in ENDS,
        generator=generators,
        batch=batch,
        **options,
    )


PENALISED = Sampling(1.0, 0, 1.0, repetition_penalty=1.3)


@pytest.mark.parametrize("engine", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method, sampling", [*((name, FREE) for name in METHODS), ("fixed", PENALISED)])
def test_a_text_is_the_same_at_every_batch_size(method, sampling, engine):
    alone, _ = written(method, 1, *models(engine), sampling)
    assert len({len(text) for text in alone}) > 3  # Rows end at different times.
    for batch in (3, None):
        texts, records = written(method, batch, *models(engine), sampling)
        assert texts == alone
        assert [record.tokens for record in records] == list(map(len, texts))
        assert all(record.ttft > 0 for record in records)


def test_a_batch_shrinks_when_no_prompt_waits(monkeypatch):
    sizes = []
    whole = CachedModel.forward

    def spy(self, tokens, *args, **named):
        sizes.append((len(tokens), self.first_row))
        return whole(self, tokens, *args, **named)

    monkeypatch.setattr(CachedModel, "forward", spy)
    written("plain", 4, *models(False))
    rows = [size for size, _ in sizes]
    assert rows[0] == 4 and rows[-1] < 4  # The first prompts together; the last text with fewer rows.
    assert sum(first > 0 for _, first in sizes) >= 3  # Prompts that were read into a row of their own.


def test_waiting_does_not_count_as_time_to_the_first_token():
    _, records = written("plain", 1, *models(False), texts=4)
    assert records[0].begun == 0 and all(a.times[-1] <= b.begun < b.times[0] for a, b in zip(records, records[1:]))
    assert all(record.seconds == record.times[-1] - record.begun for record in records)


def test_a_row_that_reads_its_predecessors_slots_is_caught():
    target, draft, mid = models(False)
    right, _ = written("fixed", 3, target, draft, mid)
    wrong, _ = written("fixed", 3, PredecessorTarget(target), draft, mid)
    assert wrong[:3] == right[:3] and wrong != right


def test_seeds_that_belong_to_rows_are_caught(monkeypatch):
    """The mistake that invites itself: the generator of a row, not of its text."""
    honest = Rows.uniform

    def by_row(self, counts, *args, **named):
        numbers, self.numbers = self.numbers, list(range(self.size))
        try:
            return honest(self, counts, *args, **named)
        finally:
            self.numbers = numbers

    right, _ = written("plain", 3, *models(False))
    monkeypatch.setattr(Rows, "uniform", by_row)
    assert written("plain", 3, *models(False))[0] != right


# Rows.


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "opt"])
def test_the_context_may_be_filled_to_its_last_token(family):
    """Guesses past a row's end must not index past a learned position table, nor disturb what is committed."""
    target = helpers.tiny(family, context=32)
    prompts = [[5, 9, 2, 7] * 3, [11]]  # one row ends long before the other
    tokens, _ = specSampling(prompts, target, ModelDrafter(helpers.tiny(family, context=32)), 20, 6, GREEDY)
    assert tokens == [regrSampling([p], target, 20, GREEDY)[0][0] for p in prompts]


def test_what_cannot_work_is_refused_before_work():
    target, draft = helpers.tiny(seed=0), helpers.tiny(seed=1, layers=1)
    drafter, before = ModelDrafter(draft), (target.forwards, draft.forwards)
    with pytest.raises(ValueError, match="generators"):
        regrSampling(PROMPTS, target, 9, generator=[torch.Generator()])
    for match, call in {
        "1 row or more": lambda: written("plain", 0, target, draft, None),
        "empty": lambda: specSampling([[1], []], target, drafter),
        "prompt is": lambda: regrSampling([], target),
        "gamma": lambda: specSampling([[1]], target, drafter, 10, 0),
        "maxLen": lambda: regrSampling([[1]], target, 0),
        "vocabulary": lambda: regrSampling([[61]], target, 10),
        "exceed the context": lambda: regrSampling([[1] * 100], target, 29),
    }.items():
        with refused(match):
            call()
    short = ModelDrafter(helpers.tiny(seed=1, context=64))
    with refused("gpt_neox-1"):
        specSampling([[1] * 30], target, short, 40)
    assert (target.forwards, draft.forwards) == before


def test_each_row_grows_by_what_it_accepted_and_one_token_more():
    grown = []
    rows = Rows([[1, 2, 3], [4]], 5, [helpers.tiny()], 60, lambda *what: grown.append(what))
    drafts = torch.tensor([[7, 8], [9, 10]])
    assert rows.commit(drafts, torch.tensor([2, 0]), torch.tensor([11, 12]))[:2] == ({0: 2, 1: 2}, {0: 2, 1: 0})
    assert rows.tokens == [[7, 8, 11], [12]] and rows.left == [2, 4]
    assert [each.tolist() for each in rows.last(2, 1)] == [[[8, 11], [4, 12]], [[4, 5, 6], [0, 1, 2]]]
    # The first row is full after two tokens, the second ends where its text does.
    rows.commit(drafts, torch.tensor([2, 1]), torch.tensor([11, 60]))
    assert rows.tokens == [[7, 8, 11, 7, 8], [12, 9, 60]] and rows.left == [0, 0] and not rows.refill()
    assert grown == [(0, [7, 8, 11], 2), (1, [12], 0), (0, [7, 8], 2), (1, [9, 60], 1)]


def test_only_a_penalty_asks_what_was_seen_and_padding_was_not():
    rows = Rows([[1, 2, 3], [4]], 5, [helpers.tiny()])
    assert rows.seen(61, GREEDY) is None
    seen = rows.seen(61, Sampling(repetition_penalty=1.1))
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[1, 2, 3], [4]]
