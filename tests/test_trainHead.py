"""Training a head: its chain is what decoding computes, its figures are right, and it goes on where it stopped."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import helpers
import numpy as np
import pytest
import torch
from conftest import refused

from engine.head import HeadModel, load_head
from inputs.files import DATASETS
from inputs.models import load_model, load_tokenizer, model_version
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from scripts import headTexts, trainHead, training
from scripts.headTexts import TextBatch, batch_of, chat_pieces, hidden_states, output_layer
from scripts.medusa import MedusaDrafter, MedusaHeads
from scripts.trainHead import begin_near_target, chain_weights, new_network, shifted
from scripts.training import GAMMA, SAMPLING, chain_loss, distributions, output_logits, sums_of
from specSampling import specSampling
from utils import Sampling, pick, probabilities

SAMPLE = DATASETS / "sample" / "articles.raw"


def make_small(monkeypatch):
    for name, value in {"TOGETHER": 4, "LENGTH": 96, "PROMPT": (4, 12), "TEXTS": 6, "HELD_OUT": 3}.items():
        monkeypatch.setattr(headTexts, name, value)
    monkeypatch.setattr(trainHead, "RECIPE", replace(trainHead.RECIPE, batch=128, lengths=(32, 64)))
    monkeypatch.setattr(training, "LOG_LINES", 1)


@pytest.fixture
def small(monkeypatch):
    """Little text, short rows, and a measurement at the end alone."""
    make_small(monkeypatch)


def command(target, out, *flags):
    return [str(word) for word in (target, out, "--texts", SAMPLE, "--written", 300, "--device", "cpu", *flags)]


@pytest.fixture
def target(request):
    """A random target. Its distributions are so flat that a head which has learnt nothing often guesses right."""
    model = helpers.tiny(getattr(request, "param", "gpt_neox"), layers=3, sharpness=1.0)
    model.model.requires_grad_(False)
    return model


@pytest.fixture
def network(target):
    """An untrained head of it."""
    torch.manual_seed(1)
    head = new_network(target, None)
    for weight in [p for p in head.parameters() if p.requires_grad]:
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3 if weight.ndim == 2 else 0.1)
    return head


def random_tokens(*shape):
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def a_batch(target, tokens, kept_as=torch.float32):
    """The batch of int64 `tokens[B, n]`, read by the target. All are of one text, and drawn."""
    states = hidden_states(target, tokens).to(kept_as).float()
    zeros, last = torch.zeros_like(tokens), states[..., -32:]
    return TextBatch(tokens, zeros, zeros == 0, shifted(states, 1), last, sums_of(output_layer(target), last))


FAMILIES = pytest.mark.parametrize("target", ["gpt_neox", "llama"], indirect=True)  # Llama's keys are for several heads


@FAMILIES
@pytest.mark.parametrize("late", [False, True])
def test_the_chain_is_what_decoding_computes(target, network, late):
    """At each place, a `HeadModel` reads the text so far and guesses the tokens that the text goes on with.

    late: a planted mistake, each feature is read one token too late.
    """
    tokens, place = random_tokens(1, 12), torch.arange(12)[None]
    batch = a_batch(target, tokens)
    batch = batch._replace(before=shifted(batch.before, int(late)))
    with torch.no_grad():
        expected = output_logits(output_layer(target), network.chain(batch, GAMMA))[:, 0]
    head, agree = HeadModel(network, target), True
    for last in range(1, 12 - GAMMA):  # the last committed token's place: its feature is not known
        target.reserve(1, 16), head.reserve(1, 16)
        target.forward(tokens[:, :last], place[:, :last])
        logits = head.forward(tokens[:, : last + 1], place[:, : last + 1])[0, -1]
        for step in range(GAMMA):
            agree &= torch.allclose(logits, expected[step, last + step], atol=1e-4, rtol=1e-4)
            at = slice(last + step + 1, last + step + 2)
            logits = head.forward(tokens[:, at], place[:, at])[0, -1]
    assert agree == (not late)


@FAMILIES
@torch.no_grad()
def test_the_chains_of_two_texts_in_a_window_are_those_of_each_alone(target, network):
    texts = [a_batch(target, tokens) for tokens in random_tokens(1, 11).split([5, 6], 1)]
    window = TextBatch(*(torch.cat(parts, 1) for parts in zip(*texts)))
    window = window._replace(text=torch.tensor([[0] * 5 + [1] * 6]))
    there = chain_weights(window.text, GAMMA) > 0
    assert there.sum(-1).flatten().tolist() == [11, 9, 7, 5]
    alone = torch.cat([network.chain(text, GAMMA) for text in texts], 2)
    torch.testing.assert_close(network.chain(window, GAMMA)[there], alone[there], atol=1e-4, rtol=1e-4)


def test_a_window_knows_where_texts_begin():
    part = {"tokens": torch.arange(10), "text": torch.tensor([0] * 4 + [1] * 6), "drawn": torch.ones(10)}
    part |= {"states": torch.arange(1.0, 21.0).view(10, 2), "sums": torch.zeros(10, 3)}
    batch = batch_of([(part, 0, 5), (part, 2, 5), (part, 5, 5)], torch.zeros(7, 1))
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [5, 6, 7, 8, 9]]
    assert batch.before[..., 0].tolist() == [[0, 1, 3, 5, 0], [3, 5, 0, 9, 11], [9, 11, 13, 15, 17]]
    assert batch.last[..., 0].tolist() == [[2, 4, 6, 8, 10], [6, 8, 10, 12, 14], [12, 14, 16, 18, 20]]
    assert chain_weights(batch.text, 3)[:, 1].tolist() == [[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1]]


def test_labels_are_the_distributions_that_the_target_draws_from(target):
    batch = a_batch(target, random_tokens(1, 30), torch.bfloat16)
    logits = output_logits(output_layer(target), batch.last[0])
    for tokens in torch.arange(61), torch.tensor([1, 5, 8, 30, 44]):
        plain, drawn = distributions(output_logits(output_layer(target, tokens), batch.last[0]), batch.sums[0])
        torch.testing.assert_close(plain, logits.softmax(-1)[:, tokens], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(drawn, probabilities(logits, SAMPLING)[:, tokens], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [61, 20])
def test_the_gradient_of_the_cross_entropy_is_autograds(target, count):
    generator = torch.Generator().manual_seed(0)
    batch = a_batch(target, random_tokens(1, 80), torch.bfloat16)
    output = output_layer(target, torch.arange(count))
    hidden, weights = torch.randn(2, 80, 32, generator=generator), torch.rand(2, 80, generator=generator)
    one, two = (hidden.clone().requires_grad_() for _ in range(2))
    loss = chain_loss(one, batch.last[0], batch.sums[0], weights, output, False)
    loss.backward()
    p, _ = distributions(output_logits(output, batch.last[0]), batch.sums[0])
    expected = -((p * output_logits(output, two).log_softmax(-1)).sum(-1) * weights).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(one.grad, two.grad, atol=1e-5, rtol=1e-4)


@pytest.fixture
def medusa(target):
    """Medusa's heads, a little away from their beginning."""
    torch.manual_seed(1)
    heads = MedusaHeads(target.model.get_output_embeddings().weight)
    for weight in heads.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return heads.requires_grad_(False)


