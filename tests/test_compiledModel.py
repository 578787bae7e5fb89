"""Steps computed by graphs: padded blocks, shapes that have a graph, and the rehearsal that finds these shapes."""

import inspect

import helpers
import pytest
import torch

from decoding.model import Model
from decoding.trees.shapes import MENU
from decoding.trees.tree import Tree
from engine.cachedModel import CachedModel
from engine.compiledModel import CompiledModel
from engine.compiling import compiled, make_graphs
from engine.cpuModel import CpuModel
from engine.cudaModel import CudaModel
from engine.steps import Block, Draw, Growth, Move, Nodes, Prompt
from methods.catalogue import build
from methods.drafters import ModelDrafter
from methods.rehearsal import FEW, compile_samplers
from methods.samplers import Decoding
from specSampling import specSampling
from utils import GREEDY, Sampling


def without_gpu(seed=0, kind=CudaModel, *shapes):
    """A model whose steps of these shapes are captured, as on a GPU."""
    model = kind(helpers.tiny(seed=seed).model, 61)
    model.reads_filled = False
    model.add(set(shapes))
    return model


# The shapes that have a graph.


def test_a_block_is_padded_with_its_last_token_to_the_next_width():
    model = without_gpu()
    for width in 4, 2, 4:
        model.add({Block(1, width)})
    assert model.widths == {1: [2, 4]}
    tokens = torch.tensor([[5, 6, 7]])
    padded, positions = model.padded(tokens, tokens + 10)
    assert padded.tolist() == [[5, 6, 7, 7]] and positions.tolist() == [[15, 16, 17, 17]]
    assert padded.is_contiguous() and positions.is_contiguous()
    assert model.padded(tokens[:, :2], tokens[:, :2])[0].tolist() == [[5, 6]]


def test_wider_blocks_and_other_numbers_of_rows_have_no_graph():
    model = without_gpu(0, CudaModel, Block(2, 3))
    has = {(rows, n): model.has(Block(rows, n)) for rows in (1, 2) for n in (1, 3, 4)}
    assert has == {(1, 1): False, (1, 3): False, (1, 4): False, (2, 1): True, (2, 3): True, (2, 4): False}


def test_draws_have_graphs_of_their_own():
    """More tokens than they read are read by the graph of prefill, if there is one."""
    model, shapes = (
        without_gpu(0, CudaModel, Draw(1, 2, 4)),
        [Draw(1, 1, 4), Draw(1, 2, 9), Draw(1, 3, 4), Draw(2, 1, 4)],
    )
    assert [model.has(shape) for shape in shapes] == [True, True, False, False]
    model.add({Prompt(1)})
    assert [model.has(shape) for shape in shapes] == [True, True, True, False]


def test_long_draws_are_cut_and_all_read_as_many_tokens():
    """The fewest that were asked for, but no fewer than a draft reads."""
    model, tree = without_gpu(), Tree.of("2,1")
    asked = {Draw(1, 2, 10), Draw(1, 3, 13), Draw(2, 1, 6), Growth(1, 1, tree)}
    wanted = {Draw(1, 2, 4), Draw(1, 2, 6), Draw(1, 2, 1), Draw(2, 1, 6), Growth(1, 2, tree)}
    made = model.add(asked)
    assert set(made) == model.shapes == wanted and len(made) == len(wanted)
    assert model.reads == {1: 2, 2: 1} and model.counts == {1: [1, 4, 6], 2: [6]}
    assert model.has(Growth(1, 2, tree)) and not model.has(Growth(1, 3, tree)) and not model.has(Growth(2, 1, tree))


def test_all_models_have_one_interface():
    for kind in CachedModel, CompiledModel, CpuModel, CudaModel:
        assert inspect.isabstract(kind) == (kind is CompiledModel)
        for name, function in vars(kind).items():
            if hasattr(Model, name) and inspect.isfunction(function) and not name.startswith("_"):
                base = next(getattr(parent, name) for parent in kind.__mro__[1:] if hasattr(parent, name))
                own, inherited = (list(inspect.signature(f).parameters.values()) for f in (function, base))
                more = own[len(inherited) :]  # What only this engine can do.
                assert [p.name for p in own[: len(inherited)]] == [p.name for p in inherited], name
                assert all(parameter.default is None for parameter in more), name


