"""Training a head: its chain is what decoding does, its losses and figures are right, and it goes on where it stopped."""

import json
import math

import helpers
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from engine.head import HeadModel, load_head
from inputs.files import DATASETS
from inputs.models import load_model, model_version
from inputs.tokenizers import load_tokenizer
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from scripts import headTexts, trainHead
from scripts.headTexts import OutputLayer
from scripts.trainHead import (
    GAMMA,
    Batch,
    ChainLoss,
    Labels,
    Recipe,
    TrainedHead,
    batch_of,
    chain_weights,
    chances,
    measure,
    new_network,
    rounds,
    shifted,
)
from specSampling import specSampling
from utils import Sampling, probabilities

SAMPLE = DATASETS / "sample" / "articles.raw"


@pytest.fixture
def small(monkeypatch):
    """Little text, short rows, and a measurement at the end alone."""
    for name, value in {"TEXTS": 6, "HELD_OUT": 3, "TOGETHER": 4, "LENGTH": 96, "PROMPT": (4, 12)}.items():
        monkeypatch.setattr(headTexts, name, value)
    for name, value in {"BATCH": 128, "LENGTHS": (32, 64), "MEASURED": 1}.items():
        monkeypatch.setattr(trainHead, name, value)


def train(target, out, *flags):
    command = [target, out, "--texts", SAMPLE, "--written", 300, "--device", "cpu", *flags]
    return trainHead.main([str(word) for word in command])


@pytest.fixture
def target():
    """A random target. Its distributions are so flat that a head which has learnt nothing often guesses right."""
    made = helpers.tiny(layers=3, sharpness=1.0)
    made.model.requires_grad_(False)
    return made


@pytest.fixture
def network(target):
    """An untrained head of it."""
    torch.manual_seed(1)
    head = new_network(Recipe(), target, None)
    for name, weight in head.parameters_of_training().items():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3 if weight.ndim == 2 else 0.1)
    return head


def a_batch(target, tokens, kept_as=torch.float32):
    """The batch of int64 `tokens[B, n]`, read by the target, and its output layer. All are of one text."""
    layers = headTexts.tapped(target.model.config, "three")
    with torch.no_grad():
        read = target.model.base_model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    states = torch.cat([read[layer] for layer in layers], -1).to(kept_as).float()
    output = OutputLayer.of(target.model, torch.arange(target.vocabulary))
    sums = headTexts.sums_of(output, states[..., -32:])
    zeros = torch.zeros_like(tokens)
    return Batch(tokens, zeros, zeros == 0, shifted(states, 1), states[..., -32:], sums), output


def test_the_chain_is_what_decoding_computes(target, network):
    """At each place, a `HeadModel` reads the text so far and guesses the tokens that the text goes on with."""
    tokens = torch.randint(1, 61, (1, 12), generator=torch.Generator().manual_seed(0))
    batch, output = a_batch(target, tokens)
    with torch.no_grad():
        expected = output(network.chain(batch, GAMMA))[:, 0]
    head = HeadModel(network, target)
    for last in range(1, 12 - GAMMA):  # the last committed token's place: its feature is not known
        target.reserve(1, 16), head.reserve(1, 16)
        place = torch.arange(12)[None]
        target.forward(tokens[:, :last], place[:, :last])
        logits = head.forward(tokens[:, : last + 1], place[:, : last + 1])[0, -1]
        for step in range(GAMMA):
            torch.testing.assert_close(logits, expected[step, last + step], atol=1e-4, rtol=1e-4)
            at = slice(last + step + 1, last + step + 2)
            logits = head.forward(tokens[:, at], place[:, at])[0, -1]


