"""OpenVINO GenAI, and a model as the graph that it reads, with a KV cache in the graph's state."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import openvino
import openvino_genai
import torch
from openvino import opset13 as ops

from benchmark.engines.adapters import Answer, Engine, LoadRequest, TextRequest, Weights

Node = Any  # an output of the graph
CACHE = 1  # GB of KV cache


class OpenVino(Engine):
    """A pipeline. Unquantised rows have an unquantised KV cache too: by default OpenVINO keeps it in 8 bits."""

    version = openvino_genai.__version__

    def __init__(self, request: LoadRequest) -> None:
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": request.threads}
        if request.precision != "int8":
            short = {"bfloat16": "bf16", "float32": "f32"}[request.precision]
            settings |= {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
        # By default it keeps the keys and values of earlier prompts, and reads a prompt that it knows in half the time.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE, False
        options: dict[str, Any] = {"scheduler_config": scheduler}
        self.gamma = request.gamma if request.draft else None
        if request.draft:
            options["draft_model"] = openvino_genai.draft_model(request.draft, "CPU", **settings)
        self.settings = settings | {"num_assistant_tokens": self.gamma, "enable_prefix_caching": False}
        self.pipeline = openvino_genai.LLMPipeline(request.target, "CPU", **settings, **options)

    @staticmethod
    def convert(weights: Weights, folder: Path, bits: int) -> None:
        """The graph, its other files for GenAI, and the tokenizer if it exists: a draft model needs it."""
        path, builder = folder / "openvino_model.xml", GraphBuilder(weights, bits)
        openvino.save_model(builder.model(), path, compress_to_fp16=False)
        # Mark conversions of weights as decompression, as OpenVINO's own converter does; its Python interface has no
        # call for that. Otherwise the plugin widens all weights to float32 when it loads the graph, and keeps them
        # beside the ones that it computes with: three times the memory.
        tree = ElementTree.parse(path)
        for layer in tree.iter("layer"):
            if layer.get("name") in builder.decompressions:
                mark = ElementTree.Element("rt_info")
                ElementTree.SubElement(mark, "attribute", name="decompression", version="0")
                layer.insert(1, mark)  # after <data>
        tree.write(path, encoding="utf-8", xml_declaration=True)
        config = {key: value for key, value in weights.config.items() if isinstance(value, (int, float, str))}
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": weights.vocabulary}))
        (folder / "generation_config.json").write_text("{}")
        if (weights.folder / "tokenizer.json").exists():
            from openvino_tokenizers import convert_tokenizer
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(weights.folder)
            for name, model in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True)):
                openvino.save_model(model, folder / f"openvino_{name}.xml")

    def generate(self, request: TextRequest) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.rng_seed = request.count, True, request.seed
        if request.temperature:
            config.do_sample, config.temperature, config.top_p = True, request.temperature, request.top_p
        if self.gamma:
            config.num_assistant_tokens = self.gamma
        tokens = openvino.Tensor(np.array([request.prompt], np.int64))
        mask = openvino.Tensor(np.ones((1, len(request.prompt)), np.int64))
        streamer = TimeStreamer()
        result = self.pipeline.generate(openvino_genai.TokenizedInputs(tokens, mask), config, streamer)
        return list(result.tokens[0]), streamer.times


class TimeStreamer(openvino_genai.StreamerBase):
    """Notes when tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.start = time.perf_counter()
        self.times: list[tuple[float, int]] = []

    def write(self, tokens: Any) -> openvino_genai.StreamingStatus:
        self.times.append((time.perf_counter() - self.start, 1 if isinstance(tokens, int) else len(tokens)))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class GraphBuilder:
    """Builds the graph. bits: 16 for weights in 16 bits; 8 for weights in int8 with a scale for each row."""

    def __init__(self, weights: Weights, bits: int) -> None:
        self.weights, self.bits = weights, bits
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
        self.batch = ops.gather(ops.shape_of(ids), integers(0), integer(0))
        # Cosine and sine of the rotary embedding, `[B, 1, n, rotary]`.
        inverse = 1 / weights.theta ** (np.arange(0, weights.rotary, 2, dtype=np.float32) / weights.rotary)
        column = ops.unsqueeze(ops.unsqueeze(ops.convert(positions, "f32"), 1), 3)
        angle = ops.multiply(column, ops.constant(inverse[None, None, None]))
        twice = ops.concat([angle, angle], -1)
        self.cos, self.sin = ops.cos(twice), ops.sin(twice)
        # The causal mask, float32 `[B, 1, n, length]`: 0 where a token attends, else the lowest number.
        length, count = (ops.gather(ops.shape_of(tokens), integer(1), integer(0)) for tokens in (mask, ids))
        keys = ops.range(integer(0), length, integer(1), "i64")
        queries = ops.range(ops.subtract(length, count), length, integer(1), "i64")
        later = ops.greater(ops.unsqueeze(keys, 0), ops.unsqueeze(queries, 1))
        padded = ops.equal(ops.unsqueeze(ops.unsqueeze(mask, 1), 1), integer(0))
        hidden = ops.logical_or(ops.unsqueeze(ops.unsqueeze(later, 0), 0), padded)
        lowest = ops.constant(np.finfo(np.float32).min)
        self.mask = ops.select(hidden, lowest, ops.constant(np.float32(0)))
        if weights.llama:
            embedding, norm, head, layer = "model.embed_tokens", "model.norm", "lm_head", self.llama_layer
        else:
            embedding, norm, head = "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"
            layer = self.neox_layer
        x = ops.gather(self.matrix(f"{embedding}.weight"), ops.convert(ids, "i32"), integer(0))
        for number in range(weights.layers):
            x = layer(x, number)
        logits = ops.matmul(self.norm(x, norm), self.matrix(f"{head}.weight"), False, True)
        result = ops.result(logits)
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
        x = ops.add(x, self.linear(self.attention(q, k, v, number), f"{name}.self_attn.o_proj"))
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return ops.add(x, self.linear(ops.multiply(ops.swish(gate), up), f"{name}.mlp.down_proj"))

    def neox_layer(self, x: Node, number: int) -> Node:
        """One layer of GPT-NeoX: attention and MLP, side by side."""
        name, heads, head = f"gpt_neox.layers.{number}", self.weights.heads, self.weights.head
        qkv = self.linear(self.norm(x, f"{name}.input_layernorm"), f"{name}.attention.query_key_value")
        q, k, v = ops.variadic_split(self.by_head(qkv, heads, 3 * head), -1, [head] * 3).outputs()
        read = self.attention(q, k, v, number)
        normed = self.norm(x, f"{name}.post_attention_layernorm")
        mlp = self.linear(
            ops.gelu(self.linear(normed, f"{name}.mlp.dense_h_to_4h"), "erf"), f"{name}.mlp.dense_4h_to_h"
        )
        return ops.add(ops.add(self.linear(read, f"{name}.attention.dense"), mlp), x)

    def attention(self, q: Node, k: Node, v: Node, number: int) -> Node:
        """Attention of queries, keys and values `[B, heads, n, head]`: `[B, n, heads * head]`."""
        q, k = self.rotated(q), self.cached(self.rotated(k), f"past.{number}.key")
        v = self.cached(v, f"past.{number}.value")
        read = ops.scaled_dot_product_attention(q, self.for_all_heads(k), self.for_all_heads(v), self.mask)
        read = ops.transpose(read, integers(0, 2, 1, 3))
        return ops.reshape(read, integers(0, 0, self.weights.heads * self.weights.head), True)

    def cached(self, new: Node, name: str) -> Node:
        """The KV cache with the new keys or values, `[B, heads, length, head]`. The state `name` holds it."""
        heads, head = self.weights.groups, self.weights.head
        shape = openvino.PartialShape([-1, heads, -1, head])
        empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([self.batch, integers(heads, 0, head)], 0))
        past = ops.gather(ops.read_value(empty, name, openvino.Type.f32, shape), self.beams, integer(0))
        cache = ops.concat([past, new], 2)
        self.states.append(ops.assign(cache, name))
        return cache

    def for_all_heads(self, states: Node) -> Node:
        """Keys or values `[B, groups, n, head]`, repeated for the heads that share them."""
        heads, groups, head = self.weights.heads, self.weights.groups, self.weights.head
        if heads == groups:
            return states
        times = integers(1, 1, heads // groups, 1, 1)
        repeated = ops.broadcast(ops.unsqueeze(states, integer(2)), times, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(repeated, integers(0, heads, -1, head), True)

    def by_head(self, x: Node, heads: int, width: int) -> Node:
        """`[B, n, heads * width]` as `[B, heads, n, width]`."""
        return ops.transpose(ops.reshape(x, integers(0, 0, heads, width), True), integers(0, 2, 1, 3))

    def rotated(self, x: Node) -> Node:
        """Rotary embedding of the first `rotary` numbers of each head."""
        rotary, rest = self.weights.rotary, self.weights.head - self.weights.rotary
        turning, *unrotated = ops.variadic_split(x, -1, [rotary, rest]).outputs() if rest else [x]
        low, high = ops.variadic_split(turning, -1, [rotary // 2, rotary // 2]).outputs()
        swapped = ops.concat([ops.multiply(high, ops.constant(np.float32(-1))), low], -1)
        turned = ops.add(ops.multiply(turning, self.cos), ops.multiply(swapped, self.sin))
        return ops.concat([turned, *unrotated], -1) if rest else turned

    def norm(self, x: Node, name: str) -> Node:
        """Layer normalisation; Llama's has no mean and no bias."""
        if self.weights.llama:
            squares = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2))), integers(-1), True)
            root = ops.sqrt(ops.add(squares, ops.constant(np.float32(self.weights.epsilon))))
            return ops.multiply(ops.divide(x, root), ops.constant(self.weights[f"{name}.weight"]))
        centred = ops.mvn(x, integers(-1), True, self.weights.epsilon, "inside_sqrt")
        scale, shift = (ops.constant(self.weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return ops.add(ops.multiply(centred, scale), shift)

    def linear(self, x: Node, name: str) -> Node:
        """A linear layer, with its bias if it has one."""
        y = ops.matmul(x, self.matrix(f"{name}.weight"), False, True)
        return ops.add(y, ops.constant(self.weights[f"{name}.bias"])) if f"{name}.bias" in self.weights.files else y

    def matrix(self, name: str) -> Node:
        """A matrix, converted to float32 where it is used: stored in int8 with scales; in bfloat16 if the file has it,
        without a copy: the graph refers to the file; or else in float16."""
        if self.bits == 8:
            weight = self.weights[name]
            scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float16)
            rounded = np.round(weight / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
            stored = ops.multiply(ops.convert(ops.constant(rounded), "f16"), ops.constant(scale))
            return ops.convert(stored, "f32")
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


def integers(*values: int) -> Node:
    return ops.constant(np.array(values, np.int64))


def integer(value: int) -> Node:
    return ops.constant(np.int64(value))
