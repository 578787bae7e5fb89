"""A GPT-NeoX or Llama model as the graph that OpenVINO GenAI reads, with a KV cache in the graph's state."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as ops

from methods.programs.program import Weights

Node = Any  # an output of the graph
ZERO = np.float32(0)


class GraphBuilder:
    """Builds the graph. form: bfloat16, or int8 with a scale for each row."""

    def __init__(self, weights: Weights, form: str) -> None:
        self.weights, self.form = weights, form
        self.alive: list[np.ndarray] = []  # Constants refer to this memory until the graph is written.
        self.decompressions: set[str] = set()
        self.states: list[Node] = []

    def model(self) -> openvino.Model:
        """The whole graph: token ids to logits."""
        weights, inputs = self.weights, []
        for name, rank in {"input_ids": 2, "attention_mask": 2, "position_ids": 2, "beam_idx": 1}.items():
            inputs.append(ops.parameter([-1] * rank, np.int64 if rank == 2 else np.int32))
            inputs[-1].set_friendly_name(name)
            inputs[-1].output(0).get_tensor().set_names({name})
        ids, mask, positions, self.beams = inputs
        self.batch = ops.gather(ops.shape_of(ids), [0], 0)
        # Cosine and sine of the rotary embedding, `[B, 1, n, rotary]`.
        inverse = 1 / weights.theta ** (np.arange(0, weights.rotary, 2, dtype=np.float32) / weights.rotary)
        angle = ops.unsqueeze(ops.convert(positions, "f32"), [1, 3]) * inverse[None, None, None]
        twice = ops.concat([angle, angle], -1)
        self.cos, self.sin = ops.cos(twice), ops.sin(twice)
        # The causal mask, float32 `[B, 1, n, length]`: 0 where a token attends, else the lowest number.
        length, count = (ops.gather(ops.shape_of(tokens), 1, 0) for tokens in (mask, ids))
        keys, queries = ops.range(0, length, 1, "i64"), ops.range(length - count, length, 1, "i64")
        later = ops.greater(ops.unsqueeze(keys, 0), ops.unsqueeze(queries, 1))
        hidden = ops.logical_or(ops.unsqueeze(later, [0, 1]), ops.equal(ops.unsqueeze(mask, [1, 2]), 0))
        self.mask = ops.select(hidden, np.finfo(np.float32).min, ZERO)
        if weights.llama:
            embedding, norm, head, layer = "model.embed_tokens", "model.norm", "lm_head", self.llama_layer
        else:
            embedding, norm, head = "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"
            layer = self.neox_layer
        x = ops.gather(self.matrix(f"{embedding}.weight"), ops.convert(ids, "i32"), 0)
        for number in range(weights.layers):
            x = layer(x, number)
        result = ops.result(self.linear(self.norm(x, norm), head))
        result.output(0).get_tensor().set_names({"logits"})
        return openvino.Model([result], self.states, inputs, "decoder")

    def llama_layer(self, x: Node, number: int) -> Node:
        """One layer: attention, and after it an MLP with a gate."""
        name, weights = f"model.layers.{number}", self.weights
        normed = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.by_head(self.linear(normed, f"{name}.self_attn.{part}_proj"), heads, weights.head)
            for part, heads in (("q", weights.heads), ("k", weights.groups), ("v", weights.groups))
        )
        x = x + self.linear(self.attention(q, k, v, number), f"{name}.self_attn.o_proj")
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return x + self.linear(ops.swish(gate) * up, f"{name}.mlp.down_proj")

    def neox_layer(self, x: Node, number: int) -> Node:
        """One layer of GPT-NeoX: attention and MLP, side by side or one after the other."""
        name, heads, head = f"gpt_neox.layers.{number}", self.weights.heads, self.weights.head
        qkv = self.linear(self.norm(x, f"{name}.input_layernorm"), f"{name}.attention.query_key_value")
        q, k, v = ops.variadic_split(self.by_head(qkv, heads, 3 * head), -1, [head] * 3).outputs()
        read = self.linear(self.attention(q, k, v, number), f"{name}.attention.dense")
        normed = self.norm(x if self.weights.parallel else x + read, f"{name}.post_attention_layernorm")
        inner = self.linear(normed, f"{name}.mlp.dense_h_to_4h")
        return read + self.linear(ops.gelu(inner, "erf"), f"{name}.mlp.dense_4h_to_h") + x

    def attention(self, q: Node, k: Node, v: Node, number: int) -> Node:
        """Attention of queries, keys and values `[B, heads, n, head]`: `[B, n, heads * head]`."""
        k, v = self.cached(self.rotated(k), f"past.{number}.key"), self.cached(v, f"past.{number}.value")
        read = ops.scaled_dot_product_attention(self.rotated(q), k, v, self.mask)
        width = self.weights.heads * self.weights.head
        return ops.reshape(ops.transpose(read, [0, 2, 1, 3]), [0, 0, width], True)

    def cached(self, new: Node, name: str) -> Node:
        """The keys or values so far, `[B, heads, length, head]`. The state `name` holds those of `groups` heads, which
        several heads may share."""
        heads, groups, head = self.weights.heads, self.weights.groups, self.weights.head
        shape = openvino.PartialShape([-1, groups, -1, head])
        empty = ops.broadcast(ZERO, ops.concat([self.batch, [groups, 0, head]], 0))
        past = ops.gather(ops.read_value(empty, name, openvino.Type.f32, shape), self.beams, 0)
        cache = ops.concat([past, new], 2)
        self.states.append(ops.assign(cache, name))
        if heads == groups:
            return cache
        repeated = ops.broadcast(ops.unsqueeze(cache, 2), [1, 1, heads // groups, 1, 1], broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(repeated, [0, heads, -1, head], True)

    def by_head(self, x: Node, heads: int, width: int) -> Node:
        """`[B, n, heads * width]` as `[B, heads, n, width]`."""
        return ops.transpose(ops.reshape(x, [0, 0, heads, width], True), [0, 2, 1, 3])

    def rotated(self, x: Node) -> Node:
        """Rotary embedding of the first `rotary` numbers of each head. OpenVINO fuses it if the axis is 3, not -1."""
        rotary, rest = self.weights.rotary, self.weights.head - self.weights.rotary
        turning, *unrotated = ops.variadic_split(x, 3, [rotary, rest]).outputs() if rest else [x]
        low, high = ops.variadic_split(turning, 3, [rotary // 2] * 2).outputs()
        swapped = ops.concat([ops.multiply(high, np.float32(-1)), low], -1)
        turned = ops.multiply(turning, self.cos) + swapped * self.sin
        return ops.concat([turned, *unrotated], -1) if rest else turned

    def norm(self, x: Node, name: str) -> Node:
        """Layer normalisation; Llama's has no mean and no bias."""
        scale, epsilon = self.weights[f"{name}.weight"], self.weights.epsilon
        if self.weights.llama:
            squares = ops.reduce_mean(ops.power(x, np.float32(2)), [-1], True)
            return x / ops.sqrt(ops.add(squares, np.float32(epsilon))) * scale
        return ops.mvn(x, [-1], True, epsilon, "inside_sqrt") * scale + self.weights[f"{name}.bias"]

    def linear(self, x: Node, name: str) -> Node:
        """A linear layer, with its bias if it has one."""
        y = ops.matmul(x, self.matrix(f"{name}.weight"), False, True)
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights.files else y

    def matrix(self, name: str) -> Node:
        """A matrix, converted to float32 where it is used: stored in int8 with scales; in bfloat16 if the file has it,
        without a copy: the graph refers to the file; or else in float16."""
        if self.form == "int8":
            weight = self.weights[name]
            scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float16)
            rounded = np.round(weight / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
            return ops.convert(ops.convert(ops.constant(rounded), "f16") * scale, "f32")
        weight = self.weights.stored(name)
        if weight.dtype == torch.bfloat16:  # numpy has no bfloat16.
            bits = weight.contiguous().view(torch.int16).numpy()
            self.alive.append(bits)
            stored = ops.constant(openvino.Tensor(bits, bits.shape, openvino.Type.bf16))
        else:
            stored = ops.constant(weight.to(torch.float16).numpy())
        widened = ops.convert(stored, "f32")
        self.decompressions.add(widened.get_friendly_name())
        return widened
