"""`FlatGraph`: a compiled graph that is called without Dynamo.

Dynamo looks up the inputs of a graph in every call: hundreds of weights, each an attribute of a module of a module. It
takes longer than a small model's layer. But weights never change once they are compiled, and there are no guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]


class FlatGraph:
    """`function` compiled as one graph by `backend`, for such `inputs`: tensors and lists of tensors.

    Sizes marked as dynamic may differ between calls. Whatever else the function reads is kept as it is now. Returns one
    tensor, or several as the function does. Raises RuntimeError if the graph has an input that is none of these.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend, *inputs: Any) -> None:
        calls: list[tuple[Callable[..., Sequence[Tensor]], tuple[Any, ...], Sequence[Tensor]]] = []

        def recording(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
            compiled = backend(graph, examples)

            def call(*flat: Any) -> Sequence[Tensor]:
                calls.append((compiled, flat, compiled(*flat)))
                return calls[-1][2]

            return call

        options = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        # Or a size that differs from that of an earlier graph of the same function would be an input.
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            result = torch.compile(function, fullgraph=True, backend=recording, options=options)(*inputs)
        ((self.compiled, flat, made),) = calls
        self.kept, self.varied = list(flat), list(sources(flat, list(flattened(inputs))))
        for place, *_ in self.varied:
            self.kept[place] = None
        results = [result] if isinstance(result, Tensor) else list(result)
        order = [next(i for i, tensor in enumerate(made) if tensor is wanted) for wanted in results]
        self.order, self.single = order, isinstance(result, Tensor)

    def __call__(self, *inputs: Any) -> Any:
        tensors, flat = list(flattened(inputs)), self.kept.copy()
        for place, number, axis in self.varied:
            flat[place] = tensors[number] if axis is None else tensors[number].shape[axis]
        made = self.compiled(*flat)
        return made[self.order[0]] if self.single else tuple([made[i] for i in self.order])


def flattened(inputs: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors of `inputs`, lists taken apart."""
    for item in inputs:
        if isinstance(item, Tensor):
            yield item
        else:
            yield from item


def sources(flat: Sequence[Any], tensors: list[Tensor]) -> Iterator[tuple[int, int, int | None]]:
    """(place in `flat`, number of a tensor, None) of each input that is a tensor of the caller's, and (place, number of
    a tensor, axis) of each that is a size. Dynamic sizes are told apart by their values while compiling."""
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    sizes = {
        tensor.shape[axis]: (number, axis)
        for number, tensor in enumerate(tensors)
        for axis in getattr(tensor, "_dynamo_dynamic_indices", ())
    }
    for place, value in enumerate(flat):
        if isinstance(value, int):
            if value not in sizes:
                raise RuntimeError(f"a graph has an input {value}, which is no size of its inputs")
            yield place, *sizes[value]
        elif id(value) in numbers:
            yield place, numbers[id(value)], None
        elif not isinstance(value, Tensor):
            raise RuntimeError(f"a graph has an input of type {type(value).__name__}")
