"""Compiled steps against eager ones, and what happens where nothing can be compiled."""

import itertools
import os
import subprocess
import sys

import helpers
import pytest
import torch
from conftest import ROOT
from test_specSampling import PROMPTS, near
from torch.nn.functional import gelu

from decoding.lengthRules import CostAware, DraftConfidence, Fixed, TargetConfidence
from decoding.model import Model
from decoding.rows import Rows
from decoding.trees.tree import Tree
from decoding.trees.verification import TREE_RULES
from engine import cpuModel
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.cpuModel import CpuModel
from engine.kernels import loader, packedLinear
from engine.steps import Block, Draw, Growth, Nodes, Prompt, Round, whole_round
from methods.cascade import CascadeDrafter
from methods.contrastive import Contrast
from methods.drafters import ModelDrafter
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling, probabilities

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs for a CPU")


def two_layers():
    """A target of two layers; the second one adds little, so that a draft without it guesses well."""
    target = helpers.tiny()
    last = target.model.gpt_neox.layers[1]
    with torch.no_grad():
        for output in last.attention.dense, last.mlp.dense_4h_to_h:
            output.weight.mul_(0.1)
            output.bias.mul_(0.1)
    return target


def first_layer(target):
    """A draft like `target`, of one layer: the more layers, the longer its graphs are compiled."""
    model = near(target, noise=0.1).model
    del model.gpt_neox.layers[1]
    model.config.num_hidden_layers = 1
    return CachedModel(model, target.vocabulary, "draft")


@torch.inference_mode()
def with_graphs(model, *shapes):
    """The same model, compiled, with graphs for these shapes."""
    for shape in model.add(set(shapes)):
        assert model.make(shape)
    return model


@pytest.fixture(scope="module")
def models(kernels):
    """(eager target, compiled target, compiled draft); as few graphs as the tests need, since each takes seconds."""
    torch._dynamo.utils.counters.clear()
    eager = two_layers()
    target, draft = compiled(two_layers()), compiled(first_layer(eager))
    with_graphs(draft, Block(1, 5), Draw(1, 2, 4))
    return eager, with_graphs(target, Prompt(1), Block(1, 5), Draw(1, 1, 1), Round(1, draft, 4)), draft


