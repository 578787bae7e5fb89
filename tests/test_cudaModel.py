"""What is captured on a GPU, run again without one. What a capture forbids, and the distribution of texts, are in
test_softwareCuda.py."""

import itertools

import helpers
import pytest
import torch
from test_acceptance import watched_alpha
from test_specSampling import FREE, PROMPTS, near

from decoding.lengthRules import Fixed
from decoding.rows import Rows, uniform
from decoding.verification import RULES
from engine import compiledModel
from engine.cudaModel import CudaModel
from engine.steps import Block, Draw, Prompt
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling


def captured(model, *shapes):
    """`model`, as if its steps of these shapes were captured on a GPU."""
    model = CudaModel(model.model, model.vocabulary, model.name)
    model.reads_filled = False
    model.add(set(shapes))
    return model


def draw_key(read, count, sampling):
    """The key of a capture that draws for one row."""
    return "draw", (1, read), (1, read + count - 1), (count, 1), sampling


def score_key(rows, width, n, sampling, rule):
    """The key of a capture that scores and verifies blocks with n guesses."""
    return "score_block", (rows, width), (rows, width), (rows, n, 61), (rows, n + 1), sampling, rule


@pytest.mark.parametrize("rule", RULES.values())
def test_recorded_forwards_are_the_same_without_a_gpu(rule):
    """The steps of a recording, copied inputs and filled-up blocks, run again where a GPU would replay them."""
    eager, target = helpers.tiny(), captured(helpers.tiny(), Block(1, 1), Block(1, 5), Draw(1, 1, 1))
    draft = captured(near(helpers.tiny(), noise=0.1), Block(1, 2), Draw(1, 2, 4))
    for prompt in PROMPTS:
        wanted = regrSampling([prompt], eager, 40, GREEDY)[0]
        assert specSampling([prompt], target, ModelDrafter(draft), 40, 4, GREEDY, verify=rule)[0] == wanted
        assert regrSampling([prompt], target, 40, GREEDY)[0] == wanted
    # A round without guesses uses the recording of plain decoding.
    assert target.used > 100
    assert set(target.captures) == {score_key(1, 5, 4, GREEDY, rule), draw_key(1, 1, GREEDY)}
    assert set(draft.captures) == {draw_key(2, 4, GREEDY)}


def test_a_cascades_inner_target_is_recorded_too():
    """It has tokens to read that nobody judges: as many as it is behind."""
    target = captured(helpers.tiny(), Block(1, 4))
    mid = captured(near(helpers.tiny(), noise=0.1), Block(1, 2), Block(1, 4))
    drafter = CascadeDrafter(mid, ModelDrafter(near(helpers.tiny(), noise=0.2)), Fixed(2))
    for prompt in PROMPTS:
        wanted = regrSampling([prompt], helpers.tiny(), 40, GREEDY)[0]
        assert specSampling([prompt], target, drafter, 40, 3, GREEDY)[0] == wanted
    assert {key[:4] for key in mid.captures} >= {score_key(1, 4, n, GREEDY, None)[:4] for n in (2, 3)}


def test_draws_are_captured_with_the_drafts_own_sampling():
    target = captured(helpers.tiny(), Block(1, 1), Block(1, 5))
    draft = captured(near(helpers.tiny()), Block(1, 2), Draw(1, 2, 4))
    wanted = regrSampling(PROMPTS[:1], helpers.tiny(), 40, GREEDY)[0]
    assert specSampling(PROMPTS[:1], target, ModelDrafter(draft, 0.4, 0.8), 40, 4, GREEDY)[0] == wanted
    assert set(draft.captures) == {draw_key(2, 4, Sampling(0.4, 0, 0.8))}
    assert {key[5] for key in target.captures} == {GREEDY}