@FAMILIES
@pytest.mark.parametrize("late", [0, 1])
def test_medusas_heads_guess_in_training_what_they_guess_in_decoding(target, medusa, late):
    """late: a planted mistake, the drafter reads the hidden state of one token before."""
    tokens = random_tokens(1, 12)
    expected = medusa.chain(a_batch(target, tokens), GAMMA)[:, 0]
    agree, drafter, u = True, MedusaDrafter(medusa, target), torch.rand(1, GAMMA)
    for last in range(2, 12 - GAMMA):
        rows = SimpleNamespace(texts=[tokens[0].tolist()], committed_lengths=[last + 1 - late])
        rows.uniform = lambda counts: u[:, : max(counts)]
        guesses = drafter.draft(rows, [GAMMA + 1], SAMPLING)
        q = probabilities(torch.stack([expected[step, last + step] for step in range(GAMMA)]), SAMPLING)[None]
        agree &= torch.allclose(guesses.q, q, atol=1e-4, rtol=1e-4)
        assert torch.equal(guesses.drafts, pick(guesses.q, u))
    assert agree == (not late)


@FAMILIES
def test_greedy_texts_with_medusas_heads_are_the_targets(target, medusa):
    texts, greedy = [[3], [5, 9, 1]], Sampling(0.0)
    drafter = MedusaDrafter(medusa, target)
    found, records = specSampling(texts, target, drafter, 20, 8, greedy)
    assert found == regrSampling(texts, target, 20, greedy)[0]
    assert max(max(record.drafted) for record in records) == GAMMA