SAMPLERS = {
    "plain": lambda target, draft, prompt: regrSampling([prompt], target, 60, GREEDY),
    "speculative": lambda target, draft, prompt: specSampling([prompt], target, ModelDrafter(draft), 60, 4, GREEDY),
    "a tree that is a chain": lambda target, draft, prompt: treeSampling(
        [prompt], target, TreeDrafter(draft), 60, Tree.chain(4), GREEDY
    ),
    "cascade": lambda target, draft, prompt: specSampling(
        [prompt], target, CascadeDrafter(draft, ModelDrafter(helpers.tiny(seed=3))), 60, 3, GREEDY
    ),
    "contrastive": lambda target, draft, prompt: regrSampling([prompt], Contrast(target, draft), 60, GREEDY),
    "speculative contrastive": lambda target, draft, prompt: specSampling(
        [prompt], Contrast(target, draft), ModelDrafter(draft), 60, 4, GREEDY
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_writes_with_graphs_what_it_writes_without(models, name):
    eager, target, draft = models
    plain = first_layer(eager)
    for prompt in PROMPTS:
        used = target.used
        assert SAMPLERS[name](target, draft, prompt)[0] == SAMPLERS[name](eager, plain, prompt)[0]
        assert target.used > used


def test_logits_are_eagers_whatever_the_width_the_length_and_what_was_there_before(models):
    eager, target, _ = models
    generator = torch.Generator().manual_seed(0)
    for model in eager, target:
        model.reserve(1, 90)
    prompt = torch.randint(61, (1, 40), generator=generator)
    for model in eager, target:
        model.forward(prompt, torch.arange(40)[None])
    for start, width in ((40, 5), (42, 1), (43, 3), (30, 5), (35, 4), (39, 1), (80, 5), (85, 5), (3, 2)):
        block, at = torch.randint(61, (1, width), generator=generator), torch.arange(start, start + width)[None]
        wanted, found = (model.forward(block, at) for model in (eager, target))
        assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("prompt", [1, 2, 7, 15, 16, 17, 40])
@torch.inference_mode()
def test_the_graph_of_prefill_reads_prompts_of_all_lengths(models, monkeypatch, prompt):
    """In one chunk and in several, and into a cache that held another text before."""
    eager, target, _ = models
    monkeypatch.setattr(target, "chunk", 15)
    text = torch.randint(61, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    used = target.used
    wanted, found = (model.prefill(Rows([text], 9, [model])) for model in (eager, target))
    assert target.used == used + -(-prompt // 15)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for ours, eagers in zip(target.cache.layers, eager.cache.layers):
        torch.testing.assert_close(ours.keys[:, :, :prompt], eagers.keys[:, :, :prompt], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 20])
@torch.inference_mode()
def test_the_graph_of_prefill_reads_what_a_model_missed(models, monkeypatch, count):
    """Anywhere in a text, in one chunk and in several."""
    eager, target, _ = models
    monkeypatch.setattr(target, "chunk", 7)
    text = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(count))
    block, at = text[:, 11 : 11 + count], torch.arange(11, 11 + count)[None]
    for model in eager, target:
        model.reserve(1, 60)
        model.forward(text[:, :11], torch.arange(11)[None])
    eager.forward(block, at)
    target.read(block, at)
    wanted, found = (model.forward(text[:, -2:], torch.tensor([[11, 12]]) + count) for model in (eager, target))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_draft_that_missed_rounds_reads_them_by_a_graph_and_guesses_by_another(models, monkeypatch):
    eager, target, _ = models
    counts, read = [], target.read

    def counted(tokens, positions, lengths=None):
        if lengths is None:  # This is no prompt.
            counts.append(tokens.shape[1])
        return read(tokens, positions, lengths)

    monkeypatch.setattr(target, "read", counted)

    class Pausing(Fixed):
        """Three rounds without guesses after each with."""

        round = 0

        def gammas(self):
            self.round += 1
            return [0 if self.round % 4 else 4]

    text = specSampling(PROMPTS[:1], eager, ModelDrafter(target), 30, Pausing(4), GREEDY)[0]
    # It is five tokens behind, and the graph that guesses reads one.
    assert text == regrSampling(PROMPTS[:1], eager, 30, GREEDY)[0] and set(counts) == {4} and len(counts) > 2


@pytest.mark.parametrize(
    "sampling, own",
    [(Sampling(), Sampling()), (GREEDY, GREEDY), (Sampling(), Sampling(0.4, 0, 1.0)), (GREEDY, Sampling())],
)
@torch.inference_mode()
def test_a_round_by_one_graph_is_the_run_and_the_forward(models, sampling, own):
    """Also at the last positions there are, in caches of different sizes, and where the draft's sampling is its own."""
    _, target, draft = models
    target.reserve(1, 60), draft.reserve(1, 73)
    prompt = torch.randint(61, (1, 40), generator=torch.Generator().manual_seed(0))
    for model in target, draft:
        model.forward(prompt, torch.arange(40)[None])
    for start, read in ((38, 2), (20, 2), (55, 2)):
        tokens, at = prompt[:, start % 38 :][:, :read], torch.arange(start, start + 6).clamp(max=59)[None]
        u = torch.rand(4, 1, generator=torch.Generator().manual_seed(1))
        found = target.run(whole_round, draft, tokens, at, u, sampling, own)
        drafts, q = draft.draw(tokens, at[:, :-1], u, own)
        logits = target.forward(torch.cat([tokens[:, 1:], drafts], 1), at[:, 1:])
        for ours, wanted in zip(found, (drafts, q, probabilities(logits, sampling))):
            torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)
    assert not target.has(Round(1, draft, 3))


def test_a_round_is_one_graph_only_where_nothing_happens_inside_it(models, monkeypatch):
    """Not where a rule stops the guesses, a penalty counts them, or a cascade reads more than one token."""
    _, target, draft = models
    steps, run = [], target.run
    monkeypatch.setattr(target, "run", lambda step, *inputs: steps.append(step) or run(step, *inputs))
    for used, length, sampling in (
        (True, Fixed(4), Sampling()),
        (True, TargetConfidence(4, 0.1), Sampling()),
        (False, Fixed(3), Sampling()),
        (False, DraftConfidence(4, 0.1), Sampling()),
        (True, CostAware(4), Sampling()),
        (False, Fixed(4), Sampling(repetition_penalty=1.2)),
    ):
        steps.clear()
        specSampling(PROMPTS[:1], target, ModelDrafter(draft), 30, length, sampling)
        assert (whole_round in steps) == used


def test_as_many_graphs_as_widths_and_never_another(models):
    _, target, draft = models
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made == 6
    for maximum in (10, 40, 100):
        specSampling(PROMPTS[:1], target, ModelDrafter(draft), maximum, 4, Sampling(1, 0, 1))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made


def test_kernels_belong_to_the_compiled_model(models, monkeypatch):
    """Eager decoding is pure PyTorch, even where another model of the process was compiled."""
    eager, target, draft = models
    assert type(eager).probabilities is Model.probabilities is not type(target).probabilities
    wanted = specSampling(PROMPTS[:1], eager, ModelDrafter(first_layer(eager)), 20, 4, GREEDY)[0]
    for name in loader.SHAPES | {"accept": None, "accept_block": None}:
        monkeypatch.setattr(torch.ops.native, name, lambda *args: pytest.fail("a kernel was called"))
    assert specSampling(PROMPTS[:1], eager, ModelDrafter(first_layer(eager)), 20, 4, GREEDY)[0] == wanted
    with pytest.raises(pytest.fail.Exception):  # The mistake that the check is for.
        monkeypatch.setattr(eager, "probabilities", target.probabilities)
        specSampling(PROMPTS[:1], eager, ModelDrafter(first_layer(eager)), 20, 4, GREEDY)


def test_batches_without_a_graph_of_their_size_are_read_eagerly(models):
    eager, target, draft = models
    used = target.used
    assert (
        specSampling(PROMPTS, target, ModelDrafter(draft), 30, 4, GREEDY)[0]
        == regrSampling(PROMPTS, eager, 30, GREEDY)[0]
    )
    assert target.used == used


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(
    "rows, heads, groups, n, size, reach",
    [(1, 4, 4, 1, 8, 1), (2, 6, 2, 5, 32, 77), (1, 3, 3, 9, 80, 300), (2, 2, 1, 16, 64, 33), (1, 2, 2, 3, 48, 18)],
)
def test_attention_is_torchs(models, dtype, error, rows, heads, groups, n, size, reach):
    """At positions of any order, from queries, keys and values of any order in memory."""
    generator = torch.Generator().manual_seed(0)
    query = 3 * torch.randn(rows, n, heads, size, generator=generator).to(dtype).transpose(1, 2)
    keys, values = (torch.randn(rows, groups, reach + 20, size, generator=generator).to(dtype) for _ in range(2))
    new = [torch.randn(rows, n, groups, size, generator=generator).transpose(1, 2) for _ in range(2)]
    positions = torch.stack([torch.randperm(reach, generator=generator)[:n] for _ in range(rows)])
    wanted_caches = [kept.clone() for kept in (keys, values)]
    for row, (kept, states) in itertools.product(range(rows), zip(wanted_caches, new)):
        kept[row, :, positions[row]] = states[row].to(dtype)
    found = torch.ops.native.attend(query, *new, positions, keys, values, 0.2).transpose(1, 2)
    assert torch.equal(keys, wanted_caches[0]) and torch.equal(values, wanted_caches[1])
    k, v = (x[:, :, :reach].float().repeat_interleave(heads // groups, 1) for x in (keys, values))
    mask = torch.arange(reach) <= positions[:, None, :, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(query.float(), k, v, mask, scale=0.2)
    assert torch.allclose(found.float(), wanted, atol=error, rtol=1e-4)


def test_no_position_beyond_the_slots_is_written(models):
    kept = torch.zeros(1, 1, 4, 8)
    for position in (-1, 4):
        with pytest.raises(RuntimeError, match=f"no slot {position}"):
            torch.ops.native.attend(*(torch.ones(1, 1, 1, 8),) * 3, torch.tensor([[position]]), kept, kept, 1.0)
    assert not kept.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_a_packed_layer_multiplies_as_the_layer_did(dtype, tokens):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(768, 1024)).to(dtype)
    x = torch.randn(1, tokens, 768, dtype=dtype)
    with torch.inference_mode():
        wanted = model(x)
        packed = packedLinear.pack(model)
        assert type(packed[0]) is packedLinear.PackedLinear
        assert torch.allclose(packed(x).float(), wanted.float(), atol=1e-5 if dtype == torch.float32 else 0.02)
        found = torch.ops.native.linear(x, packed[0].packed, packed[0].bias, 1024, True)
        assert torch.allclose(
            found.float(), gelu(packed(x)).float(), atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 0.01
        )


def test_gelu_goes_into_the_layer_before_it_and_sines_are_stored(models):
    """But not where the layer's own output is used too."""

    class Work(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = packedLinear.PackedLinear(torch.randn(40, 8), torch.randn(40))

        def forward(self, x):
            y = self.layer(x)
            return gelu(self.layer(x)), gelu(y), y, x.cos(), (2 * x).sin()

    work, x = Work(), torch.randn(3, 8)
    graph = cpuModel.rewritten(torch.fx.symbolic_trace(work), 2)
    for found, wanted in zip(graph(x), work(x)):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    used = [node.target for node in graph.graph.nodes]
    assert used.count(gelu) == 1 and used.count(torch.ops.native.stored) == 2


def test_gelu_is_torchs_for_every_number(models):
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30, torch.nan])])
    weight = torch.eye(2)[:1]
    packed = packedLinear.PackedLinear(weight, None).packed
    found = torch.ops.native.linear(torch.stack([x, 0 * x.nan_to_num()], 1), packed, None, 1, True)[:, 0]
    torch.testing.assert_close(found, gelu(x), atol=1e-6, rtol=1e-6, equal_nan=True)


