"""`CompiledForward`: the forward of a few tokens as one graph, compiled once for each shape `[B, n]` of a block.

How many slots are read (`reach`) and how many there are (`capacity`) are symbols in the graph: it serves every round,
every text, and, from torch's cache on the disk, every process.
"""

import types

import torch
from torch._dynamo import mark_dynamic
from transformers.cache_utils import Cache, StaticLayer

import nativeAttention
from attention import Whole
from blockWidths import BlockWidths
from packedLinear import pack


class Slots(StaticLayer):
    """One layer's keys and values `[B, heads, capacity, d]` inside a graph, written at `slots`."""

    def __init__(self, keys, values, slots):
        super().__init__(max_cache_len=keys.shape[2])
        self.is_initialized = True
        self.keys, self.values, self.slots = keys, values, slots

    def update(self, key_states, value_states, *args, **kwargs):
        # Not scatter_, for which Inductor copies the whole cache.
        rows = torch.arange(len(self.slots), device=self.slots.device)[:, None]
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            kept.transpose(1, 2).index_put_((rows, self.slots), states.transpose(1, 2).to(kept.dtype))
        return Whole(self.keys), Whole(self.values)

    def get_seq_length(self):
        return 0


class CompiledForward(BlockWidths):
    """model: a transformers causal LM on a CPU, whose linear layers get packed; vocabulary: entries of the logits kept.

    kept_as: the dtype its cache must have. Raises OSError or CalledProcessError where there is no C++ compiler."""

    def __init__(self, model, vocabulary):
        super().__init__()
        nativeAttention.library()
        # 16-bit keys come out of 16-bit layers: kept so they are the same numbers, and half as many bytes to read.
        self.kept_as = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if size not in nativeAttention.WIDTHS:
            raise RuntimeError(f"its heads have {size} numbers; there is a kernel for {nativeAttention.WIDTHS}")
        self.layers, self.slot = config.num_hidden_layers, (heads, size)
        self.model, self.vocabulary, self._graphs = pack(model), vocabulary, {}

    def step(self, tokens, positions, slots, mask, keys, values):
        cache = Cache(layers=[Slots(k, v, slots) for k, v in zip(keys, values)])
        logits = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits
        return logits[..., : self.vocabulary].float()

    def add(self, rows, width):
        """Compile the graph for blocks `[rows, width]`, with tokens and slots made up."""
        # There are no guards: what may differ between calls is marked, and the rest is the shape of the block. What is
        # compiled is kept with a function's code, so each graph needs code of its own.
        code = CompiledForward.step.__code__.replace(co_name=f"step_{rows}_{width}")
        step = torch.compile(
            types.MethodType(types.FunctionType(code, globals()), self),
            fullgraph=True,
            options={"guard_filter_fn": lambda guards: [False] * len(guards)},
        )
        capacity, reach = 67, 41  # sizes that are equal here would be taken for one and the same
        mask = torch.ones(rows, 1, width, reach, dtype=torch.bool)
        mark_dynamic(mask, 3)
        keys, values = (
            [torch.zeros(rows, self.slot[0], capacity, self.slot[1], dtype=self.kept_as) for _ in range(self.layers)]
            for _ in range(2)
        )
        for tensor in keys + values:
            mark_dynamic(tensor, 2)
        step(*(torch.zeros(rows, width, dtype=torch.long) for _ in range(3)), mask, keys, values)
        self._graphs[rows, width] = step
        super().add(rows, width)

    def __call__(self, tokens, positions, slots, mask, cache):
        """mask: bool `[B, 1, n, reach]`; the rest as in `CachedModel.forward`."""
        inputs = self.fill(tokens, positions, slots, mask)
        keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        return self._graphs[tuple(inputs[0].shape)](*inputs, keys, values)[:, : tokens.shape[1]]
