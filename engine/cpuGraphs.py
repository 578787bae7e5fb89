"""`CompiledForward`: the forward of a few tokens as one graph, compiled once for each shape `[B, n]` of a block.

How many slots there are (`capacity`) is a symbol in the graph, and how many are read follows from the positions: it
serves every round, every text, and, from torch's cache on the disk, every process.
"""

import types

import torch
from torch._dynamo import mark_dynamic
from torch._inductor.compile_fx import compile_fx
from transformers.cache_utils import Cache, StaticLayer

from decoding.rounds import steps
from engine.attention import Whole
from engine.graphs import BlockWidths
from engine.kernels import native as nativeKernels
from engine.kernels.packedLinear import pack
from utils import Sampling, as_tensor


class Slots(StaticLayer):
    """One layer's keys and values `[B, heads, capacity, d]` inside a graph, written at `positions`."""

    def __init__(self, keys, values, positions):
        super().__init__(max_cache_len=keys.shape[2])
        self.is_initialized = True
        self.keys, self.values, self.positions = keys, values, positions

    def update(self, key_states, value_states, *args, **kwargs):
        return Whole(key_states, self.keys, self.positions), Whole(value_states, self.values, self.positions)

    def get_seq_length(self):
        return 0


class CompiledForward(BlockWidths):
    """model: a transformers causal LM on a CPU, whose linear layers get packed; vocabulary: entries of the logits kept.

    kept_as: the dtype its cache must have. Raises OSError or CalledProcessError where there is no C++ compiler."""

    def __init__(self, model, vocabulary):
        super().__init__()
        nativeKernels.load()
        # 16-bit keys come out of 16-bit layers: kept so they are the same numbers, and half as many bytes to read.
        self.kept_as = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if size not in nativeKernels.WIDTHS:
            raise RuntimeError(f"its heads have {size} numbers; there is a kernel for {nativeKernels.WIDTHS}")
        self.layers, self.slot = config.num_hidden_layers, (heads, size)
        self.model, self.vocabulary, self._graphs = pack(model), vocabulary, {}

    def forward(self, tokens, positions, keys, values):
        """keys, values: of each layer."""
        for kept in keys + values:  # one number of slots, or each call would be asked for it as often
            torch._check(kept.shape[2] == keys[0].shape[2])
        cache = Cache(layers=[Slots(k, v, positions) for k, v in zip(keys, values)])
        mask = positions[:, None, None] == positions[:, None, :, None]  # four axes, and it is taken as given: not used
        logits = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits
        return logits[..., : self.vocabulary].float()

    def run_on(self, tokens, positions, u, settings, keys, values):
        """The steps of runs.py. settings: `utils.as_tensor`."""

        def forward(tokens, at):
            return self.forward(tokens, at, keys, values)

        drawn, q = zip(*steps(forward, lambda logits: distributions(logits, settings), tokens, positions, u))
        return torch.stack(drawn, 1), torch.stack(q, 1)

    def add(self, rows, width):
        """Compile the graph for blocks `[rows, width]`."""
        self.compile(self.forward, (rows, width), *made_up(rows, width, width))
        super().add(rows, width)

    def add_run(self, rows, width, count):
        """Compile the graph for runs of `count` tokens after blocks `[rows, width]`."""
        inputs = *made_up(rows, width, width + count - 1), torch.rand(count, rows), as_tensor(Sampling())
        self.compile(self.run_on, (rows, width, count), *inputs)
        super().add_run(rows, width, count)

    def add_round(self, draft, rows, width, count):
        """Compile the graph for rounds: runs of `count` tokens by the graphs `draft` of another model after blocks
        `[rows, width]`, and the forward of the block's last token and of those."""
        theirs = draft.made_up_caches(rows, CAPACITY + 1)
        inputs = *made_up(rows, width, width + count), torch.rand(count, rows), as_tensor(Sampling()), *theirs
        self.compile(Round(draft, self).work, (rows, width, count, draft), *inputs)
        self.rounds.add((draft, rows, width, count))

    def compile(self, work, shape, *inputs):
        # There are no guards: what may differ between calls is marked, and the rest is the shape of the block. What is
        # compiled is kept with a function's code, so each graph needs code of its own.
        code = work.__func__.__code__.replace(co_name="_".join(map(str, (work.__name__, *shape[:3]))))
        graph = torch.compile(
            types.MethodType(types.FunctionType(code, globals()), work.__self__),
            fullgraph=True,
            backend=self.backend,
            options={"guard_filter_fn": lambda guards: [False] * len(guards)},
        )
        graph(*inputs, *self.made_up_caches(shape[0], CAPACITY))
        self._graphs[shape] = graph

    def made_up_caches(self, rows, capacity):
        shape = rows, self.slot[0], capacity, self.slot[1]
        made = [[torch.zeros(shape, dtype=self.kept_as) for _ in range(self.layers)] for _ in range(2)]
        for tensor in sum(made, []):
            mark_dynamic(tensor, 2)
        return made

    def backend(self, graph, inputs):
        functions = nativeKernels.CFunctions(nativeKernels.SOURCE.read_text())
        options = OPTIONS | {"aot_inductor.custom_ops_to_c_shims": functions}
        return compile_fx(rewritten(graph, self.layers), inputs, config_patches=options)

    def __call__(self, tokens, positions, cache):
        """Logits as of `CachedModel.forward`."""
        filled, at = self.fill(tokens, positions)
        return self._graphs[*filled.shape](filled, at, *parts(cache))[:, : tokens.shape[1]]

    def part_of_run(self, tokens, positions, u, sampling, cache):
        return self._graphs[*tokens.shape, len(u)](tokens, positions, u, as_tensor(sampling), *parts(cache))

    def round(self, draft, tokens, positions, u, sampling, theirs, cache):
        """What `CachedModel.round_at_once` returns; theirs: the draft's cache."""
        self.used += 1
        graph = self._graphs[*tokens.shape, len(u), draft]
        return graph(tokens.contiguous(), positions, u, as_tensor(sampling), *parts(theirs), *parts(cache))


