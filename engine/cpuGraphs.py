"""`CpuGraphs`: on a CPU, the forward of a few tokens is compiled as one graph, once for each shape `[B, n]`. So are a
sequence of draws, and for a small pair a whole round.

The number of slots in the cache (`capacity`) is a symbol in the graph, and how many slots are read follows from the
positions. One graph serves every round and every text. torch keeps it on the disk, so it serves every process too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import mark_dynamic
from torch._inductor.compile_fx import compile_fx
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.treeRounds import Places
from decoding.trees import Tree
from engine.cpuForwards import CpuForwards, Growth, Round
from engine.flatGraph import FlatGraph
from engine.graphs import Graphs
from engine.kernels import loader
from engine.kernels.operators import Kernels, as_tensor
from engine.kernels.packedLinear import pack
from engine.kvCache import SlotCache
from utils import Sampling

OPTIONS = {
    "cpp_wrapper": True,  # Without it Python calls the kernels, which took a quarter of a small model's forward.
    "size_asserts": False,  # There are dozens a forward.
    "cpp.min_chunk_size": 16384,  # Waking a second thread costs more than most of these loops.
    "force_pointwise_cat": True,  # The halves of rotary embeddings are joined in one loop.
}
CHUNK = 256  # Tokens of a prompt that are read at once.
# Sizes while compiling: of a chunk of a prompt, and of its tokens whose logits are needed. Inductor shares out a loop
# over the threads if these sizes make it long.
PREFILL, LAST = 173, 3
CAPACITY = 67  # Slots while compiling (68 for a draft). No other size may equal it, or torch takes them for one symbol.


class CpuGraphs(CpuForwards):
    """Graphs compiled on a CPU. The model's linear layers are packed for the kernels, for good.

    Raises OSError or CalledProcessError if there is no C++ compiler.
    """

    operators = Kernels()
    ragged = True
    verifies = False

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        loader.load()
        # 16-bit layers give 16-bit keys. A 16-bit cache holds the same numbers in half the bytes.
        self.cache_dtype = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if size not in loader.HEAD_WIDTHS:
            raise RuntimeError(f"its heads have {size} numbers; there is a kernel for {loader.HEAD_WIDTHS}")
        self.layers, self.slot = config.num_hidden_layers, (heads, size)
        super().__init__(pack(model), vocabulary)
        self.graphs: dict[tuple[object, ...], Callable[..., Any]] = {}

    def allocate(self, cache: SlotCache, rows: int) -> None:
        """See `Graphs`."""
        cache.early_initialization(rows, *self.slot, self.cache_dtype, self.model.device)

    def add_prefill(self, rows: int) -> None:
        """See `Graphs`. One graph serves prompts of all lengths: the number of tokens is a symbol in it."""
        tokens, positions = zeros(rows, PREFILL, PREFILL)
        last = torch.zeros(LAST, dtype=torch.long)
        for tensor, axis in ((tokens, 1), (positions, 1), (last, 0)):
            mark_dynamic(tensor, axis)
        self.compile(self.prefill_logits, (rows, "prefill"), tokens, positions, last)
        super().add_prefill(rows)

    def add_forward(self, rows: int, width: int) -> None:
        """See `Graphs`."""
        self.compile(self.logits, (rows, width), *zeros(rows, width, width))
        super().add_forward(rows, width)

    def add_draw(self, rows: int, read: int, count: int) -> None:
        """See `Graphs`."""
        inputs = *zeros(rows, read, read + count - 1), torch.rand(count, rows), as_tensor(Sampling())
        self.compile(self.draw_steps, (rows, read, count), *inputs)
        super().add_draw(rows, read, count)

    def add_round(self, draft: Graphs, rows: int, read: int, count: int) -> None:
        """See `Graphs`."""
        assert isinstance(draft, CpuGraphs)
        theirs = draft.empty_caches(rows, CAPACITY + 1)
        filters = as_tensor(Sampling()), as_tensor(Sampling(1.0))  # One tensor given twice would be one input.
        inputs = *zeros(rows, read, read + count), torch.rand(count, rows), *filters, *theirs
        self.compile(Round(draft, self).work, (rows, read, count, draft), *inputs)
        self.rounds.add((draft, rows, read, count))

    def add_nodes(self, rows: int, count: int) -> None:
        """See `Graphs`."""
        self.compile(
            self.tree_logits, (rows, "nodes", count), *zeros(rows, count, count, count), *tree_inputs(rows, count)
        )
        super().add_nodes(rows, count)

    def add_tree(self, rows: int, read: int, tree: Tree) -> None:
        """See `Graphs`."""
        nodes, u = tree.size + 1, torch.rand(rows, tree.draws)
        inputs = *zeros(rows, read, read, nodes, nodes), *tree_inputs(rows, nodes), u, as_tensor(Sampling())
        self.compile(Growth(self, tree).work, (rows, read, tree), *inputs)
        super().add_tree(rows, read, tree)

    def prefill(self, tokens: Tensor, lengths: Sequence[int], cache: SlotCache) -> Tensor:
        """See `Graphs`."""
        self.used += 1
        (rows, longest), ended = tokens.shape, torch.tensor(lengths)
        graph, kept = self.graphs[(rows, "prefill")], keys_values(cache)
        logits = torch.empty(rows, self.vocabulary)
        for start in range(0, longest, CHUNK):
            # Positions are clamped to the prompt: a graph reads two tokens at least, as its sizes are symbols.
            at = torch.arange(start, max(min(start + CHUNK, longest), start + 2)).clamp_(max=longest - 1)
            ends = ((start < ended) & (ended <= start + CHUNK)).nonzero()[:, 0]  # The rows that end in this chunk.
            last, where = (ended[ends] - 1 - start).unique(return_inverse=True)
            positions = at.repeat(rows, 1)
            found = graph(tokens[:, at], positions, pad(last, (0, max(2 - len(last), 0))), *kept)
            logits[ends] = found[ends, where]
        return logits

    def read(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> None:
        """See `Graphs`. As in `prefill`, two tokens at least are read: one is read twice."""
        self.used += 1
        graph, kept, count = self.graphs[(len(tokens), "prefill")], keys_values(cache), tokens.shape[1]
        for start in range(0, count, CHUNK):
            at = torch.arange(start, max(min(start + CHUNK, count), start + 2)).clamp_(max=count - 1)
            graph(tokens[:, at], positions[:, at], torch.zeros(2, dtype=torch.long), *kept)

    def round(
        self,
        draft: Graphs,
        tokens: Tensor,
        positions: Tensor,
        u: Tensor,
        sampling: Sampling,
        own: Sampling,
        draft_cache: SlotCache,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Graphs`."""
        self.used += 1
        graph, filters = self.graphs[(*tokens.shape, len(u), draft)], (as_tensor(sampling), as_tensor(own))
        return graph(tokens.contiguous(), positions, u, *filters, *keys_values(draft_cache), *keys_values(cache))

    def forward_tree(self, tokens: Tensor, places: Places, cache: SlotCache) -> Tensor:
        """See `Graphs`."""
        self.used += 1
        rows, count = tokens.shape
        return self.graphs[rows, "nodes", count](tokens.contiguous(), *places.tensors, *keys_values(cache))

    def grow(
        self,
        tree: Tree,
        tokens: Tensor,
        positions: Tensor,
        places: Places,
        u: Tensor,
        sampling: Sampling,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor]:
        """See `Graphs`."""
        self.used += 1
        given = tokens.contiguous(), positions, *places.tensors, u, as_tensor(sampling)
        return self.graphs[(*tokens.shape, tree)](*given, *keys_values(cache))

    def move(self, source: Tensor, slots: Tensor, cache: SlotCache) -> None:
        """See `Graphs`."""
        torch.ops.native.move(sum(keys_values(cache), []), source, slots)

    def run_forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """See `Graphs`."""
        return self.graphs[tuple(tokens.shape)](tokens, positions, *keys_values(cache))

    def run_draw(
        self, tokens: Tensor, positions: Tensor, u: Tensor, sampling: Sampling, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """See `Graphs`."""
        return self.graphs[(*tokens.shape, len(u))](tokens, positions, u, as_tensor(sampling), *keys_values(cache))

    def compile(self, work: Callable[..., Any], shape: tuple[Any, ...], *inputs: object) -> None:
        """Compile `work`, a bound method, for these inputs and a cache, as the graph named `shape`. What may differ
        between calls is marked as dynamic, and the rest is the shape of the block."""
        # torch keeps compiled code with a function's code object, so each graph needs a code object of its own.
        function = work.__func__  # type: ignore[attr-defined]
        code = function.__code__.replace(co_name="_".join(map(str, (work.__name__, *shape[:3]))))
        own = types.FunctionType(code, function.__globals__, argdefs=function.__defaults__)
        bound = types.MethodType(own, work.__self__)  # type: ignore[attr-defined]
        self.graphs[shape] = FlatGraph(bound, self.backend, *inputs, *self.empty_caches(shape[0], CAPACITY))

    def empty_caches(self, rows: int, capacity: int) -> list[list[Tensor]]:
        """Keys and values to compile with, of all layers; their capacity is a symbol in the graph."""
        shape = rows, self.slot[0], capacity, self.slot[1]
        made = [[torch.zeros(shape, dtype=self.cache_dtype) for _ in range(self.layers)] for _ in range(2)]
        for tensor in sum(made, []):
            mark_dynamic(tensor, 2)
        return made

    def backend(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """The backend of `torch.compile`: Inductor, with our kernels called from C++."""
        functions = loader.CFunctions(loader.SOURCE.read_text())
        options = OPTIONS | {"aot_inductor.custom_ops_to_c_shims": functions}
        return compile_fx(rewritten(graph, self.layers), inputs, config_patches=options)


def rewritten(graph: fx.GraphModule, layers: int) -> fx.GraphModule:
    """The traced graph, with two changes that Inductor cannot know to make: GELU moves into the linear layer before it,
    and sines and cosines are stored, because Inductor would compute them again in each of `layers` layers."""
    for node in list(graph.graph.nodes):
        before: Any = node.args[0] if node.args else None
        if layers > 1 and node.op == "call_method" and node.target in ("sin", "cos"):
            with graph.graph.inserting_after(node):
                stored = graph.graph.call_function(torch.ops.native.stored)
            node.replace_all_uses_with(stored)
            stored.args = (node,)
        elif node.target is torch.nn.functional.gelu and not node.kwargs and is_linear(before):
            before.args = (*before.args, True)
            node.replace_all_uses_with(before)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def is_linear(node: Any) -> bool:
    """Whether an argument of a node is a packed linear layer whose result has one use."""
    return isinstance(node, fx.Node) and node.target is torch.ops.native.linear and len(node.users) == 1


def tree_inputs(rows: int, count: int) -> list[Tensor]:
    """Root and ancestors to compile with."""
    return [torch.zeros(rows, dtype=torch.long), torch.ones(count, dtype=torch.long)]


def zeros(rows: int, *widths: int) -> list[Tensor]:
    """Token ids or positions to compile with."""
    return [torch.zeros(rows, width, dtype=torch.long) for width in widths]


def keys_values(cache: SlotCache) -> tuple[list[Tensor], list[Tensor]]:
    """The keys of all layers, and the values."""
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
