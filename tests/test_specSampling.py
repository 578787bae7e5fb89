"""The samplers: greedy equality, exact distributions, planted mistakes, ragged rows, records."""

import copy
import math

import helpers
import pytest
import torch
from helpers import DRAWS, FULL
from mistakes import always_accept, p_shifted, replace_from_p, unverified_last
from outcomes import FREE, largest_error, small, speculative_error

from decoding.rows import Record, Rows
from decoding.verification import block_rule, token_rule
from engine.cachedModel import CachedModel
from lossless.mistakes import FlawedModel, unfiltered
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling

PROMPTS = [[5, 9, 2, 7], [11], [3, 3, 8, 1, 40, 22, 17, 60, 2], [50, 4]]


def near(model, noise=0.15, seed=7):
    """A copy of `model` with its weights disturbed a little: a draft that often agrees."""
    draft = CachedModel(copy.deepcopy(model.model), model.vocabulary, "near")
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in draft.model.parameters():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return draft


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_greedy_rows_equal_plain_greedy_and_transformers_alone(family):
    target = helpers.tiny(family)
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = [target.model.generate(torch.tensor([p]), **how)[0, len(p) :].tolist() for p in PROMPTS]
    assert regrSampling(PROMPTS, target, 24, GREEDY)[0] == alone
    for gamma in (1, 2, 4, 9) if family == "gpt_neox" else (4,):
        spec, records = specSampling(PROMPTS, target, ModelDrafter(near(target)), 24, gamma, GREEDY)
        # The equality is worth something: rounds of every kind took place.
        assert spec == alone and {0, min(2, gamma)} <= {a for r in records for a in r.accepted[1:]}


# The distribution of whole texts, exactly: every guess, decision and token of several rounds, without sampling noise.
SETTINGS = [FREE, Sampling(0.85, 0, 0.9), Sampling(1.5, 2, 1.0), Sampling(1.0, 0, 0.95, 1.5)]


def error(gamma=2, verify=token_rule, own=(None, None), drafter=ModelDrafter, **options):
    """The largest difference between the probability of a text and the target's. own: the draft's sampling."""
    return speculative_error(lambda target, draft, _: drafter(draft, *own), gamma, verify, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"prefixes": [[1, 2, 0, 1, 2], [1]], "length": 4},
        *({"sampling": sampling} for sampling in SETTINGS[1:]),
        # The draft has a temperature and a top-p of its own.
        {"own": (0.5, None)},
        {"own": (1.7, 0.8), "sampling": SETTINGS[1]},
        {"own": (0.0, None), "sampling": SETTINGS[3]},
        {"own": (None, 1.0), "sampling": SETTINGS[1], "verify": block_rule, "length": 4},
        {"own": (0.7, 1.0), "sampling": GREEDY},
        # FULL=1: 131,072 outcomes for each prefix.
        *({"gamma": 3, "verify": rule, "vocabulary": 2, "length": 5} for rule in (token_rule, block_rule) if FULL),
    ],
)
def test_texts_have_the_targets_probabilities(options):
    assert error(**{"prefixes": [[1, 2, 0, 1]], **options}) < 1e-6


def test_texts_of_plain_decoding_have_the_models_probabilities():
    (target,), sampling = small(1, 4), Sampling(0.8, 3, 0.95, 1.2)
    assert largest_error(lambda prefixes: regrSampling(prefixes, target, 4, sampling)[0], target, 4, sampling) < 1e-6


def scoring_with(wrong):
    """A target that scores guesses with `wrong(sampling)`."""

    class Target(FlawedModel):
        def score_block(self, block, positions, q, u, sampling, *rest):
            return super().score_block(block, positions, q, u, wrong(sampling), *rest)

    return Target


def q_at_the_targets_temperature(draft, *own):
    return unfiltered(ModelDrafter(draft, *own), FREE)


def penalty_that_forgets_the_guesses(patch):
    """At each position of a block the tokens before it count, guesses included."""
    patch.setattr("decoding.model.seen_after", lambda seen, block: seen[:, None].expand(-1, block.shape[1], -1))


def positions_off_by_one_in_the_target(patch):
    right = Rows.positions
    patch.setattr(Rows, "positions", lambda rows, first, count: right(rows, first + (first == -1), count))


@pytest.mark.parametrize(
    "mistake, options",
    [
        *((None, {"gamma": 1, "verify": rule}) for rule in (always_accept, replace_from_p, unverified_last, p_shifted)),
        (None, {"target": scoring_with(lambda sampling: FREE), "sampling": Sampling(1.0, 0, 0.8)}),
        (None, {"target": scoring_with(lambda sampling: sampling.but(0.4, None)), "own": (0.4, None)}),
        (None, {"drafter": q_at_the_targets_temperature, "own": (0.4, None)}),
        (penalty_that_forgets_the_guesses, {"sampling": SETTINGS[3], "vocabulary": 5}),
        (positions_off_by_one_in_the_target, {}),
    ],
)
def test_a_planted_mistake_in_a_rule_or_in_the_loop_is_caught(mistake, options, monkeypatch):
    if mistake:
        mistake(monkeypatch)
    assert error(**options) > 1e-3


