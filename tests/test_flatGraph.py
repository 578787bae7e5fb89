"""A compiled graph that is called without Dynamo, by a backend that runs the traced graph as it is."""

import pytest
import torch
from torch import nn
from torch._dynamo import mark_dynamic

from engine.flatGraph import FlatGraph


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), scale))


def traced(graph, inputs):
    return graph.forward


def sized(count: int, *more: int) -> torch.Tensor:
    made = torch.arange(count * 3.0).reshape(count, 3)
    mark_dynamic(made, 0)
    return made


def test_inputs_are_found_again_and_weights_kept():
    """Also where inputs come in lists, sizes are inputs, and results in another order than they were computed."""
    layers, calls = nn.ModuleList([Scaled(2.0), Scaled(3.0)]), []

    def work(x, others):
        calls.append(1)
        first = x * layers[0].weight + x.shape[0]
        second = others[1] * layers[1].weight - others[0].sum()
        return second, first

    graph = FlatGraph(work, traced, sized(7), [sized(5), sized(5)])
    traces = len(calls)
    for count, other in (7, 5), (2, 4), (5, 7):
        x, others = torch.rand(count, 3), [torch.rand(other, 3), torch.rand(other, 3)]
        second, first = graph(x, others)
        torch.testing.assert_close(first, 2 * x + count)
        torch.testing.assert_close(second, 3 * others[1] - others[0].sum())
    assert len(calls) == traces


def test_one_tensor_comes_back_alone():
    graph = FlatGraph(lambda x: x.sum(0), traced, sized(7))
    assert graph(torch.ones(11, 3)).tolist() == [11.0] * 3


def test_nothing_of_the_first_call_is_kept_alive():
    weight = torch.ones(3)
    graph = FlatGraph(lambda x, cache: (x @ weight + cache[0].sum(),), traced, sized(7), [sized(5)])
    assert [each for each in graph.kept if each is not None] == [weight]


def test_only_marked_sizes_are_inputs():
    """The same function was traced for another width before."""

    def work(x):
        return x * x.shape[0] + x.shape[1]

    for width in 3, 4:
        x = torch.ones(7, width)
        mark_dynamic(x, 0)
        graph = FlatGraph(work, traced, x)
        assert len(graph.varied) == 2
        assert graph(torch.ones(5, width)).tolist() == [[5.0 + width] * width] * 5


def test_a_size_that_is_no_inputs_is_refused(monkeypatch):
    monkeypatch.setattr("engine.flatGraph.flattened", lambda given: iter(()))
    with pytest.raises(RuntimeError, match="no size of its inputs"):
        FlatGraph(lambda x: x * x.shape[0], traced, sized(7))