@pytest.mark.parametrize("kind", ["eagle-3", "medusa"])
def test_the_figures_are_those_of_decoding(target, network, medusa, kind):
    """The share of guesses that pass and the tokens of a round, from texts that the target drew, and from speculative
    decoding with the same head."""
    target.context = 10**6
    network = medusa if kind == "medusa" else network
    generator = torch.Generator().manual_seed(0)
    texts, _ = regrSampling([[3, 3]] * 60, target, 60, generator=generator)
    batches = [a_batch(target, torch.tensor([[3, 3, *text]]), torch.bfloat16) for text in texts]
    batches = [batch._replace(drawn=torch.arange(62)[None] > 1) for batch in batches]
    quality = headTexts.acceptance_on(network, output_layer(target), batches, torch.float32)
    of_heads = kind == "medusa"
    drafter = MedusaDrafter(medusa, target) if of_heads else ModelDrafter(HeadModel(network, target))
    _, records = specSampling([[3, 3]] * 60, target, drafter, 60, GAMMA, generator=generator)
    tested, passed = np.array([record.acceptance_by_position for record in records]).sum(0).T
    for found, share, count in zip(quality["acceptance"], passed / tested, tested):
        assert abs(found - share) < 4 * math.sqrt(0.25 / count) + 0.01
    tokens = np.mean([record.tokens_per_round for record in records])
    assert quality["tokens_per_round"] == pytest.approx(tokens, rel=0.05)


def test_what_is_not_guessed_never_passes(target):
    batch = a_batch(target, random_tokens(1, 30))
    some = output_layer(target, torch.arange(0, 60, 3))
    following = torch.arange(1, 31)
    overlap, ratio = headTexts.passing_chances(some, torch.randn(2, 30, 32), batch.last[0], batch.sums[0], following)
    assert (ratio[:, following % 3 != 0] == 0).all() and (overlap <= 1).all()


def test_a_short_training_makes_a_head_that_loads(pair_folder, tmp_path, small, capsys):
    out, folder = tmp_path / "head", pair_folder / "target"
    assert trainHead.main(command(folder, out, "--steps", 30, "--draftVocab", 100)) == 0
    assert "tokens a round" in capsys.readouterr().out
    target = load_model(folder, load_tokenizer(folder), "float32", "cpu")
    assert load_head(out, target, model_version(folder)).model.config.head["tokens"] == 100
    record = json.loads((out / "head-target.json").read_text())
    last = record["variants"]["eagle-3"]["history"][-1]
    assert last["step"] == 30 and len(last["acceptance"]) == GAMMA and record["written"]["tokens"] >= 300
    assert record["command"].startswith("target head --") and "articles.raw" in record["command"]
    assert str(tmp_path) not in json.dumps(record) and str(SAMPLE) not in json.dumps(record)
    (out / "training.pt").unlink()
    weights = (out / "model.safetensors").read_bytes()
    for folder_of_a_model in out, folder:
        assert trainHead.main(command(folder, folder_of_a_model, "--steps", 30)) == 2
        assert "holds a model, or a head without training.pt; name another OUT" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == weights


@pytest.fixture(scope="module")
def sources(pair_folder, tmp_path_factory):
    """What a small training reads: its options, parts, target, and the output layer."""
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        args = trainHead.head_flags(command(pair_folder / "target", tmp_path_factory.mktemp("head")))
        target = load_model(args.folder, load_tokenizer(args.folder), "float32", "cpu")
        target.model.requires_grad_(False)
        return args, headTexts.prepare_parts(args, target), target, output_layer(target)


def head_trainer(sources, out, steps=12, **changes):
    args, *others = sources
    recipe = replace(trainHead.RECIPE, tokens=steps * trainHead.RECIPE.batch, **changes)
    return trainHead.head_trainer(recipe, SimpleNamespace(**vars(args) | {"out": out}), *others)


def test_an_interrupted_training_ends_with_the_same_weights(sources, small, tmp_path, monkeypatch):
    whole, first, second = (head_trainer(sources, tmp_path / name, finish=0.5) for name in ("whole", "cut", "cut"))
    whole.train()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(first, "one_step", Mock(side_effect=KeyboardInterrupt))
        first.train()
    assert first.checkpoint.exists()  # It is there before a head is.
    for _ in range(7):
        first.one_step()
    first.log()
    second.train()
    assert [line["step"] for line in second.history] == [7, 12]
    for one, two in zip(whole.network.parameters(), second.network.parameters()):
        assert torch.equal(one, two)
    with refused("other flags"):
        head_trainer(sources, tmp_path / "cut").train()
    file = tmp_path / "cut" / "training.pt"
    older = torch.load(file)
    del older["about"]  # as an older version wrote it
    for write in lambda: torch.save(older, file), lambda: file.write_bytes(b"broken"):
        write()
        with refused("cannot be read", "name another OUT"):
            head_trainer(sources, tmp_path / "cut", finish=0.5).train()


