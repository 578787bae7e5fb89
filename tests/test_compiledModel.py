"""What the two engines share: padded blocks, shapes that have a graph, one interface."""

import inspect

import helpers
import pytest
import torch

from decoding import drawing, rounds
from engine.cpuModel import CpuModel
from engine.cudaModel import CudaModel
from engine.graphs import Graphs, Plan
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import GREEDY


def shapes():
    """An engine, to ask about shapes alone."""
    return CudaModel(helpers.tiny().model, 61)


def test_a_block_is_padded_with_its_last_token_to_the_next_width():
    graphs = shapes()
    for width in 4, 2, 4:
        graphs.add_forward(1, width)
    assert graphs.widths == {1: [2, 4]}
    tokens = torch.tensor([[5, 6, 7]])
    padded, at = graphs.pad_block(tokens, tokens + 10)
    assert padded.tolist() == [[5, 6, 7, 7]] and at.tolist() == [[15, 16, 17, 17]]
    assert padded.is_contiguous() and at.is_contiguous()
    assert graphs.pad_block(tokens[:, :2], tokens[:, :2])[0].tolist() == [[5, 6]]
    assert graphs.used == 2


@pytest.mark.parametrize("step", ["forward", "score_and_verify"])
def test_wider_blocks_and_other_numbers_of_rows_have_no_graph(step):
    graphs = shapes()
    graphs.add_forward(2, 3)
    found = {(rows, n): graphs.has(step, rows, n) for rows in (1, 2) for n in (1, 3, 4)}
    assert found == {(1, 1): False, (1, 3): False, (1, 4): False, (2, 1): True, (2, 3): True, (2, 4): False}


def test_draws_and_rounds_have_graphs_of_their_own():
    graphs, draft = shapes(), shapes()
    graphs.add_draw(1, 2, 4)
    found = [graphs.has("draw", *shape) for shape in ((1, 1), (1, 2), (1, 3), (2, 1))]
    assert found == [True, True, False, False]
    graphs.add_round(draft, 1, 2, 4)  # A GPU's host has time to spare: none is made.
    assert not graphs.has("round", draft, 1, 2, 4) and not graphs.has("round", None, 1, 2, 4)
    with pytest.raises(LookupError):
        graphs.round(draft, *[None] * 7)


def test_plans_add_up():
    both = Plan(frozenset({5}), frozenset({1})) | Plan(frozenset({2, 5}), frozenset({4}), read=2)
    assert both == Plan(frozenset({2, 5}), frozenset({1, 4}), read=2) and len(both) == 5


def test_both_engines_have_one_interface():
    """The public methods of the base class, in its order; what an engine defines besides is its own."""

    def methods(kind):
        return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")]

    def own_order(kind):
        return [name for name in vars(kind) if name in vars(Graphs) and inspect.isfunction(vars(kind)[name])]

    order = list(vars(Graphs))
    for engine in CpuModel, CudaModel:
        assert set(methods(Graphs)) <= set(methods(engine)) and not inspect.isabstract(engine)
        mine = [name for name in own_order(engine) if not name.startswith("_")]
        assert mine == sorted(mine, key=order.index)
        for name in mine:
            assert list(inspect.signature(getattr(engine, name)).parameters) == list(
                inspect.signature(getattr(Graphs, name)).parameters
            )


def test_one_function_decides(monkeypatch):
    """With the gate closed, a compiled model decodes eagerly."""
    eager, target, draft = helpers.tiny(), helpers.tiny(), helpers.tiny(seed=1)
    for model in target, draft:
        model.graphs, model._reads_filled = CudaModel(model.model, model.vocabulary), False
        for width in 1, 2, 5:
            model.graphs.add_forward(1, width)
        model.graphs.add_draw(1, 2, 4)
    for module in rounds, drawing:
        monkeypatch.setattr(module, "use_graph", lambda *args, **how: False)
    found = specSampling([[5, 9, 2]], target, ModelDrafter(draft), 30, 4, GREEDY)[0]
    assert found == specSampling([[5, 9, 2]], eager, ModelDrafter(helpers.tiny(seed=1)), 30, 4, GREEDY)[0]
    assert target.graphs.used == draft.graphs.used == 0
    monkeypatch.undo()
    assert specSampling([[5, 9, 2]], target, ModelDrafter(draft), 30, 4, GREEDY)[0] == found
    assert target.graphs.used and draft.graphs.used