def naive_attention(layer, inputs, angles, texts):
    """The attention of the last step, `[n, d]`, one query after the other. inputs: `[n, d]` of each step so far."""
    cos, sin = (x[0] for x in angles)

    def rotated(x, t):
        half = x.shape[-1] // 2
        return x * cos[t] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[t]

    def heads(project, x):
        return project(x).view(-1, layer.head_dim)

    n, j, out = len(inputs[0]), len(inputs), []
    groups = layer.q_proj.out_features // layer.k_proj.out_features
    for t in range(n):
        seen = [(0, s) for s in range(t - j + 2) if texts[s] == texts[t]]
        seen += [(i - 1, t - j + i) for i in range(2, j + 1) if t - j + i >= 0]
        q = rotated(heads(layer.q_proj, inputs[-1][t]), t)
        k = torch.stack([rotated(heads(layer.k_proj, inputs[i][s]), s) for i, s in seen]).repeat_interleave(groups, 1)
        v = torch.stack([heads(layer.v_proj, inputs[i][s]) for i, s in seen]).repeat_interleave(groups, 1)
        weights = ((q * k).sum(-1) * layer.scaling).softmax(0)
        out.append(layer.o_proj((weights[..., None] * v).sum(0).flatten()))
    return torch.stack(out)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_attention_of_each_step_is_that_of_a_loop(groups):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4 // groups, "num_hidden_layers": 1}
    head = TrainedHead(LlamaConfig(vocab_size=9, head={"layers": [1]}, **sizes)).double()
    layer = head.model.layers[0].self_attn
    texts = torch.tensor([[0] * 5 + [1] * 6])
    inputs = torch.randn(GAMMA, 1, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = head.model.rotary_emb(inputs[0], torch.arange(11)[None])
    cache, weights = trainHead.KeysValues(texts), chain_weights(texts, GAMMA)
    for step in range(GAMMA):
        found = trainHead.attention(layer, inputs[step], angles, cache)[0]
        expected = naive_attention(layer, inputs[: step + 1, 0], angles, texts[0])
        there = weights[step, 0] > 0
        assert there.sum() == 11 - 2 * step
        torch.testing.assert_close(found[there], expected[there])


def test_a_window_knows_where_texts_begin():
    part = {
        "tokens": torch.arange(10, dtype=torch.int32),
        "text": torch.tensor([0] * 4 + [1] * 6, dtype=torch.int32),
        "drawn": torch.ones(10, dtype=torch.bool),
        "states": torch.arange(1.0, 21.0).view(10, 2),
        "sums": torch.zeros(10, 3),
    }
    batch = batch_of([(part, 0, 5), (part, 2, 5), (part, 5, 5)], 1, torch.device("cpu"))
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [5, 6, 7, 8, 9]]
    assert batch.before[..., 0].tolist() == [[0, 1, 3, 5, 0], [3, 5, 0, 9, 11], [9, 11, 13, 15, 17]]
    assert batch.last[..., 0].tolist() == [[2, 4, 6, 8, 10], [6, 8, 10, 12, 14], [12, 14, 16, 18, 20]]
    assert chain_weights(batch.text, 3)[:, 1].tolist() == [[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]


def test_labels_are_the_distributions_that_the_target_draws_from(target):
    tokens = torch.randint(1, 61, (1, 30), generator=torch.Generator().manual_seed(0))
    batch, output = a_batch(target, tokens, torch.bfloat16)
    logits = output(batch.last[0])
    torch.testing.assert_close(logits, target.score(tokens)[0], atol=0.1, rtol=0.1)
    few = torch.tensor([1, 5, 8, 30, 44])
    for some, places in (output, slice(None)), (OutputLayer.of(target.model, few), few):
        labels = Labels.of(some, batch.last[0], batch.sums[0])
        torch.testing.assert_close(labels.plain, logits.softmax(-1)[:, places], atol=1e-5, rtol=1e-4)
        expected = probabilities(logits, trainHead.SAMPLING)[:, places]
        torch.testing.assert_close(labels.p, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [61, 20])
def test_the_gradient_of_the_cross_entropy_is_autograds(target, count):
    generator = torch.Generator().manual_seed(0)
    batch, _ = a_batch(target, torch.randint(1, 61, (1, 80), generator=generator), torch.bfloat16)
    output = OutputLayer.of(target.model, torch.arange(count))
    hidden, weights = torch.randn(2, 80, 32, generator=generator), torch.rand(2, 80, generator=generator)
    one, two = (hidden.clone().requires_grad_() for _ in range(2))
    loss = ChainLoss.apply(one, batch.last[0], batch.sums[0], weights, output, False)
    loss.backward()
    p = Labels.of(output, batch.last[0], batch.sums[0]).plain
    expected = -((p * output(two).log_softmax(-1)).sum(-1) * weights).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(one.grad, two.grad, atol=1e-5, rtol=1e-4)


def test_the_figures_are_those_of_decoding(target, network):
    """The share of guesses that pass and the tokens of a round, from texts that the target drew, and from speculative
    decoding with the same head."""
    target.context = 10**6
    few = Sampling(0.85, 0, 0.9)
    generator = torch.Generator().manual_seed(0)
    texts, _ = regrSampling([[3]] * 60, target, 60, few, generator=generator)
    batches = []
    for text in texts:
        batch, output = a_batch(target, torch.tensor([[3, *text]]), torch.bfloat16)
        batches.append(batch._replace(drawn=torch.arange(61)[None] > 0))
    quality = measure(network, output, batches, torch.float32)
    head = HeadModel(network, target)
    _, records = specSampling([[3]] * 60, target, ModelDrafter(head), GAMMA, 60, few, generator=generator)
    tested, passed = np.array([record.acceptance_by_position for record in records]).sum(0).T
    for found, share, count in zip(quality.acceptance, passed / tested, tested):
        assert abs(found - share) < 4 * math.sqrt(0.25 / count) + 0.01
    tokens = np.mean([record.tokens_per_round for record in records])
    assert quality.tokens_per_round == pytest.approx(tokens, rel=0.1)


def test_rounds_are_those_of_each_way_to_decode():
    """Against drawing which guesses pass."""
    rng = np.random.default_rng(0)
    ratio, n = rng.random((2, 14)), 14
    drawn = [False] * 3 + [True] * 11
    tested, passed = rounds(ratio, ratio, drawn)
    counts = np.zeros((2, 2))
    for _ in range(20_000):
        s = 3
        while s < n - 1:
            whole, j = s + 3 < n, 0
            while j < 2 and s + j < n and rng.random() < ratio[j, s + j]:
                counts[:, j] += whole
                j += 1
            if j < 2:
                counts[0, j] += whole
            s += j + 1
    assert np.allclose(counts / 20_000, [tested, passed], atol=0.02)


def test_what_is_not_guessed_never_passes(target):
    batch, _ = a_batch(target, torch.randint(1, 61, (1, 30), generator=torch.Generator().manual_seed(0)))
    some = OutputLayer.of(target.model, torch.arange(0, 60, 3))
    following = torch.arange(1, 31)
    overlap, ratio = chances(some, torch.randn(2, 30, 32), batch.last[0], batch.sums[0], following)
    assert (ratio[:, following % 3 != 0] == 0).all() and (overlap <= 1).all()


def test_a_short_training_makes_a_head_that_loads_and_guesses_better(pair_folder, tmp_path, small, capsys):
    out = tmp_path / "head"
    assert train(pair_folder / "target", out, "--steps", 30, "--draftVocab", 100) == 0
    assert "tokens a round" in capsys.readouterr().out
    tokenizer = load_tokenizer(pair_folder / "target")
    target = load_model(pair_folder / "target", tokenizer, "float32", "cpu")
    head = load_head(out, target, model_version(pair_folder / "target"))
    assert head.model.config.head["tokens"] == 100
    assert head.parameters < target.parameters
    lines = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 30 and len(lines[-1]["acceptance"]) == GAMMA