def test_one_function_decides(monkeypatch):
    """With the gate closed, a compiled model decodes eagerly."""
    shapes = Block(1, 1), Block(1, 2), Block(1, 5), Draw(1, 2, 4)
    target, draft = without_gpu(0, CudaModel, *shapes), without_gpu(1, CudaModel, *shapes)
    monkeypatch.setattr(CompiledModel, "ready", lambda self, *args, **options: False)
    text = specSampling([[5, 9, 2]], target, ModelDrafter(draft), 30, 4, GREEDY)[0]
    eager = helpers.tiny(), ModelDrafter(helpers.tiny(seed=1))
    assert text == specSampling([[5, 9, 2]], *eager, 30, 4, GREEDY)[0]
    assert target.used == draft.used == 0
    monkeypatch.undo()
    assert specSampling([[5, 9, 2]], target, ModelDrafter(draft), 30, 4, GREEDY)[0] == text
    assert target.used and draft.used


# A rehearsal.

PROMPT = [*range(1, 17)] * 2


def rehearsed(name, decoding=Decoding(), sampling=Sampling(), rows=1, **options):
    """{role: the shapes that a rehearsal of that method asked for}."""
    models = {role: without_gpu(seed) for seed, role in enumerate(("target", "draft", "mid"))}
    samplers, asked = build(name.split(","), models, decoding), {}
    for role, model in models.items():
        model.add = lambda shapes, role=role: asked.update({role: set(shapes)}) or []
    assert compile_samplers(samplers.values(), models.values(), PROMPT, sampling, rows, **options) > 0
    assert all(model.used == 0 and model.asked is None for model in models.values())
    return asked


def widths(counts, rows=1):
    """The blocks of a target that scores so many guesses."""
    return {Block(rows, 1 + count) for count in counts}


# The shapes of every method's target: the prompt, and a step without guesses.
PLAIN = {Prompt(1), Draw(1, 1, 1)}


@pytest.mark.parametrize("name", ["fixed", "block", "targetConfidence", "costAware"])
def test_a_rehearsal_asks_for_the_rounds_of_a_rule_with_few_lengths(name):
    counts = [1, 2, 3, 4, 6] if name == "costAware" else [4]
    asked = rehearsed(name, Decoding(gamma=6) if name == "costAware" else Decoding())
    assert asked["target"] == PLAIN | widths(counts)
    assert asked["draft"] == {Prompt(1), *(Draw(1, 2, count) for count in counts)} and not asked["mid"]


def test_a_rehearsal_of_batches():
    asked = rehearsed("fixed", rows=3)
    assert asked["target"] == {Prompt(3), Block(3, 5), Draw(3, 1, 1)} and asked["draft"] == {Prompt(3), Draw(3, 2, 4)}


def test_a_rehearsal_asks_for_few_of_many_lengths():
    asked = rehearsed("additive")
    assert asked["target"] == PLAIN | widths(FEW)
    assert asked["draft"] == {Prompt(1), *(Draw(1, 2, count) for count in FEW)}
    asked = rehearsed("draftConfidence")
    assert asked["target"] == PLAIN | widths(FEW)
    assert {Prompt(1), Draw(1, 2, 1)} <= asked["draft"] <= {Prompt(1), Draw(1, 2, 1), Draw(1, 1, 1)}
    asked = rehearsed("lookup")
    assert asked["target"] == PLAIN | widths(FEW) and not asked["draft"]
    asked = rehearsed("lookupFirst")
    assert asked["target"] == PLAIN | widths([4])  # Four columns cost as much as one.
    assert asked["draft"] == {Prompt(1), Draw(1, 2, 4)}
    asked = rehearsed("lookupFirst", Decoding(gamma=6))
    assert asked["target"] == PLAIN | widths([1, 2, 3, 4, 6])
    assert asked["draft"] == {Prompt(1), *(Draw(1, 2, count) for count in (1, 2, 3, 4, 6))}


def test_a_rehearsal_of_a_cascade():
    """In the first inner round of each, the mid model and the draft read one token more."""
    asked = rehearsed("cascade", Decoding(gamma1=2, gamma2=5))
    assert asked["target"] == PLAIN | widths([5])
    assert asked["mid"] == {Prompt(1), Block(1, 4), Block(1, 3)}
    assert asked["draft"] == {Prompt(1), Draw(1, 3, 2), Draw(1, 2, 2)}


