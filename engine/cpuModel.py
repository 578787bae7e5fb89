"""`CpuModel`: on a CPU, a step is compiled as one graph, once for each shape.

The number of slots in the cache (`capacity`) is a symbol in the graph, and how many slots are read follows from the
positions. One graph serves every round and every text. torch keeps it on the disk, so it serves every process too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import mark_dynamic
from torch._inductor.compile_fx import compile_fx
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from decoding.model import Model
from decoding.trees.tree import Places, Tree
from decoding.trees.verification import TreeRule, top_down_rule, traversal_rule
from decoding.verification import Rule, VerificationRule, block_rule, token_rule
from engine.cachedModel import sdpa_in_cache_dtype
from engine.compiledModel import CompiledModel, Step
from engine.flatGraph import FlatGraph
from engine.kernels import loader
from engine.kernels.packedLinear import pack
from engine.steps import read_chunk
from utils import Sampling, penalised

OPTIONS = {
    "cpp_wrapper": True,  # Without it Python calls the kernels, which took a quarter of a small model's forward.
    "size_asserts": False,  # There are dozens a forward.
    "cpp.min_chunk_size": 16384,  # Waking a second thread costs more than most of these loops.
    "force_pointwise_cat": True,  # The halves of rotary embeddings are joined in one loop.
}
# Sizes while compiling, of the last axis of the inputs of a step: tokens and positions of a part of a prompt, and the
# tokens whose logits are needed. They are symbols in the graph. Inductor shares out a loop over the threads if these
# sizes make it long.
SYMBOLS: dict[Step, tuple[int, ...]] = {read_chunk: (173, 173, 3)}
CAPACITY = 67  # Slots while compiling (68 for a second model). No other size may equal it, or torch takes both for one.
ATTENTION = "slots"  # The name in transformers of `attention`.


class CpuModel(CompiledModel):
    """A model whose steps are compiled on a CPU. Its linear layers are packed for the kernels, for good.

    Raises OSError or CalledProcessError if there is no C++ compiler.
    """

    chunk = 256
    ragged = True
    verifies = False  # A kernel verifies after the forward's graph.
    fuses = True

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None, name: str = "model") -> None:
        loader.load()
        super().__init__(model, vocabulary, name)
        if self.heads[1] not in loader.HEAD_WIDTHS:
            raise RuntimeError(f"its heads have {self.heads[1]} numbers; there is a kernel for {loader.HEAD_WIDTHS}")
        # 16-bit layers give 16-bit keys. A 16-bit cache holds the same numbers in half the bytes.
        self.cache_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.graphs: dict[tuple[Any, ...], FlatGraph] = {}
        pack(model).set_attn_implementation(ATTENTION)

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return torch.ops.native.probabilities(penalised(logits.float(), sampling, seen), as_tensor(sampling))

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return torch.ops.native.pick(probs, u)

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.ops.native.siblings(q, u, list(counts))

    def rule(self, verify: Rule) -> Rule:
        return RULES.get(verify, verify)

    def move(self, source: Tensor, slots: Tensor) -> None:
        keys, values = self.keys_values()
        torch.ops.native.move(keys + values, source, slots)

    def by_graph(self, step: Step, *inputs: Any) -> Any:
        models = [self, *(x for x in inputs if isinstance(x, CpuModel))]
        key = step, *(key_of(x, step) for x in inputs)
        if key not in self.graphs:
            self.graphs[key] = self.compile(step, inputs, models)
        tensors = [as_input(x) for x in inputs if not is_static(x)]
        return self.graphs[key](*tensors, *(states for model in models for states in model.keys_values()))

    def keys_values(self) -> tuple[list[Tensor], list[Tensor]]:
        """The keys of all layers in the cache, and the values."""
        assert self.cache is not None
        return [layer.keys for layer in self.cache.layers], [layer.values for layer in self.cache.layers]

    def compile(self, step: Step, inputs: Sequence[Any], models: Sequence[CpuModel]) -> FlatGraph:
        """`step` compiled for inputs of these shapes and caches of any capacity."""
        inner = [(model.model, model.vocabulary) for model in models]
        kinds = ["model" if isinstance(x, CpuModel) else x if isinstance(x, Tree) else "tensor" for x in inputs]

        def work(*given: Any) -> Any:
            tensors, caches = list(given[: -2 * len(inner)]), given[-2 * len(inner) :]
            traced = [TracedModel(*pair, *states) for pair, *states in zip(inner, caches[::2], caches[1::2])]
            others = traced[1:]
            arguments = [
                others.pop(0) if kind == "model" else tensors.pop(0) if kind == "tensor" else kind for kind in kinds
            ]
            return step(traced[0], *arguments)

        # torch keeps compiled code with a function's code object, so each graph needs a code object of its own.
        sizes = [size for x in inputs if isinstance(x, Tensor) for size in x.shape]
        code = work.__code__.replace(co_name="_".join(map(str, (step.__name__, *sizes))))
        function = types.FunctionType(code, work.__globals__, closure=work.__closure__)
        rows = next(len(x) for x in inputs if isinstance(x, Tensor))
        caches = [states for i, model in enumerate(models) for states in model.empty_caches(rows, CAPACITY + i)]
        return FlatGraph(function, self.backend, *examples(step, inputs), *caches)

    def empty_caches(self, rows: int, capacity: int) -> list[list[Tensor]]:
        """Keys and values to compile with, of all layers; their capacity is a symbol in the graph."""
        shape = rows, self.heads[0], capacity, self.heads[1]
        layers = self.model.config.get_text_config().num_hidden_layers
        states = [[torch.zeros(shape, dtype=self.cache_dtype) for _ in range(layers)] for _ in range(2)]
        for tensor in states[0] + states[1]:
            mark_dynamic(tensor, 2)
        return states

    def backend(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """The backend of `torch.compile`: Inductor, with our kernels called from C++."""
        functions = loader.CFunctions(loader.SOURCE.read_text())
        options = OPTIONS | {"aot_inductor.custom_ops_to_c_shims": functions}
        return compile_fx(rewritten(graph, self.model.config.num_hidden_layers), inputs, config_patches=options)


class TracedModel(Model):
    """A model inside a graph: its packed weights, and a cache that is an input of the graph.

    keys, values: the cache of each layer, `[B, heads, capacity, d]`. Its `sampling` is a tensor, see `as_tensor`.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int, keys: list[Tensor], values: list[Tensor]) -> None:
        self.model, self.vocabulary, self.keys, self.values = model, vocabulary, keys, values

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        for states in self.keys + self.values:  # They share one capacity: each call is checked once, not in each layer.
            torch._check(states.shape[2] == self.keys[0].shape[2])
        slots, tree = (positions, None) if places is None else (places.slots, (places.root, places.ancestors))
        cache = Cache(layers=[SlotsLayer(k, v, slots, tree) for k, v in zip(self.keys, self.values)])
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            # Not used, but transformers takes a mask of 4 axes as it is.
            attention_mask=positions[:, None, None] == positions[:, None, :, None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=0 if keep is None else keep,
        ).logits
        return logits[..., : self.vocabulary].float()

    def probabilities(self, logits: Tensor, sampling: Sampling | Tensor, seen: Tensor | None = None) -> Tensor:
        return torch.ops.native.probabilities(logits.contiguous(), sampling)

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return torch.ops.native.pick(probs, u)

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.ops.native.siblings(q.contiguous(), u.contiguous(), list(counts))


