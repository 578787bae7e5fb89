"""`Description`: a Hugging Face causal language model as the kernels know it (kernels/decoder.h).

Common architectures consist of the same parts: two norms, one matrix for queries, keys and values,
attention, and an MLP with or without a gate. They differ in names, in the order of some rows, and in a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.cachedModel import Tap, context_of
from engine.gate import TOLERANCE, is_altered
from engine.head import HeadNetwork
from engine.kernels.packedLinear import SIDE, packed, packed_codes
from engine.quantised import QuantisedLinear
from engine.smallTwin import CONTEXT, small_twin

ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "gelu_fast": 1, "gelu_pytorch_tanh": 1, "relu": 2, "silu": 3, "swish": 3}
WIDEST = 256  # numbers in a head (attention.h)


@dataclass(frozen=True)
class Names:
    """Names of an architecture's parts. Those of a layer's parts are relative to the layer."""

    base: str
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    last: str = "norm"
    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    qkv: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    up: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")  # With a gate, two.
    down: str = "mlp.down_proj"
    query: str | None = None  # a norm of each head's queries
    key: str | None = None
    offset: int = 0  # of the first position's embedding
    by_head: bool = False  # Whether the rows of `qkv` are sorted by head first.


LLAMA = Names("model")
NAMES = {  # by the name of the class in transformers: models of other types may be Llamas too
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": Names("model", query="self_attn.q_norm", key="self_attn.k_norm"),
    "GPTNeoXForCausalLM": Names(
        "gpt_neox", embedding="embed_in", last="final_layer_norm", qkv=("attention.query_key_value",),
        out="attention.dense", up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h", by_head=True,
    ),
    "GPT2LMHeadModel": Names(
        "transformer", layers="h", embedding="wte", positions="wpe", last="ln_f", before_attention="ln_1",
        before_mlp="ln_2", qkv=("attn.c_attn",), out="attn.c_proj", up=("mlp.c_fc",), down="mlp.c_proj",
    ),
    "OPTForCausalLM": Names(
        "model.decoder", positions="embed_positions", offset=2, last="final_layer_norm",
        before_attention="self_attn_layer_norm", before_mlp="final_layer_norm", out="self_attn.out_proj", up=("fc1",),
        down="fc2",
    ),
}  # fmt: skip


_AGREE: set[str] = set()  # configurations whose small twins the kernels compute


class PackedLayer(nn.Module):
    """A decoder layer whose weights are packed: the buffers are the parts that `Layer` of decoder.h has."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in parts.items():
            self.register_buffer(name.replace(".", "_"), tensor)
        self.parts = parts

    def forward(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("this model is packed for the kernels; its layers cannot be called one by one")


def names_of(model: PreTrainedModel) -> Names:
    """The names of a model's parts. Raises RuntimeError, with the reason, if they are not known."""
    config = model.config
    names = next((NAMES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in NAMES), None)
    if names is None:
        raise RuntimeError(f"nothing is known of the layers of {config.model_type}, only of {', '.join(NAMES)}")
    if not getattr(config, "do_layer_norm_before", True) or getattr(config, "_remove_final_layer_norm", False):
        raise RuntimeError("its norms come after its layers")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise RuntimeError("its embeddings are narrower than its layers")
    return names


def window_of(config: PretrainedConfig) -> int | None:
    """The shortest window of a model's layers, in tokens; None if all attend to the whole text."""
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return getattr(config, "sliding_window", None) if windowed else None


class Description:
    """The parts of a model, and its sizes. `pack` builds the `Decoder` and replaces the layers by packed ones.

    tap: the `Tap` of its hidden states, or None. Raises RuntimeError, with the reason, if there are no kernels for it.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int, tap: Tap | None = None) -> None:
        self.tap, self.model, self.names, self.vocabulary = tap, model, names_of(model), vocabulary
        config = self.config = model.config
        if is_altered(model):
            raise RuntimeError("hooks or replaced forwards change what it computes")
        self.base = model.get_submodule(self.names.base)
        self.heads: int = config.num_attention_heads
        self.groups: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        activations = ("hidden_act", "activation_function")
        self.activation: str = next(getattr(config, name) for name in activations if hasattr(config, name))
        for what, has_kernels in {
            f"{model.dtype}": model.dtype in TOLERANCE,
            f"the activation {self.activation}": self.activation in ACTIVATIONS,
            f"heads of {self.width} numbers": self.width <= WIDEST and self.width % 2 == 0,
        }.items():
            if not has_kernels:
                raise RuntimeError(f"there are no kernels for {what}")

    def angles(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embeddings, float32 `[capacity, r]`; r is 0 if there are none. Slots beyond
        the context are those of a tree's nodes, whose positions are smaller."""
        if not hasattr(self.base, "rotary_emb"):
            return torch.zeros(capacity, 0), torch.zeros(capacity, 0)
        positions = torch.arange(capacity).clamp_(max=context_of(self.config) - 1)
        both = self.base.rotary_emb(torch.zeros(0), positions[None])
        cos, sin = (x[0, :, : x.shape[-1] // 2].contiguous() for x in both)
        return cos, sin

    def parts(self, layer: nn.Module) -> dict[str, Tensor]:
        """The packed weights of a layer."""
        weights: dict[str, Tensor] = {}
        for name in "before_attention", "before_mlp", "query", "key":
            if where := getattr(self.names, name):
                weights |= norm(name, layer.get_submodule(where))
        for name in "qkv", "out", "up", "down":
            where = getattr(self.names, name)
            linears = [layer.get_submodule(each) for each in ([where] if isinstance(where, str) else where)]
            weights[name] = in_blocks(linears, partial(self.arranged, name))
            if linears[0].bias is not None:
                weights[f"{name}.bias"] = self.arranged(name, [linear.bias.detach() for linear in linears])
        return weights

    def arranged(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """Rows `[out, ...]` of the linear layers that make one matrix, in the order that the kernels want."""
        if name == "qkv" and self.names.by_head:  # [heads * (q, k, v) * d, ...]: all queries, all keys, all values
            return rows[0].unflatten(0, (self.heads, 3, self.width)).transpose(0, 1).flatten(0, 2)
        if name == "up" and len(rows) == 2:  # Blocks of SIDE rows alternate; the last ones are filled with zeros.
            missing = -len(rows[0]) % SIDE
            blocks = [pad(x, (0,) * (2 * x.dim() - 1) + (missing,)).unflatten(0, (-1, SIDE)) for x in rows]
            return torch.stack(blocks, 1).flatten(0, 2)
        return rows[0] if len(rows) == 1 else torch.cat(list(rows))

    def decoder(self, layers: Sequence[dict[str, Tensor]], tap: Tap | None = None) -> Any:
        """The `Decoder` of these layers, with a tap."""
        config, names, head = self.config, self.names, self.model.get_output_embeddings()
        ends = {"embedding": self.base.get_submodule(names.embedding).weight.detach()}
        ends |= norm("last", last := self.base.get_submodule(names.last))
        if names.positions:
            ends["positions"] = self.base.get_submodule(names.positions).weight.detach()
        if hasattr(head, "tokens"):  # engine/sharedWeights.py:RestrictedHead
            ends["kept"], head = head.tokens, head.inner
        if not hasattr(head, "packed"):
            head.packed = in_blocks([head])
        ends["head"] = head.packed
        if head.bias is not None:
            ends["head.bias"] = head.bias.detach()
        if tap is not None:
            ends |= {"taps": torch.tensor(tap.layers), "fuse": in_blocks([tap.fuse])}
        if isinstance(self.model, HeadNetwork):
            ends["join"] = in_blocks([self.model.join])
            for name in "token_norm", "feature_norm":
                ends |= norm(name, self.model.get_submodule(name))
        up, down = layers[0]["up"], layers[0]["down"]
        # In few bits, the inputs are a multiple of SIDE, and no row of `up` is padding.
        quantised = down.dtype == torch.uint8
        inner = up.shape[0] * SIDE // len(names.up) if quantised else down.shape[1] * down.shape[3]
        sizes = {
            "hidden": config.hidden_size, "heads": self.heads, "groups": self.groups, "width": self.width,
            "rotary": 2 * self.angles(1)[0].shape[1], "inner": inner, "vocabulary": self.vocabulary,
            "offset": names.offset, "activation": ACTIVATIONS[self.activation], "gated": int(len(names.up) == 2),
            "parallel": int(getattr(config, "use_parallel_residual", False)),
            "rms": int(not isinstance(last, nn.LayerNorm)),
        }  # fmt: skip
        eps = getattr(last, "eps", None) or last.variance_epsilon
        return torch.classes.native.Decoder(list(layers), ends, sizes, {"eps": eps, "scale": self.width**-0.5})

    def check(self, layers: nn.ModuleList) -> None:
        """Raise RuntimeError if the kernels do not compute what the model computes: first a small twin in float32, from
        the first position to the last, where every difference but rounding is seen; then the model itself with three
        of its layers. (Some models scale each layer by its number.)"""
        key = f"{type(self.model)} {self.config.to_json_string(use_diff=False)}"
        if key not in _AGREE and not isinstance(self.model, HeadNetwork):
            twin = Description(small_twin(self.config, type(self.model)), 96)
            twin.check_layers(list(getattr(twin.base, self.names.layers)), CONTEXT)
            _AGREE.add(key)
        self.check_layers(list(dict.fromkeys([layers[0], layers[len(layers) // 2], layers[-1]])), 64)

    @torch.inference_mode()
    def check_layers(self, chosen: list[nn.Module], count: int) -> None:
        """Raise RuntimeError if the kernels do not compute what the model computes with some of its layers alone, when
        it reads `count` tokens: logits and features."""
        layers = getattr(self.base, self.names.layers)
        count = min(count, context_of(self.config), window_of(self.config) or count)
        tokens, positions = torch.arange(count)[None] % self.vocabulary, torch.arange(count)[None]
        tap = None
        if self.tap is not None:
            places = (min(layer, 1) if layer < len(layers) else len(chosen) for layer in self.tap.layers)
            tap = Tap(tuple(places), self.tap.fuse)
        decoder = self.decoder([self.parts(layer) for layer in chosen], tap)
        shape, dtype = (1, self.groups, count, self.width), self.model.dtype
        states = [[torch.zeros(shape, dtype=dtype) for _ in chosen] for _ in range(2)]
        features = torch.rand(1, count + 1, self.config.hidden_size, generator=torch.Generator().manual_seed(0))
        before = {"features": features[:, :count].to(dtype)} if isinstance(self.model, HeadNetwork) else {}
        decoder.bind(*states, *self.angles(count), features)
        logits = decoder.forward(tokens, positions, *[None] * 5, 0)
        setattr(self.base, self.names.layers, nn.ModuleList(chosen))
        try:
            outputs = self.model(input_ids=tokens, **before, use_cache=False, output_hidden_states=bool(tap or before))
        finally:
            setattr(self.base, self.names.layers, layers)
        wanted = outputs.logits[..., : self.vocabulary]
        results = [(logits.nan_to_num(neginf=0), wanted.nan_to_num(neginf=0))]  # A restricted head gives -inf.
        if tap is not None:
            results.append((features[:, 1:], tap(outputs.hidden_states)))
        if before:
            results.append((features[:, count], outputs.hidden_states[-1][:, count - 1]))
        # With few bits, an input that lies between two numbers of int8 may be rounded to either.
        quantised = any(isinstance(part, QuantisedLinear) for part in layers.modules())
        tolerance = TOLERANCE[torch.bfloat16 if quantised else dtype]
        if not all((ours - exact.float()).norm() < tolerance * exact.float().norm() for ours, exact in results):
            raise RuntimeError("its layers compute something that the kernels do not")

    def pack(self) -> Any:
        """The `Decoder` of the whole model. Layers are packed one by one, so memory use stays the same."""
        layers = getattr(self.base, self.names.layers)
        if not isinstance(layers[0], PackedLayer):
            self.check(layers)
        for i, layer in enumerate(layers):
            if not isinstance(layer, PackedLayer):  # A model that shares its layers may have packed them already.
                layers[i] = PackedLayer(self.parts(layer))
        decoder, head = self.decoder([layer.parts for layer in layers], self.tap), self.model.get_output_embeddings()
        if isinstance(head, QuantisedLinear):  # Its codes are not used any more.
            head.codes = head.scales = None
        return decoder


def norm(name: str, module: nn.Module) -> dict[str, Tensor]:
    """The weights of a norm."""
    weights = {name: module.weight, f"{name}.bias": getattr(module, "bias", None)}
    return {key: weight.detach() for key, weight in weights.items() if weight is not None}


def in_blocks(
    linears: Sequence[nn.Module], arranged: Callable[[Sequence[Tensor]], Tensor] = lambda rows: rows[0]
) -> Tensor:
    """The weight of several linear layers as one, packed. arranged: their rows in the right order."""
    first = linears[0]
    if isinstance(first, QuantisedLinear):
        codes, scales = (arranged([getattr(linear, part) for linear in linears]) for part in ("codes", "scales"))
        return packed_codes(codes, scales, first.bits)
    return packed(arranged([weight_of(linear) for linear in linears]))


def weight_of(linear: nn.Module) -> Tensor:
    """A view `[out, in]` of the weight of a linear layer."""
    weight = linear.weight.detach()
    return weight.t() if isinstance(linear, Conv1D) else weight