def test_a_training_begins_on_true_features_alone(sources, small, monkeypatch, tmp_path):
    trainer, steps = head_trainer(sources, tmp_path / "head", opening=0.5), []
    chain = trainer.network.chain
    monkeypatch.setattr(trainer.network, "chain", lambda batch, count: steps.append(count) or chain(batch, count))
    for _ in range(12):
        trainer.one_step()
    assert steps == [1] * 6 + [GAMMA] * 6


@pytest.mark.parametrize("kind, least", [("eagle-3", 0.3), ("eagle-1", 0.1), ("medusa", 0.3)])
def test_the_loss_goes_down(sources, small, tmp_path, kind, least):
    changes = {"finish": 0.0, "kind": kind} | trainHead.RECIPES[kind]
    trainer = head_trainer(sources, tmp_path / "head", steps=50, **changes)
    trainer.train()
    assert np.mean(trainer.losses[-10:]) < trainer.losses[0] - least


def test_the_loss_of_eagle_1_is_that_of_its_paper(sources, small, tmp_path, monkeypatch):
    """A tenth of the cross-entropy to the target's distribution, and the smooth L1 distance of the features."""
    monkeypatch.setattr(trainHead, "NOISE", 0.0)
    trainer = head_trainer(sources, tmp_path / "head", kind="eagle-1", **trainHead.RECIPES["eagle-1"])
    assert trainer.network.fuse.in_features == trainer.network.fuse.out_features  # the last layer alone
    args, (_, *parts), _, output = sources
    batch = headTexts.random_windows(parts, 2, 32, (args.seed, 0), output.weight)
    hidden = trainer.network.chain(batch, 1)[0]
    p, log_q = (output_logits(output, x).softmax(-1) for x in (batch.last, hidden))
    away = torch.nn.functional.smooth_l1_loss(hidden, batch.last.float())
    expected = away - 0.1 * (p * log_q.log()).sum(-1).mean()
    torch.testing.assert_close(trainer.loss(trainer, 2, 32), expected, atol=1e-3, rtol=1e-3)


def test_parts_that_are_there_are_not_made_again(sources, small, monkeypatch):
    args, parts, target, _ = sources
    monkeypatch.setattr(headTexts, "TextWriter", None)
    again = headTexts.prepare_parts(args, target)
    assert [len(part["tokens"]) for part in again] == [len(part["tokens"]) for part in parts]
    assert sum(len(part["tokens"]) for part in again[1:]) >= 300
    with refused("another target or seed"):
        headTexts.prepare_parts(SimpleNamespace(**vars(args) | {"seed": 1}), target)
    with refused("other --texts"):
        headTexts.prepare_parts(SimpleNamespace(**vars(args) | {"passages": args.passages[::-1]}), target)
    file = args.data / "00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with refused("00001.safetensors cannot be read", "remove it"):
        headTexts.prepare_parts(args, target)
    file.write_bytes(whole)


def test_texts_are_what_the_target_writes_after_passages(sources):
    args, (part, *_), target, _ = sources
    tokenizer = load_tokenizer(args.folder)
    first = part["text"] == 0
    begins = tokenizer.decode(part["tokens"][first & ~part["drawn"]])
    assert " ".join(begins.split()) in " ".join(SAMPLE.read_text().split())
    assert 4 <= int((first & ~part["drawn"]).sum()) <= 12
    read = target.model.base_model(part["tokens"][first][None].long(), output_hidden_states=True)
    states = part["states"][first, -32:].float()
    torch.testing.assert_close(states, read.hidden_states[-1][0].float(), atol=0.05, rtol=0.02)


PASSAGES = [f"{i} " + "word " * 99 for i in range(30)]


def test_a_passage_that_counts_twice_is_held_out_with_its_copy(model_folder):
    writer = headTexts.TextWriter(model_folder, "cpu", PASSAGES * 2, 0)
    assert not set(writer.held_out) & set(writer.trained_on)
    assert sorted(writer.held_out + writer.trained_on) == sorted(PASSAGES * 2) and len(writer.held_out) == 6