class SlotsLayer(StaticLayer):
    """One layer's keys and values `[B, heads, capacity, d]` inside a graph, written at `slots`. tree: see `Slots`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor, tree: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.is_initialized = True
        self.keys, self.values, self.slots, self.tree = keys, values, slots, tree

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Slots, Slots]:
        """The new states with the slots they go to: the attention kernel writes them."""
        written = self.slots, self.tree
        return Slots(key_states, self.keys, *written), Slots(value_states, self.values, *written)

    def get_seq_length(self) -> int:
        """Always 0, as in `engine.cachedModel`."""
        return 0


class Slots:
    """New keys or values `[B, G, n, d]` together with all slots of a layer, `kept[B, G, capacity, d]`.

    The attention kernel writes the new ones to `slots[B, n]`, and each token attends to the slots up to its own. tree:
    root `[B]` and ancestors `[n]` (`Places`), if the tokens are nodes of a tree.
    """

    def __init__(self, states: Tensor, kept: Tensor, slots: Tensor, tree: tuple[Tensor, Tensor] | None = None) -> None:
        self.states, self.kept, self.slots, self.tree = states, kept, slots, tree

    def attended_by(self, query: Tensor, values: Slots, scale: float) -> Tensor:
        """What the queries `[B, H, n, d]` of the same tokens read: `[B, n, H, d]`. The keys are this object's."""
        new, kept = (self.states, values.states, self.slots), (self.kept, values.kept, scale)
        if self.tree is None:
            return torch.ops.native.attend(query, *new, *kept)
        return torch.ops.native.attend_tree(query, *new, *self.tree, *kept)


def attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention by the kernel inside a graph; in an eager forward that of `engine.cachedModel`."""
    if isinstance(key, Slots):
        return key.attended_by(query, value, kwargs["scaling"]), None
    return sdpa_in_cache_dtype(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# The inputs of a graph.


@functools.cache
def as_tensor(sampling: Sampling) -> Tensor:
    """Temperature, top_k and top_p as float64 `[3]`: an input of a graph, which can differ between calls."""
    return torch.tensor([sampling.temperature, sampling.top_k, sampling.top_p], dtype=torch.float64)


def is_static(x: Any) -> bool:
    """Whether an input of a step is part of the graph: a tree or another model."""
    return isinstance(x, (Tree, CpuModel))


def as_input(x: Tensor | Places | Sampling) -> Any:
    """A tensor of the layout that graphs are compiled for, or several."""
    if isinstance(x, Tensor):
        return x.contiguous()
    return as_tensor(x) if isinstance(x, Sampling) else Places(*(tensor.contiguous() for tensor in x))


def key_of(x: Any, step: Step) -> Any:
    """What tells the graph for this input from the graphs for others of the same step."""
    if isinstance(x, Tensor):
        return x.shape[:-1] if step in SYMBOLS else x.shape
    return x if is_static(x) else None


def examples(step: Step, inputs: Sequence[Any]) -> list[Any]:
    """Inputs to compile with. Token 0 at position 0 can be read whatever the capacity."""
    found = []
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor):
            size = SYMBOLS[step][i] if step in SYMBOLS else x.shape[-1]
            found.append(torch.zeros(*x.shape[:-1], size, dtype=x.dtype))
            if step in SYMBOLS:
                mark_dynamic(found[-1], x.dim() - 1)
        elif isinstance(x, Places):
            zeros = [torch.zeros_like(tensor) for tensor in x[:3]]
            found.append(Places(zeros[0], zeros[1], zeros[2], torch.ones_like(x.ancestors)))
        elif isinstance(x, Sampling):
            found.append(as_tensor(x).clone())  # One tensor given twice would be one input.
    return found


def by_kernel(accept: str) -> VerificationRule:
    """A verification rule that the operator of this name computes, but for the last draw."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        accepted, left = getattr(torch.ops.native, accept)(p, q, drafts, u[:, :-1])
        return accepted, torch.ops.native.pick(left, u[:, -1])

    return rule


def tree_by_kernel(traversal: bool) -> TreeRule:
    """A rule for trees, computed by its kernel but for the last draw."""

    def rule(p: Tensor, q: Tensor, drafts: Tensor, u: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
        inputs = p, q, drafts, u[:, :-1], tree.parents, tree.depth, traversal
        accepted, path, left = torch.ops.native.accept_tree(*inputs)
        return accepted, path, torch.ops.native.pick(left, u[:, -1])

    return rule


RULES: dict[Any, Any] = {
    token_rule: by_kernel("accept"),
    block_rule: by_kernel("accept_block"),
    traversal_rule: tree_by_kernel(True),
    top_down_rule: tree_by_kernel(False),
}


# The traced graph.


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
