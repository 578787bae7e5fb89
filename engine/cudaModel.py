"""`CudaModel`: on a GPU, a step is captured as a CUDA graph, once for each shape, and replayed.

A replay costs the host one call instead of one for each of hundreds of kernels. A captured graph reads and writes fixed
memory: inputs are copied into tensors of its own, and a new cache needs new captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.model import Model
from decoding.trees.tree import Places
from engine.compiledModel import CompiledModel, Step
from engine.steps import Move, Shape

Work = Callable[..., Sequence[Tensor]]
Capture = tuple[list[Tensor], Callable[[], object], Sequence[Tensor]]


class CudaModel(CompiledModel):
    """A model whose steps are captured on a GPU, at their first use after a new cache."""

    chunk = 64  # A prompt of any length is read in chunks by one graph.

    def forget(self) -> None:
        super().forget()
        self.captures: dict[tuple[Any, ...], Capture] = {}
        self.captured: tuple[object, ...] = (None, None)  # the KV cache and features that the captures read and write

    def reserve(self, rows: int, capacity: int) -> None:
        """Captured graphs live as long as their cache: a longer one is kept."""
        super().reserve(rows, max(capacity, self.cache.capacity) if self.cache and self.rows == rows else capacity)

    def make(self, shape: Shape) -> bool:
        """Graphs are captured at their first use."""
        return True

    def move(self, source: Tensor, slots: Tensor) -> None:
        if not self.ready(Move(*slots.shape)):
            return super().move(source, slots)
        if not self.is_current() or self.key_of(moved, (slots, slots)) not in self.captures:
            self.run(moved, slots, slots)  # A capture runs its work several times: this one is safe.
        self.run(moved, source, slots)

    def by_graph(self, step: Step, *inputs: Any) -> Any:
        if not self.is_current():
            self.captured, self.captures = (self.cache, self.features), {}
        key, tensors = self.key_of(step, inputs), list(flattened(inputs))
        if key not in self.captures:

            def work(*copies: Tensor) -> Sequence[Tensor]:
                results = self.eagerly(step, *unflattened(inputs, iter(copies)))
                return [results] if isinstance(results, Tensor) else list(results)

            self.captures[key] = capture(tensors, work)
        copies, again, results = self.captures[key]
        for copy, tensor in zip(copies, tensors):
            copy.copy_(tensor)
        again()
        found = [result.clone() for result in results]
        return found[0] if len(found) == 1 else tuple(found)

    def is_current(self) -> bool:
        """Whether the captures read and write what the model does now."""
        return self.captured[0] is self.cache and self.captured[1] is self.features

    def key_of(self, step: Step, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """`key_of`; a step that writes features is another one."""
        return (*key_of(step, inputs), *["features"] * self.keeps_features)


def moved(model: Model, source: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """`Model.move`, as a step that has results: none."""
    model.move(source, slots)
    return ()


def key_of(step: Step, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What tells the graph for these inputs from others: their shapes, and all that is no tensor."""
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else len(x) if isinstance(x, Places) else x for x in inputs]
    return step.__name__, *shapes


def flattened(inputs: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among the inputs of a step."""
    for x in inputs:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, Places):
            yield from x


def unflattened(inputs: Sequence[Any], tensors: Iterator[Tensor]) -> Iterator[Any]:
    """The inputs of a step, with other tensors."""
    for x in inputs:
        if isinstance(x, Tensor):
            yield next(tensors)
        else:
            yield Places(*(next(tensors) for _ in x)) if isinstance(x, Places) else x


def capture(inputs: Sequence[Tensor], work: Work) -> Capture:
    """(copies of the inputs, a function that runs `work` on them again, the tensors where it leaves the results).

    Without a GPU, the function runs the same work instead of replaying it.
    """
    copies = [x.clone() for x in inputs]
    if copies[0].device.type != "cuda":
        results = work(*copies)

        def again() -> None:
            for result, new in zip(results, work(*copies)):
                result.copy_(new)

        return copies, again, results
    device = copies[0].device  # It need not be the current one: a draft can have a GPU of its own.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # Warm-up: libraries choose kernels and allocate memory before the capture.
        for _ in range(3):
            work(*copies)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = work(*copies)
    return copies, graph.replay, results