def test_what_is_not_captured():
    """A rule that waits, and tokens that are penalised as they come: they only use the forwards."""
    target, drafter = captured(helpers.tiny(), Block(1, 1), Block(1, 5)), ModelDrafter(near(helpers.tiny(), noise=0.3))
    forwards = {("read_block", (1, width), (1, width)) for width in (1, 5)}
    alpha = watched_alpha(PROMPTS, target, drafter, 20)
    assert alpha == pytest.approx(watched_alpha(PROMPTS, helpers.tiny(), drafter, 20), abs=1e-5)
    assert ("read_block", (1, 5), (1, 5)) in target.captures and set(target.captures) <= forwards
    penalised = Sampling(0.0, 0, 1.0, 1.3)
    wanted = regrSampling(PROMPTS[:1], helpers.tiny(), 30, penalised)[0]
    assert specSampling(PROMPTS[:1], target, drafter, 30, 4, penalised)[0] == wanted
    assert ("read_block", (1, 5), (1, 5)) in target.captures and set(target.captures) <= forwards


@torch.inference_mode()
def judged(models, rows, n, behind, sampling, rule):
    """What each of `models` makes of the same blocks of n drafts; of two rows one guesses less."""
    generator = torch.Generator().manual_seed(10 * n + behind)
    prompts = torch.tensor([[5, 9, 2, 11, 30], [7, 7, 30, 1, 8]])[:rows]
    q = torch.rand(rows, n, 61, generator=generator).pow(4)
    q = q / q.sum(-1, keepdim=True)
    if rows == 2:
        q[1, n - 1 :] = 0
    positions = torch.arange(4 - behind, 5 + n).expand(rows, -1)
    for turn in range(6):  # the first of them makes the recording
        drafts = torch.randint(61, (rows, n), generator=generator)
        block = torch.cat([prompts[:, 4 - behind :], drafts], 1)
        u = torch.rand(rows, n + 1, generator=generator)
        u[:, :n] *= turn % 3 / 20  # 0: every guess stands that p allows
        found = []
        for model in models:
            model.reserve(rows, 20)
            if not turn:
                model.forward(prompts, torch.arange(5).expand(rows, 5), keep=torch.tensor([4]))
            found.append(model.score_block(block, positions, q, u, sampling, rule))
        yield found


def unlike(model, rule, sampling=FREE):
    """How many blocks `model` judges unlike a model without recordings."""
    eager, different, accepted = helpers.tiny(), 0, set()
    for b, n, behind in itertools.product((1, 2), range(5), (0, 1)):
        for wanted, found in judged((eager, model), b, n, behind, sampling, rule):
            assert found[0].shape == (b, n + 1, 61)
            torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-4)
            different += not (torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2]))
            accepted |= set(wanted[1].tolist())
    assert accepted == set(range(5))
    return different


def any_width():
    return captured(helpers.tiny(), *(Block(rows, width) for rows in (1, 2) for width in (1, 3, 6)))


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize("sampling", [FREE, Sampling(0.9, 40, 0.99)])
def test_a_judged_block_is_what_it_is_without_recordings(rule, sampling):
    """Of any width, filled up or not, of rows with fewer guesses than others, and where nothing is guessed."""
    model = any_width()
    assert unlike(model, rule, sampling) == 0
    wanted = {score_key(2, w, w - b, sampling, rule) for w in (1, 3, 6) for b in (1, 2) if w >= b}
    assert set(model.captures) == wanted