@torch.inference_mode()
def test_the_graph_of_prefill_reads_ragged_batches(models, monkeypatch):
    """The rows end in different chunks."""
    monkeypatch.setattr(CpuModel, "chunk", 15)
    eager, target = helpers.tiny(layers=1), with_graphs(compiled(helpers.tiny(layers=1)), Prompt(3))
    used, texts = target.used, [torch.randint(61, (n,)).tolist() for n in (33, 2, 30)]
    wanted, found = (model.prefill(Rows(texts, 9, [model])) for model in (eager, target))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert target.used == used + 3
    again = target.prefill(Rows([text[::-1] for text in texts], 9, [target]))  # The mistake the check is for.
    assert not torch.allclose(again, wanted, atol=1e-2)


TREE = Tree.of("3/2,1,0/1,2,0")


@pytest.fixture(scope="module")
def tree_models(kernels):
    """A target and a draft with graphs for one shape of tree."""
    target = helpers.tiny(seed=0, layers=1)
    rows, draft = len(PROMPTS), compiled(near(target))
    return with_graphs(compiled(target), Nodes(rows, TREE.size + 1)), with_graphs(draft, Growth(rows, 2, TREE))


@pytest.mark.parametrize("rule", TREE_RULES)
def test_texts_with_trees_are_those_of_eager_models(tree_models, rule):
    target, eager = tree_models[0], helpers.tiny(seed=0, layers=1)
    for sampling in (GREEDY, Sampling(0.85, 0, 0.9), Sampling(1.0, 5, 1.0, 1.3)):
        texts = []
        for pair in (tree_models, (eager, near(eager))):
            before = target.used
            generator = torch.Generator().manual_seed(3)
            inputs = PROMPTS, pair[0], TreeDrafter(pair[1]), 40, TREE, sampling, None, generator, None, TREE_RULES[rule]
            texts.append(treeSampling(*inputs)[0])
            uses = target.used > before + 3
            assert uses == (pair is tree_models)
        assert texts[0] == texts[1]
    plain, _ = regrSampling(PROMPTS, eager, 40, GREEDY)
    assert treeSampling(PROMPTS, target, TreeDrafter(tree_models[1]), 40, TREE, GREEDY)[0] == plain


