"""How guesses come about. That no drafter shows in the output is in test_catalogue.py, what it reads in
test_cachedModel.py."""

from collections import Counter
from dataclasses import replace

import helpers
import pytest
import torch
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st
from outcomes import FREE

from decoding.drafter import Fixed
from decoding.lengthRules import TargetConfidence
from decoding.rows import Rows
from engine.compiling import compiled
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from methods.lookup import Continuations, LookupDrafter, LookupFirst
from specSampling import specSampling


def looked_up(text, tail=(), gamma=5, ngram=1, worth=0.0):
    """The guesses after `text`, which is read, and `tail`, which may be replaced."""
    known = Continuations(ngram)
    known.read(text, test=False)
    return known.guesses([*text, *tail], gamma, worth)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3, 9]),  # the longest ending that occurred; on beyond the text's end
        ([2, 3, 7, 1, 2, 3, 9, 4, 2, 3], [9, 4, 2, 3, 9]),  # what followed as often, and later
        ([3, 7, 3, 7, 3, 9, 3], [7, 3, 9, 3, 7]),  # what followed most often
        ([5, 3, 8, 3], [8, 3, 8, 3, 8]),
        ([4, 4, 4], [4, 4, 4, 4, 4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_lookup_guesses_what_followed_most_often(text, wanted):
    assert looked_up(text) == wanted
    assert looked_up(text, ngram=4) == looked_up(text, ngram=10**9) == []
    assert looked_up(text * 2, gamma=1, ngram=len(text)) == text[:1]  # Any number of tokens may be asked for.


def test_tokens_that_may_be_replaced_are_followed_but_not_read():
    assert looked_up([1, 2, 3, 9, 5], [1, 2, 3], 2) == [9, 5]
    assert looked_up([1, 2, 3, 9, 5], [7, 8, 7], worth=0.3) == []


@given(st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds - 1), min_size=1, max_size=40)))
def test_a_guess_is_that_of_a_naive_search(text):
    followed = []
    for n in range(1, min(Continuations.LONGEST, len(text)) + 1):  # The longest ending that occurred before counts.
        followed = [text[i] for i in range(n, len(text)) if text[i - n : i] == text[-n:]] or followed
    most = max(map(followed.count, followed), default=0)
    wanted = next(([token] for token in reversed(followed) if followed.count(token) == most), [])
    assert looked_up(text, gamma=1) == wanted


def test_q_of_looked_up_guesses_is_one_hot_in_every_round_though_its_memory_is_used_again():
    rows, drafter = Rows([[1], [1], [1]], 40, [helpers.tiny()]), LookupDrafter(10)
    # Narrower, then wider than before; at last no guess in any row.
    for found in [[3, 4], [5], []], [[], [7], []], [[1, 1, 2], [2], [9, 9]], [[], [], []]:
        guesses = drafter.guesses(rows, found)
        wanted = torch.zeros(3, max(map(len, found)), 10)
        for row, tokens in enumerate(found):
            for i, token in enumerate(tokens):
                wanted[row, i, token] = 1
        assert torch.equal(guesses.q, wanted)
        assert guesses.limited([3, 3, 3]) is guesses  # Nobody copies q where no guess is too many.
        assert guesses.limited([1, 1, 1]).counts().tolist() == [min(1, len(tokens)) for tokens in found]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("vocabulary, dtype", [(60, torch.float32), (62, torch.float32), (61, torch.bfloat16)])
def test_a_q_of_another_vocabulary_or_dtype_is_refused(vocabulary, dtype, compiles):
    """A compiled model would read it as if it were right."""

    class Drafter(LookupDrafter):
        def draft(self, *args):
            guesses = super().draft(*args)
            return replace(guesses, q=guesses.q.to(dtype))

    target = compiled(helpers.tiny()) if compiles else helpers.tiny()
    with refused("a drafter's q is", str(dtype).removeprefix("torch."), f", {vocabulary}], and should be float32 [1, "):
        specSampling([[1, 2, 1, 2, 1]], target, Drafter(vocabulary), 9, 4, FREE)


def test_lookup_guesses_where_it_was_right_so_far():
    rows, drafter, guessed = Rows([[1, 2, 3, 1, 2]], 40, [helpers.tiny()]), LookupDrafter(61), []
    drafter.begin(rows)
    drafter.read_prompts(rows)
    rate = drafter.known[0].rate
    assert rate(2) == 1 / 3 and rate(9) == rate(4) == 1 / 2  # Nothing was learnt of the prompt.
    for token in [3, 1, 2, 3, 1, 2]:
        rows.commit_one(torch.tensor([token]))
        guessed.append(len(drafter.find(rows, [5])[0]))
    assert guessed == [1, 1, 2, 4, 5, 5]
    for token in [5, 4, 6, 7, 3, 1, 8, 1, 2, 9, 3, 1, 10, 2, 3, 11, 3, 1]:  # Each pair had another token after it.
        rows.commit_one(torch.tensor([token]))
        assert len(drafter.find(rows, [5])) == 1
    assert rate(2) < drafter.worth < rate(4) and drafter.find(rows, [5]) == [[]]
    drafter.worth = 0
    assert len(drafter.find(rows, [5])[0]) == 5


class Checked:
    """A drafter whose q is compared with what `model` says without a cache; q of looked-up guesses is one-hot."""

    def __init__(self, drafter, model):
        self.drafter, self.model, self.models = drafter, model, drafter.models
        self.begin, self.rewind, self.read_prompts = drafter.begin, drafter.rewind, drafter.read_prompts
        self.rounds, self.far = Counter(), 0.0

    def draft(self, rows, gammas, *given):
        guesses = self.drafter.draft(rows, gammas, *given)
        for text, drafts, q, left in zip(rows.texts, guesses.drafts.tolist(), guesses.q, rows.left):
            count = min(int((q.sum(-1) > 0).sum()), left - 1)  # The rest is not used.
            if count < 1:
                continue
            looked_up = bool((q[:count].amax(-1) == 1).all())
            self.rounds["looked up" if looked_up else "drafted"] += 1
            if not looked_up:
                wanted = self.model.score(torch.tensor([text + drafts]))[0, len(text) - 1 :][:count].softmax(-1)
                self.far = max(self.far, (q[:count] - wanted).abs().max().item())
        return guesses


@pytest.mark.parametrize("inside, length", [(False, 4), (True, 4), (False, TargetConfidence(3, 0.2))])
def test_a_draft_that_was_not_asked_reads_what_it_missed(length, inside, monkeypatch):
    """Rows that match and rows that do not, in turn and beside each other, and a cascade that takes tokens back."""
    target, model, mid = (helpers.tiny(seed=seed, vocabulary=12, sharpness=2.0, layers=1) for seed in (0, 1, 2))

    def far(prompts):
        drafter = Checked(LookupFirst(LookupDrafter(12, 2, worth=0), ModelDrafter(model)), model)
        outer = CascadeDrafter(mid, drafter, Fixed(2)) if inside else drafter
        specSampling(prompts, target, outer, 60, length, FREE, generator=torch.Generator().manual_seed(0))
        assert min(drafter.rounds["looked up"], drafter.rounds["drafted"]) >= 5
        return drafter.far

    assert far([[5, 9, 2, 5, 9], [11], [1, 2, 3, 4]]) < 1e-5
    assert far([[5, 9, 2, 5, 9]]) < 1e-5
    monkeypatch.setattr(ModelDrafter, "rewind", lambda self, count: None)
    assert far([[5, 9, 2, 5, 9]]) > 1e-3