@pytest.mark.parametrize("rule", RULES.values())
def test_tokens_filled_in_that_count_as_guesses_are_caught(rule, monkeypatch):
    pad = compiledModel.pad
    monkeypatch.setattr(compiledModel, "pad", lambda x, by: pad(x, by, value=0.1 if len(by) == 4 else 0.0))
    assert unlike(any_width(), rule)


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 2, 4), (3, 5)])
@pytest.mark.parametrize("block", [1, 2])
@torch.inference_mode()
def test_a_run_by_graphs_of_any_lengths_is_the_run_step_by_step(counts, block):
    """Longer ones are cut into those there are, the last one is cut short; a block too narrow is filled up."""
    eager, model = helpers.tiny(), captured(helpers.tiny(), *(Draw(2, 2, count) for count in counts))
    prompts = torch.tensor([[5, 9, 2, 11], [7, 7, 30, 1]])
    for wanted in range(1, 8):
        found = []
        for each in eager, model:
            each.reserve(2, 20)
            each.forward(prompts, torch.arange(4).expand(2, 4))
            positions = torch.arange(4 - block, 3 + wanted).expand(2, -1)
            u = uniform(wanted, 2, device=each.device, generator=torch.Generator().manual_seed(wanted))
            found.append(each.draw(prompts[:, -block:], positions, u, Sampling(0.9, 40, 0.95)))
        assert torch.equal(found[0][0], found[1][0]) and found[1][0].shape == (2, wanted)
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-4)
    assert model.used >= 7


# Prompts.


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prompt", [1, 2, 7, 15, 16, 17, 40])
@torch.inference_mode()
def test_the_graph_of_prefill_reads_prompts_of_all_lengths(monkeypatch, prompt, rows):
    """In one chunk and in several, and into a cache that held another text before."""
    monkeypatch.setattr(CudaModel, "chunk", 15)
    eager, target = helpers.tiny(), captured(helpers.tiny(), Prompt(rows))
    texts = torch.randint(61, (2, rows, prompt), generator=torch.Generator().manual_seed(prompt)).tolist()
    for text in texts:
        used = target.used
        wanted, found = (model.prefill(Rows(text, 9, [model])) for model in (eager, target))
        assert target.used == used + -(-prompt // 15) and len(target.captures) == 1
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        for ours, eagers in zip(target.cache.layers, eager.cache.layers):
            torch.testing.assert_close(ours.keys[:, :, :prompt], eagers.keys[:, :, :prompt], atol=1e-5, rtol=1e-4)
    with pytest.raises(AssertionError):  # The mistake that the check is for.
        torch.testing.assert_close(target.prefill(Rows(texts[0], 9, [target])), wanted, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_prompts_of_different_lengths_are_read_eagerly():
    eager, target = helpers.tiny(), captured(helpers.tiny(), Prompt(2))
    wanted, found = (model.prefill(Rows([[5, 9, 2], [7]], 9, [model])) for model in (eager, target))
    assert target.used == 0
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 20])
@torch.inference_mode()
def test_the_graph_of_prefill_reads_what_a_model_missed(monkeypatch, count):
    """Anywhere in a text, in one chunk and in several."""
    monkeypatch.setattr(CudaModel, "chunk", 7)
    eager, target = helpers.tiny(), captured(helpers.tiny(), Prompt(1))
    text = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(count))
    block, at = text[:, 11 : 11 + count], torch.arange(11, 11 + count)[None]
    for model in eager, target:
        model.reserve(1, 60)
        model.forward(text[:, :11], torch.arange(11)[None])
    eager.forward(block, at)
    target.read(block, at)
    wanted, found = (model.forward(text[:, -2:], torch.tensor([[11, 12]]) + count) for model in (eager, target))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_draft_that_missed_rounds_reads_them_by_a_graph_and_guesses_by_another(monkeypatch):
    draft, counts = captured(helpers.tiny(), Prompt(1), Draw(1, 1, 4)), []
    read = draft.read

    def counted(tokens, positions):
        counts.append(tokens.shape[1])
        return read(tokens, positions)

    class Pausing(Fixed):
        """Three rounds without guesses after each with."""

        round = 0

        def gammas(self):
            self.round += 1
            return [0 if self.round % 4 else 4]

    monkeypatch.setattr(draft, "read", counted)
    text = specSampling(PROMPTS[:1], helpers.tiny(), ModelDrafter(draft), 30, Pausing(4), GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], helpers.tiny(), 30, GREEDY)[0]
    # The first is the prompt. Then the draft is five tokens behind, and the graph that guesses reads one.
    assert counts[0] == 4 and set(counts[1:]) == {4} and len(counts) > 3