class Round:
    """A run by the graphs `draft` and then a forward by the graphs `target`, to be one graph."""

    def __init__(self, draft, target):
        self.draft, self.target = draft, target

    def work(self, tokens, positions, u, settings, their_keys, their_values, keys, values):
        """Returns the tokens drawn and their distributions, and the target's before each and after the last."""
        drafts, q = self.draft.run_on(tokens, positions[:, :-1], u, settings, their_keys, their_values)
        drafts = drafts.clamp(max=self.draft.vocabulary - 1)  # a guess from nan is no token, as in drafters.py
        block = torch.cat([tokens[:, -1:], drafts], 1)
        logits = self.target.forward(block, positions[:, -block.shape[1] :], keys, values)
        return drafts, q, distributions(logits, settings)


OPTIONS = {
    "cpp_wrapper": True,  # what calls the kernels is no Python: it took a quarter of a small model's forward
    "size_asserts": False,  # dozens of calls a forward
    "cpp.min_chunk_size": 16384,  # waking a second thread costs more than most of these loops
    "force_pointwise_cat": True,  # the halves of rotary embeddings are joined in one loop
}


def rewritten(graph, layers):
    """What Inductor cannot know: that GELU costs least in the linear layer before it, and that sines and cosines are to
    be stored, or it would compute them anew in each of several layers. graph: the `torch.fx.GraphModule` of what is
    traced."""
    for node in list(graph.graph.nodes):
        before = node.args[0] if node.args else None
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


def is_linear(node):
    return node.target is torch.ops.native.linear and len(node.users) == 1


CAPACITY = 67  # slots of what graphs are made with (68 a draft's): no other size, or it would be taken for the same


def distributions(logits, settings):
    return torch.ops.native.probabilities(logits.contiguous(), settings)


def made_up(rows, *widths):
    return [torch.zeros(rows, width, dtype=torch.long) for width in widths]


def parts(cache):
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