def test_a_chat_model_writes_both_sides_of_a_conversation(model_folder, small, monkeypatch):
    """The target says the same in every turn."""
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|endoftext|>{% endfor %}"
    (model_folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}<assistant>{% endif %}")
    writer = headTexts.TextWriter(model_folder, "cpu", PASSAGES, 0)
    monkeypatch.setattr(headTexts, "regrSampling", lambda prompts, *_, **options: ([[7, 8, 0] for _ in prompts], None))
    for name, value in {"TURN": 4, "ANSWER": 8, "STARTED": 0.0}.items():
        monkeypatch.setattr(headTexts, name, value)

    def conversations():
        """Token ids of two conversations, and how many of them the target drew."""
        texts = writer.conversations(2, SAMPLING)
        return [[token for token, _ in text] for text in texts], [sum(drawn for _, drawn in text) for text in texts]

    writer.write(1, 0)
    texts, drawn = conversations()
    first, after_user, after_model = chat_pieces(writer.tokenizer)
    assert writer.tokenizer.decode(after_user) == "<|endoftext|><assistant>"
    turns = [*first, 7, 8, *after_user, 7, 8, *after_model, 7, 8, *after_user, 7, 8, 0]
    assert texts[1] == turns and drawn == [5, 5]
    task = texts[0][len(first) : -(len(turns) - len(first) - 2)]
    assert any(words.startswith(writer.tokenizer.decode(task)[:9]) for words in headTexts.INSTRUCTIONS)
    assert texts[0] == [*first, *task, *turns[len(first) + 2 :]]
    monkeypatch.setattr(headTexts, "STARTED", 1.0)
    whole = writer.tokenizer.decode(conversations()[0][0])
    assert any(writer.tokenizer.decode(after_model) + words in whole for words in headTexts.STARTS)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("T --texts nowhere", "no such path exists"),
        ("T --texts SHORT", "passages"),
        ("T --steps 0", "--steps"),
        ("nowhere --steps 1", "there is no model"),
        ("T --draftVocab 301 --steps 1", "exceeds the vocabulary of 300"),
        ("T --seed 1", "free some space"),
        ("T --recipe medusa --draftVocab 9", "--recipe medusa"),
    ],
)
def test_what_is_wrong_is_one_line(pair_folder, text_file, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setattr("inputs.hub.SPARE", 10**18)  # The disk has no room for the texts.
    target, *flags = flags.replace("SHORT", str(text_file)).replace("T ", f"{pair_folder / 'target'} ").split()
    assert trainHead.main(command(target, tmp_path / "head", *flags)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("trainHead: error:") and words in said


@pytest.mark.parametrize("module, name", [("scripts.headTexts", "save_file"), ("torch", "save")])
def test_a_disk_that_fills_up_is_one_line(pair_folder, tmp_path, capsys, monkeypatch, small, module, name):
    """safetensors and torch have errors of their own for it."""

    def full(*args):
        raise RuntimeError("No space left on device (os error 28)")

    monkeypatch.setattr(f"{module}.{name}", full)
    assert trainHead.main(command(pair_folder / "target", tmp_path / "head", "--steps", 1)) == 2
    assert "cannot be written" in capsys.readouterr().err.splitlines()[-1]


def test_a_target_that_scales_its_logits_is_refused(model_folder, monkeypatch):
    target = load_model(model_folder, load_tokenizer(model_folder), "float32", "cpu")
    score = target.score
    monkeypatch.setattr(target, "score", lambda tokens: score(tokens) / 4)
    with refused("changes its logits"):
        headTexts.checked_output_layer(target)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_head_begins_near_its_target(family):
    """Its first hidden states are nearer to the target's last ones than those of a random head, and than those of one
    that was fitted to other tokens."""
    target = helpers.tiny(family, layers=3, initializer_range=0.02)
    target.model.requires_grad_(False)
    *texts, new = (a_batch(target, row[None]) for row in random_tokens(9, 100))

    def away(begun):
        network = new_network(target, None)
        if begun is not None:
            begin_near_target(network, target, begun)
        with torch.no_grad():
            return (network.chain(new, 1)[0] - new.last).square().mean() / new.last.square().mean()

    wrong = [text._replace(tokens=text.tokens.roll(1)) for text in texts]
    assert away(texts) < 0.2 * min(away(None), away(wrong))
