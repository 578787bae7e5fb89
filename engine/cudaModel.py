"""`CudaModel`: on a GPU, a step is compiled and captured as a CUDA graph at its first use, once for each shape, and
then replayed.

`torch.compile` makes few kernels of a forward's many small ones. A replay costs the host one call instead of one for
each kernel. A captured graph reads and writes fixed memory: inputs are copied into tensors of its own, and a new cache
needs new graphs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from decoding.model import Model
from decoding.tree import Places
from engine.cachedModel import CachedModel
from engine.gate import RECORDS, comparable
from engine.kvCache import SlotCache, SlotLayer
from engine.quantised import tolerance_of
from utils import Sampling, out_of_memory, penalised, upload

CHUNK = 64  # Capacities and the tokens of a prompt are rounded up to multiples of this, so that few graphs serve all.
COMPILED = 16  # Blocks of at most this many tokens are worth compiling: the time of others is in few large kernels.
SHAPES = 256  # for which a forward is compiled at most, of all models together
MOST = 1024  # Reading more tokens than this should take a GPU longer than the host needs to launch the kernels.

Step = Callable[..., Any]  # step(model, *inputs): tensors, or nothing, from the inputs and the model's cache


def layer_forward(layer: nn.Module, *args: Any, **options: Any) -> Any:
    """A decoder layer's own forward, to be compiled for all layers of its class."""
    return type(layer).forward(layer, *args, **options)


def with_slots(forward: Callable[..., Any], cache: SlotCache, slots: SlotLayer, *args: Any, **options: Any) -> Any:
    """The forward of a layer, given its slots where it is given the whole cache."""
    own = {name: slots if x is cache else x for name, x in options.items()}
    return forward(*(slots if x is cache else x for x in args), **own)


