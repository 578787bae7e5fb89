"""A GPT-NeoX model as an OpenVINO graph with a KV cache in its state, as OpenVINO GenAI reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import openvino
import torch
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo
from torch import Tensor

from benchmark.engines.weights import Weights

Node = Any  # an output of the graph


class GraphBuilder:
    """Builds the graph. bits: 16 for weights in float16; 8 for weights in int8 with a scale for each row."""

    def __init__(self, weights: Weights, bits: int) -> None:
        self.weights, self.bits = weights, bits
        self.alive: list[np.ndarray] = []  # what constants refer to
        self.decompressions: set[str] = set()
        self.states: list[Node] = []

    def constant(self, name: str) -> Node:
        """A weight that is no matrix, in float32."""
        return ops.constant(self.weights[name].astype(np.float32))

    def matrix(self, name: str) -> Node:
        """A matrix, stored in `bits` bits and converted to float32 where it is used."""
        if self.bits == 16:
            return self.marked(ops.convert(self.short(self.weights.stored(name)), "f32"))
        wide = self.weights[name]
        scale = (np.abs(wide).max(1, keepdims=True) / 127).astype(np.float16)
        whole = np.round(wide / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
        stored = ops.multiply(ops.convert(ops.constant(whole), "f16"), ops.constant(scale))
        return ops.convert(stored, "f32")

    def short(self, weight: Tensor) -> Node:
        """A matrix in 16 bits: bfloat16 as the file has it, or else float16. A bfloat16 one is not copied: the graph
        refers to the file."""
        if weight.dtype != torch.bfloat16:
            return ops.constant(weight.to(torch.float16).numpy())
        # numpy has no bfloat16.
        bits = weight.contiguous().view(torch.int16).numpy()
        self.alive.append(bits)
        return ops.constant(openvino.Tensor(bits, bits.shape, openvino.Type.bf16))

    def marked(self, widened: Node) -> Node:
        """A conversion of weights, noted for `mark_decompression`."""
        self.decompressions.add(widened.get_friendly_name())
        return widened

    def linear(self, x: Node, name: str) -> Node:
        """A linear layer with a bias."""
        return ops.add(ops.matmul(x, self.matrix(f"{name}.weight"), False, True), self.constant(f"{name}.bias"))

    def norm(self, x: Node, name: str) -> Node:
        """Layer normalisation."""
        centred = ops.mvn(x, ops.constant(np.array([-1], np.int64)), True, self.weights.epsilon, "inside_sqrt")
        return ops.add(ops.multiply(centred, self.constant(f"{name}.weight")), self.constant(f"{name}.bias"))

    def rotated(self, x: Node, cos: Node, sin: Node) -> Node:
        """Rotary embedding of the first `rotary` numbers of each head."""
        turn, half = self.weights.rotary, self.weights.rotary // 2
        rest = self.weights.head - turn
        parts = ops.variadic_split(x, -1, [turn, rest]).outputs() if rest else [x]
        low, high = ops.variadic_split(parts[0], -1, [half, half]).outputs()
        minus = ops.multiply(high, ops.constant(np.float32(-1)))
        swapped = ops.concat([minus, low], -1)
        turned = ops.add(ops.multiply(parts[0], cos), ops.multiply(swapped, sin))
        return ops.concat([turned, parts[1]], -1) if rest else turned

    def kept(self, new: Node, name: str, batch: Node, beams: Node) -> Node:
        """The KV cache with the new keys or values, `[B, heads, length, head]`, kept in the state `name`."""
        heads, head = self.weights.heads, self.weights.head
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = (
            openvino.PartialShape([-1, heads, -1, head]),
            openvino.Type.f32,
            name,
        )
        variable = Variable(info)
        shape = ops.concat([batch, ops.constant(np.array([heads, 0, head], np.int64))], 0)
        empty = ops.broadcast(ops.constant(np.float32(0)), shape)
        past = ops.gather(ops.read_value(empty, variable), beams, ops.constant(np.int64(0)))
        whole = ops.concat([past, new], 2)
        self.states.append(ops.assign(whole, variable))
        return whole

    def layer(self, x: Node, number: int, inputs: dict[str, Node]) -> Node:
        """One layer: attention and MLP, side by side."""
        name, heads, head = f"gpt_neox.layers.{number}", self.weights.heads, self.weights.head
        attention = f"{name}.attention"
        qkv = self.linear(self.norm(x, f"{name}.input_layernorm"), f"{attention}.query_key_value")
        qkv = ops.reshape(qkv, ops.constant(np.array([0, 0, heads, 3 * head], np.int64)), True)
        qkv = ops.transpose(qkv, ops.constant(np.array([0, 2, 1, 3], np.int64)))
        q, k, v = ops.variadic_split(qkv, -1, [head] * 3).outputs()
        q, k = (self.rotated(part, inputs["cos"], inputs["sin"]) for part in (q, k))
        k = self.kept(k, f"past.{number}.key", inputs["batch"], inputs["beams"])
        v = self.kept(v, f"past.{number}.value", inputs["batch"], inputs["beams"])
        read = ops.scaled_dot_product_attention(q, k, v, inputs["mask"])
        read = ops.transpose(read, ops.constant(np.array([0, 2, 1, 3], np.int64)))
        read = ops.reshape(read, ops.constant(np.array([0, 0, heads * head], np.int64)), True)
        wide = ops.gelu(
            self.linear(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp.dense_h_to_4h"), "erf"
        )
        mlp = self.linear(wide, f"{name}.mlp.dense_4h_to_h")
        return ops.add(ops.add(self.linear(read, f"{attention}.dense"), mlp), x)

    def model(self) -> openvino.Model:
        """The whole graph: token ids to logits."""
        ids, mask, at = (
            named(ops.parameter([-1, -1], np.int64), name) for name in ("input_ids", "attention_mask", "position_ids")
        )
        beams = named(ops.parameter([-1], np.int32), "beam_idx")
        zero, one = ops.constant(np.array([0], np.int64)), ops.constant(np.array([1], np.int64))
        batch = ops.gather(ops.shape_of(ids), zero, ops.constant(np.int64(0)))
        cos, sin = self.angles(at)
        inputs = {"batch": batch, "beams": beams, "cos": cos, "sin": sin, "mask": causal(ids, mask, zero, one)}
        x = ops.gather(self.matrix("gpt_neox.embed_in.weight"), ops.convert(ids, "i32"), ops.constant(np.int64(0)))
        for number in range(self.weights.layers):
            x = self.layer(x, number, inputs)
        logits = ops.matmul(self.norm(x, "gpt_neox.final_layer_norm"), self.matrix("embed_out.weight"), False, True)
        result = ops.result(logits)
        result.output(0).get_tensor().set_names({"logits"})
        return openvino.Model([result], self.states, [ids, mask, at, beams], "gpt_neox")

    def angles(self, at: Node) -> tuple[Node, Node]:
        """Cosine and sine of the rotary embedding, `[B, 1, n, rotary]`."""
        turn = self.weights.rotary
        inverse = 1 / self.weights.theta ** (np.arange(0, turn, 2, dtype=np.float32) / turn)
        wide = ops.unsqueeze(ops.unsqueeze(ops.convert(at, "f32"), 1), 3)
        angle = ops.multiply(wide, ops.constant(inverse[None, None, None]))
        both = ops.concat([angle, angle], -1)
        return ops.cos(both), ops.sin(both)


def named(parameter: Node, name: str) -> Node:
    """An input of the graph with a name."""
    parameter.set_friendly_name(name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def causal(ids: Node, mask: Node, zero: Node, one: Node) -> Node:
    """The mask of attention, float32 `[B, 1, n, length]`: 0 where a token attends, else the lowest number."""
    axis, whole = ops.constant(np.int64(0)), ops.constant(np.int64(1))
    length = ops.squeeze(ops.gather(ops.shape_of(mask), one, axis), zero)
    new = ops.squeeze(ops.gather(ops.shape_of(ids), one, axis), zero)
    keys = ops.range(axis, length, whole, "i64")
    queries = ops.range(ops.subtract(length, new), length, whole, "i64")
    later = ops.greater(ops.unsqueeze(keys, 0), ops.unsqueeze(queries, 1))
    padded = ops.equal(ops.unsqueeze(ops.unsqueeze(mask, 1), 1), ops.constant(np.int64(0)))
    hidden = ops.logical_or(ops.unsqueeze(ops.unsqueeze(later, 0), 0), padded)
    return ops.select(hidden, ops.constant(np.float32(np.finfo(np.float32).min)), ops.constant(np.float32(0)))


def write_graph(weights: Weights, bits: int, folder: Path) -> None:
    """Write the model as openvino_model.xml and openvino_model.bin."""
    path, builder = folder / "openvino_model.xml", GraphBuilder(weights, bits)
    openvino.save_model(builder.model(), path, compress_to_fp16=False)
    mark_decompression(path, builder.decompressions)


def mark_decompression(path: Path, names: set[str]) -> None:
    """Mark conversions in a written graph as the decompression of weights, as OpenVINO's own converter marks them.

    Otherwise the plugin widens all weights to float32 when it loads the graph, and keeps them beside the ones that it
    computes with: three times the memory. Its Python interface has no call that sets the mark.
    """
    tree = ElementTree.parse(path)
    for layer in tree.iter("layer"):
        if layer.get("name") in names:
            mark = ElementTree.Element("rt_info")
            ElementTree.SubElement(mark, "attribute", name="decompression", version="0")
            layer.insert(1, mark)  # after <data>
    tree.write(path, encoding="utf-8", xml_declaration=True)