def test_without_a_compiler_one_line_says_so_and_all_stays_eager(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    loader.load.cache_clear()
    eager, target = helpers.tiny(), helpers.tiny()
    assert compiled(target) is target
    said = capsys.readouterr().err
    loader.load.cache_clear()
    assert said.startswith("gpt_neox-0 stays eager") and said.count("\n") == 1
    assert regrSampling(PROMPTS, target, 20, GREEDY)[0] == regrSampling(PROMPTS, eager, 20, GREEDY)[0]


def test_heads_without_a_kernel_stay_eager(models, monkeypatch, capsys):
    monkeypatch.setattr(loader, "HEAD_WIDTHS", (16,))
    target = helpers.tiny()
    assert compiled(target) is target and "heads" in capsys.readouterr().err


SCRIPT = """
import helpers, torch
from engine.steps import Block
from engine.compiling import compiled, make_graphs
from regrSampling import regrSampling
from utils import GREEDY
eager, model = helpers.tiny(layers=1), compiled(helpers.tiny(layers=1))
assert make_graphs([model], lambda: model.asked.add(Block(1, 5))) > 0
assert regrSampling([[5, 9, 2]], model, 30, GREEDY)[0] == regrSampling([[5, 9, 2]], eager, 30, GREEDY)[0]
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


def test_another_process_finds_the_graphs_and_they_are_right(models, tmp_path):
    hits = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout
    assert int(hits) == 1
