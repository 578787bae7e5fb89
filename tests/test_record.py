"""What the record of a run says, and what follows from one made by hand."""

import math

import helpers
import pytest
import torch
from test_specSampling import PROMPTS, near

from decoding.record import Record
from methods.drafters import ModelDrafter
from specSampling import specSampling


def test_the_record_tells_what_happened():
    target, grown = helpers.tiny(), {row: [] for row in range(len(PROMPTS))}
    how = {"generator": torch.Generator().manual_seed(1), "callback": lambda row, *of: grown[row].append(of)}
    tokens, records = specSampling(PROMPTS, target, ModelDrafter(near(target)), 50, 4, **how)
    for row, record in enumerate(records):
        assert sum((new for new, _ in grown[row]), []) == tokens[row] and record.tokens == len(tokens[row]) == 50
        assert all(0 <= guessed <= len(new) for new, guessed in grown[row])
        assert [guessed for _, guessed in grown[row][:-1]] == record.accepted[:-1]
        assert record.drafted[0] == record.accepted[0] == 0 and record.committed[0] == 1
        assert all(c == a + 1 for c, a in zip(record.committed[:-1], record.accepted[:-1]))
        assert all(a <= d <= 4 for a, d in zip(record.accepted, record.drafted))
        assert record.times == sorted(record.times) and 0 < record.ttft <= record.times[-1]
        by_position = record.acceptance_by_position
        assert all(passed <= tested for tested, passed in by_position)
        assert all(later[0] <= earlier[1] for earlier, later in zip(by_position, by_position[1:]))
        assert sum(passed for _, passed in by_position) == sum(record.accepted)
        assert record.tokens_per_round == pytest.approx(49 / (len(record.committed) - 1))
        assert record.tpot == pytest.approx((record.times[-1] - record.times[0]) / 49)
        assert record.throughput == pytest.approx(50 / record.times[-1])


def test_figures_of_a_record_made_by_hand():
    record = Record([0.5, 0.7, 1.0], [1, 3, 2], [0, 2, 3], [0, 2, 1])
    assert (record.tokens, record.ttft, record.tokens_per_round) == (6, 0.5, 2.5)
    assert record.tpot == pytest.approx(0.1) and record.throughput == pytest.approx(6)
    assert record.acceptance_by_position == [(2, 2), (2, 1), (0, 0)] and record.alpha == 0.75
    record = Record([0.5], [1], [0], [0])  # What one token cannot tell is nan.
    assert all(map(math.isnan, (record.tpot, record.tokens_per_round, record.alpha)))