class CudaModel(CachedModel):
    """A `CachedModel` whose steps are captured and replayed.

    eager: whether steps are computed eagerly: inside a capture, and for a text that is scored.
    missed: see `no_captures`; None outside.
    has_kernel: whether Triton is installed, as it is with torch for CUDA on Linux, and its kernel works.
    """

    eager = False
    has_kernel = find_spec("triton") is not None
    missed: list[str] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.graphs: dict[tuple[Any, ...], Graph] = {}
        self.captured: tuple[object, object] = None, None  # the KV cache and features that the graphs read and write
        self.refused: set[str] = set()  # the steps that cannot be captured
        self.compiles = True  # whether its forward can be compiled, as far as is known
        self.fused: Callable[..., Any] | None = None  # its forward, compiled, while it shall be used

    @torch.inference_mode()  # A graph's own inputs, made in this mode, could not be written to outside of it.
    def run(self, step: Step, *inputs: Any) -> Any:
        """`step(self, *inputs)`, by a graph if possible. inputs: tensors, `Places`, and hashable values."""
        waits = any(getattr(x, "waits", False) for x in inputs)  # A rule that synchronises with the host.
        if CudaModel.eager or self.cache is None or waits or step.__name__ in self.refused:
            return step(self, *inputs)
        if self.captured[0] is not self.cache or self.captured[1] is not self.features:
            self.captured, self.graphs = (self.cache, self.features), {}
        leaves, spec = tree_flatten(inputs)
        # A step that writes features is another one.
        key = step.__name__, self.keeps_features, *(x.shape if isinstance(x, Tensor) else x for x in leaves)
        if key in self.graphs:
            return self.graphs[key].replay(leaves)
        if CudaModel.missed is None:
            return self.capture(key, step, leaves, spec)
        CudaModel.missed.append(step.__name__)
        return step(self, *inputs)

    def capture(self, key: tuple[Any, ...], step: Step, leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """The result of a step at its first use; captures its graph for later uses. The first use is computed eagerly,
        and once more by compiled code: so libraries choose kernels and allocate memory before the capture, and there is
        a result even if the capture fails."""
        if (pool := POOLS.get(self.device)) is None:
            pool = POOLS[self.device] = Pool(self.device)
        copies, graph = [x.clone() if isinstance(x, Tensor) else x for x in leaves], torch.cuda.CUDAGraph()
        own = tree_unflatten(copies, spec)
        now = torch.cuda.current_stream(self.device)  # Its device need not be the current one.
        pool.stream.wait_stream(now)
        with eagerly(), torch.cuda.stream(pool.stream):  # After an error, `torch.cuda.graph` does not leave its stream.
            forwards = self.forwards
            first = step(self, *tree_unflatten(leaves, spec))
            if self.forwards > forwards and self.compiles:
                first = self.compile(step, own)
            try:
                with torch.cuda.graph(graph, pool.handle, pool.stream):
                    results = step(self, *own)
                self.graphs[key] = Graph(graph, copies, results, pool)
            except RuntimeError as error:
                self.refused.add(step.__name__)
                FAILED.append(graph)
                del POOLS[self.device]  # To torch's allocator, its last capture has not ended.
                for generator in torch.cuda.default_generators:  # Nor to these.
                    generator.graphsafe_set_state(generator.clone_state())
                reason = " ".join(str(error.__context__ or error).split())[:200]
                print(f"{self.name}: the step {step.__name__} stays eager: no CUDA graph ({reason})", file=sys.stderr)
            finally:
                self.fused = None
        now.wait_stream(pool.stream)
        return first

    def compile(self, step: Step, inputs: Sequence[Any]) -> Any:
        """Compile the decoder layers for a step by computing it once more, in the same slots. Returns the result of the
        compiled run: the slots now hold its keys and values, which may differ from the eager run's by rounding, and so
        may drawn tokens."""
        try:
            fused = partial(self.by_layers, torch.compile(layer_forward, fullgraph=True))
            self.fused = partial(self.compared, fused)
            limits = torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES)
            with limits, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "TensorFloat32")  # It would round products in float32.
                result = step(self, *inputs)
            self.fused = fused
            return result
        except Exception as error:  # Triton's, and that of the limit, are no RuntimeError.
            self.fused, self.compiles = None, False
            reason = " ".join(str(error).split())[:200]
            words = f"the step {step.__name__} and all others are captured without torch.compile"
            print(f"{self.name}: {words} ({reason})", file=sys.stderr)
            return step(self, *inputs)  # What failed may have written something else.

    def by_layers(self, fused: Callable[..., Any], **inputs: Any) -> Any:
        """The outputs of the model, its decoder layers computed by `fused`, a `layer_forward`. Each is given its own
        slots, so that one compilation serves all: the whole model would take as many times as long."""
        assert self.cache is not None
        count = len(self.cache.layers)
        lists = (module for module in self.model.modules() if isinstance(module, nn.ModuleList))
        layers = next((list(modules) for modules in lists if len(modules) == count), list[nn.Module]())
        if not layers or any("forward" in vars(layer) for layer in layers):
            raise RuntimeError(f"it has no list of {count} layers that compute what their class says")
        for module in {module for layer in layers for module in layer.modules()} - set(layers):
            for key, hook in [*module._forward_hooks.items()]:
                if getattr(hook, "__name__", "") == RECORDS:  # Nobody asks for what it records; it cannot be traced.
                    del module._forward_hooks[key]
        try:
            for layer, slots in zip(layers, self.cache.layers):
                layer.forward = partial(with_slots, partial(fused, layer), self.cache, slots)
            torch.backends.cuda.enable_cudnn_sdp(True)  # Of a graph, its plan is made once, before any text is timed.
            return self.model(**inputs)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(False)
            for layer in layers:
                vars(layer).pop("forward", None)

    def compared(self, fused: Callable[..., Any], **inputs: Any) -> Any:
        """The outputs of the compiled forward. Raises RuntimeError if they are not the model's. Which of two tokens
        stays in a slot that both are written to is not defined; their logits are never used (`Rows.positions`)."""
        assert self.cache is not None
        wanted, outputs, slots = self.model(**inputs), fused(**inputs), self.cache.at.slots
        is_alone = ((slots[:, :, None] == slots[:, None]).sum(-1) == 1)[..., None]
        logits = (results.logits.float() for results in (wanted, outputs))
        exact, ours = (part.masked_fill(~is_alone, 0) for part in comparable(*logits))
        if not (ours - exact).norm() <= tolerance_of(self.model, self.dtype) * exact.norm():
            raise RuntimeError("compiled, it computes something else")
        return outputs

    def network(self, tokens: Tensor) -> Callable[..., Any]:
        return self.model if self.fused is None or tokens.shape[1] > COMPILED else self.fused

    def reserve(self, rows: int, capacity: int) -> None:
        """Graphs live as long as their cache: a longer one is kept."""
        capacity = -(-capacity // CHUNK) * CHUNK
        super().reserve(rows, max(capacity, self.cache.capacity) if self.cache and self.rows == rows else capacity)

    def rows_computed(self, rows: int) -> int:
        """The next power of two, so that the batches at the end of a queue have few sizes."""
        return 1 << (rows - 1).bit_length()

    # What comes after a forward.

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        drawn = self.by_kernel(logits, sampling, seen)
        return drawn[1] if drawn else super().probabilities(logits, sampling, seen)

    def sample(
        self, logits: Tensor, u: Tensor, sampling: Sampling, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.by_kernel(logits, sampling, seen, u) or super().sample(logits, u, sampling, seen)

    def by_kernel(
        self, logits: Tensor, sampling: Sampling, seen: Tensor | None, u: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """`sample` by Triton's kernel (cudaKernels.py); None if it cannot be used here."""
        if not self.has_kernel:
            return None
        try:
            from engine import cudaKernels  # It imports Triton.

            return cudaKernels.sample(penalised(logits, sampling, seen), sampling, u)
        except Exception as error:  # Triton's have no class in common.
            if out_of_memory(error):
                raise
            CudaModel.has_kernel = False
            reason = " ".join(str(error).split())[:200]
            print(f"{self.name}: tokens are drawn without Triton's kernel ({reason})", file=sys.stderr)
            return None

    # The steps.

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """A long block is read eagerly, and so is a text of which only some logits are requested."""
        if keep is not None or tokens.shape[1] > CHUNK:
            return super().forward(tokens, positions, places, keep)
        return self.run(CachedModel.forward, tokens, positions, places)

    def read_prompts(self, prompts: Tensor, lengths: Sequence[int], first: int = 0) -> Tensor:
        """Prompts of several lengths, and those that are new in a batch, are read eagerly: a graph reads all rows."""
        if len(set(lengths)) > 1 or len(lengths) < self.rows:
            return super().read_prompts(prompts, lengths, first)
        return self.read(prompts, torch.arange(first, first + prompts.shape[1], device=self.device).expand_as(prompts))

    def read(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Read a block `[B, n]`; float32 logits `[B, V]` after its end. It is padded with its last token, at the same
        position."""
        n = tokens.shape[1]
        last, width = upload([n - 1], self.device), -(-n // CHUNK) * CHUNK
        if len(tokens) * width > MOST:
            return CachedModel.forward(self, tokens, positions, keep=last)[:, 0]
        at = torch.arange(width, device=self.device).clamp_(max=n - 1)
        return self.run(CachedModel.forward, tokens[:, at], positions[:, at], None, last)[:, 0]

    def recent(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The end of a block, in a width that many rounds share: two tokens; any others that a draft missed are read
        first. A model that reads features reads many tokens in every round. Its block begins with its first token
        several times, in the same slot, and its width is a power of two.

        tokens: int64 `[B, w]`. positions: int64 `[B, m]`, of these tokens and of those after them.
        """
        w = tokens.shape[1]
        width = 1 << (w - 1).bit_length() if self.reads_features else min(w, 2)
        if w == width:
            return tokens, positions
        if w > width:
            self.read(tokens[:, : w - width], positions[:, : w - width])
        at = torch.arange(w - width, positions.shape[1], device=self.device).clamp_(min=0)
        return tokens[:, at[:width]], positions[:, at]

    # Their arguments are those of `Model`, by position. A graph computes all rows, whatever `counts`, the last, says.

    def draw(self, *inputs: Any) -> Any:
        tokens, positions, u, sampling, *seen = inputs[:5]
        return self.run(Model.draw, *self.recent(tokens, positions), u, sampling, *seen)

    def score_block(self, *inputs: Any) -> Any:
        return self.run(Model.score_block, *inputs[:7])

    def grow(self, *inputs: Any) -> Any:
        tree, tokens, positions, *rest = inputs
        return self.run(Model.grow, tree, *self.recent(tokens, positions), *rest)

    def score_tree(self, *inputs: Any) -> Any:
        return self.run(Model.score_tree, *inputs)

    def move(self, source: Tensor, slots: Tensor) -> None:
        self.run(CachedModel.move, source, slots)

    def score_over_slots(self, tokens: Tensor) -> Tensor:
        with eagerly():
            return super().score_over_slots(tokens)


@contextmanager
def eagerly() -> Iterator[None]:
    """Compute steps eagerly, even if they have a graph."""
    before, CudaModel.eager = CudaModel.eager, True
    try:
        yield
    finally:
        CudaModel.eager = before


@contextmanager
def no_captures() -> Iterator[list[str]]:
    """While text is timed: a capture would take many times as long as the step. Yields the names of the steps that are
    computed eagerly there because they have no graph yet: if there are any, the time is not that of graphs."""
    before, CudaModel.missed = CudaModel.missed, []
    try:
        yield CudaModel.missed
    finally:
        CudaModel.missed = before


class Pool:
    """The memory and the stream of all graphs of a device.

    The replay of one graph may overwrite what another one of its pool has left, results too. That is safe where replays
    follow one another and no result is used after the next one (pytorch, pull request 166975). Here they run on the
    device's current stream, and results are cloned at once. Only captures on one stream share memory, and what a
    warm-up has allocated is used again on its stream alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.handle = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


# Held by their graphs: torch's allocator refuses the handle of a pool whose graphs are all gone.
POOLS: WeakValueDictionary[torch.device, Pool] = WeakValueDictionary()
FAILED: list[torch.cuda.CUDAGraph] = []  # Torch's allocator keeps pointers to captures that have not ended.


@dataclass
class Graph:
    """A captured step. inputs: what it reads, tensors of its own among them. results: tensors, where it writes them."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Any]
    results: Any
    pool: Pool

    def replay(self, inputs: Sequence[Any]) -> Any:
        """The results of the step for other tensors of the same shapes."""
        for x, new in zip(self.inputs, inputs):
            if isinstance(x, Tensor):
                x.copy_(new)
        self.graph.replay()
        return tree_map_only(Tensor, torch.clone, self.results)