def test_a_rehearsal_of_trees():
    tree = Tree.of("3,2")
    asked = rehearsed("tree", Decoding(tree="3,2"))
    assert asked["target"] == PLAIN | {Nodes(1, 10), Move(1, 2)}
    assert asked["draft"] == {Prompt(1), Growth(1, 2, tree), Move(1, 2)}
    asked = rehearsed("tree", Decoding(tree="auto"))
    chains = [tree.size for tree in MENU if tree.size and tree.is_chain]
    trees = [tree for tree in MENU if not tree.is_chain]
    moves = {Move(1, tree.depth) for tree in trees}
    assert asked["target"] == PLAIN | widths(chains) | moves | {Nodes(1, tree.size + 1) for tree in trees}
    draws = {Draw(1, 2, count) for count in chains}
    assert asked["draft"] == {Prompt(1)} | draws | moves | {Growth(1, 2, tree) for tree in trees}


def test_with_a_repetition_penalty_only_forwards_have_graphs():
    penalised = Sampling(repetition_penalty=1.2)
    asked = rehearsed("fixed", sampling=penalised)
    assert asked["target"] == {Prompt(1), Block(1, 1), Block(1, 5)}
    assert asked["draft"] == {Prompt(1), Block(1, 1), Block(1, 2)}
    asked = rehearsed("tree", Decoding(tree="3,2"), penalised)
    assert asked["target"] == {Prompt(1), Block(1, 1), Nodes(1, 10), Move(1, 2)}
    assert asked["draft"] == {Prompt(1), Block(1, 2), Nodes(1, 3), Move(1, 2)}


def test_plain_and_contrastive_decoding_are_rehearsed():
    asked = rehearsed("target")
    assert asked == {"target": PLAIN, "draft": set(), "mid": set()}
    asked = rehearsed("contrastive")
    assert asked == {"target": {Prompt(1), Block(1, 1)}, "draft": {Prompt(1), Block(1, 1)}, "mid": set()}


@torch.inference_mode()
def test_inside_a_rehearsal_and_a_capture_steps_are_computed_as_they_are():
    """What a step is made of is no step of its own, though it has a graph."""
    eager, model, drawn = helpers.tiny(), without_gpu(), []
    tokens, positions, u = torch.tensor([[5, 9]]), torch.arange(4)[None], torch.tensor([[0.1], [0.5], [0.9]])
    for each in eager, model:
        each.reserve(1, 20)
    wanted = eager.draw(tokens, positions, u, Sampling())
    shapes = {Block(1, 1), Block(1, 2)}
    model.add(shapes)
    assert make_graphs([model], lambda: drawn.append(model.draw(tokens, positions, u, Sampling()))) > 0
    assert model.shapes == shapes | {Draw(1, 2, 3)} and model.used == 0 and not model.captures
    drawn.append(model.draw(tokens, positions, u, Sampling()))
    assert model.used == 1 and [key[0] for key in model.captures] == ["draw"]
    for found in drawn:
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=1e-4)
    model.forward(tokens, positions[:, :2])  # Outside, it is one.
    assert model.used == 2 and [key[0] for key in model.captures] == ["draw", "read_block"]


def test_a_draft_of_two_methods_reads_for_both():
    """A cascade's draft asks to read one token more than others, which it reads by the graph of prefill."""
    models = {role: without_gpu(seed) for seed, role in enumerate(("target", "draft", "mid"))}
    samplers = build(["fixed", "cascade"], models, Decoding(gamma=3, gamma1=2, gamma2=3))
    compile_samplers(samplers.values(), models.values(), PROMPT, GREEDY)
    assert models["draft"].reads == {1: 2}
    wanted = specSampling([PROMPT], helpers.tiny(), ModelDrafter(helpers.tiny(seed=1)), 30, 3, GREEDY)[0]
    for name in samplers:
        assert samplers[name]([PROMPT], max_len=30, sampling=GREEDY)[0] == wanted
    assert {"draw", "read_chunk"} <= {key[0] for key in models["draft"].captures}


def test_a_model_whose_graph_cannot_be_made_stays_eager(capsys):
    class Broken(CudaModel):
        def make(self, shape):
            raise RuntimeError("no\nroom")

    model, other = without_gpu(0, Broken), without_gpu(1)

    def rehearse():
        model.asked |= {Prompt(1), Block(1, 2)}
        other.asked.add(Block(1, 2))

    assert make_graphs([model, other, helpers.tiny()], rehearse) is None  # The last one is not compiled.
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "stays eager" in said and "(no room)" in said
    assert not model.shapes and other.shapes == {Block(1, 2)} and compiled(other) is other
