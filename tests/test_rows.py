"""Ragged rows: what is refused, where tokens lie, how rows end."""

import helpers
import pytest
import torch
from conftest import refused

from decoding.rows import Rows
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling


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
    for match, call in {
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