def test_nothing_is_guessed_past_a_rows_end(pair):
    """There is no p there, and the block rule, which looks ahead, would decide by it: texts were off by 3e-5."""
    target, left = pair[0], []

    def observer(rows, guesses, p, accepted):
        left.append(list(rows.left))
        assert all((q.sum(-1) > 0).sum() <= max(0, most - 1) for q, most in zip(guesses.q, rows.left))

    generator = torch.Generator().manual_seed(0)
    specSampling(PROMPTS, target, ModelDrafter(near(target)), 20, 6, FREE, generator=generator, observer=observer)
    # A row was near its end beside one that was not.
    assert any(0 < min(filter(None, each)) < min(max(each), 7) for each in left)


def test_drawn_texts_are_distributed_as_the_targets():
    """With the random numbers of a run instead of every outcome: 10,000 draws, or 200,000 with FULL=1."""
    (target, draft), prefixes = small(2, 6), [[1, 2, 3], [4]]
    tokens, _ = specSampling(
        prefixes * (DRAWS // 2), target, ModelDrafter(draft), 4, 3, FREE, None, torch.Generator().manual_seed(0)
    )
    for row, prefix in enumerate(prefixes):
        joint = helpers.joint_distribution(target, prefix, 4, FREE).sum(0)
        assert helpers.chi_square([text[1:] for text in tokens[row::2]], joint, 6) > 1e-4


def test_a_draft_equal_to_the_target_is_always_accepted(pair):
    """Any slot of the draft's cache that held another token's keys would show as a rejection."""
    target, _ = pair
    for sampling in (GREEDY, FREE, Sampling(0.85, 0, 0.9, 1.3)):
        same, generator = ModelDrafter(near(target, noise=0)), torch.Generator().manual_seed(0)
        _, records = specSampling(PROMPTS, target, same, 30, 4, sampling, generator=generator)
        for record in records:
            assert record.committed == [1] + [5] * 5 + [4] and record.alpha > 0.999


def test_a_row_ends_at_its_own_end_of_text_or_at_max_len(pair):
    target, draft = pair[0], ModelDrafter(near(pair[0]))
    free = regrSampling(PROMPTS, target, 40, GREEDY)[0]
    end = free[0][20]
    stopped = [row[: row.index(end) + 1] if end in row else row for row in free]
    assert regrSampling(PROMPTS, target, 40, GREEDY, end)[0] == stopped and len(stopped[0]) < 40
    for ends in end, [end, -1], {end}:  # A model's configuration may name several ids.
        assert specSampling(PROMPTS, target, draft, 40, 4, GREEDY, ends)[0] == stopped
    for max_len in 1, 2, 3, 5, 6, 7:
        texts = specSampling(PROMPTS, target, draft, max_len, 4, GREEDY)[0]
        assert texts == [text[:max_len] for text in free]


def test_guesses_after_the_end_of_a_text_do_not_count():
    """All guesses are accepted, and the second token ends the text."""
    target = helpers.tiny(seed=3)
    (whole,), _ = specSampling(PROMPTS[:1], target, ModelDrafter(target), 30, gamma=4, sampling=GREEDY)
    place = next(i for i in range(1, 20) if whole[i] not in whole[:i] and i % 5 in (2, 3))
    seen = []
    grown = lambda text, tokens, guessed: seen.append((len(tokens), guessed))  # noqa: E731
    drafter, end = ModelDrafter(target), whole[place]
    (text,), (record,) = specSampling(PROMPTS[:1], target, drafter, 30, 4, GREEDY, end, callback=grown)
    assert text == whole[: place + 1] and record.alpha == 1
    last = record.committed[-1]
    assert last < 5 and (record.drafted[-1], record.accepted[-1], seen[-1]) == (last, last, (last, last))
    tested = sum(tested for tested, _ in record.acceptance_by_position)
    assert tested == sum(record.committed[1:]) - (len(record.committed) - 2)


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


def test_figures_of_a_record_made_by_hand():
    record = Record([0.5, 0.7, 1.0], [1, 3, 2], [0, 2, 3], [0, 2, 1])
    assert (record.tokens, record.ttft, record.tokens_per_round) == (6, 0.5, 2.5)
    assert record.tpot == pytest.approx(0.1) and record.throughput == pytest.approx(6)
    assert record.acceptance_by_position == [(2, 2), (2, 1), (0, 0)] and record.alpha == 0.75
    record = Record([0.5], [1], [0], [0])  # What one token cannot tell is nan.
    assert all(map(math.isnan, (record.tpot, record.tokens_per_round, record.alpha)))
