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
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.cachedModel import Tap, context_of, logits_of
from engine.gate import TOLERANCE, comparable, is_altered
from engine.head import HeadNetwork
from engine.kernels.packedLinear import SIDE, packed, packed_codes
from engine.quantised import QuantisedLinear, tolerance_of
from engine.sharedWeights import RestrictedHead
from engine.smallTwin import CONTEXT, small_twin
from utils import UserError

ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "gelu_fast": 1, "gelu_pytorch_tanh": 1, "relu": 2, "silu": 3, "swish": 3}
WIDEST = 256  # numbers in a head (attention.h)
OF_TWIN = 1e-4  # relative error of a twin's logits: rounding gives a tenth, another kind of GELU twice as much


@dataclass(frozen=True)
class Names:
    """Names of an architecture's parts. Those of a layer's parts are relative to the layer."""

    base: str
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None
    last: str = "norm"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of what attention adds, as `after_mlp` of what the MLP adds
    before_mlp: str = "post_attention_layernorm"  # If a layer has none, its MLP reads what attention reads.
    after_mlp: str | None = None
    qkv: Sequence[str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    up: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj")  # With a gate, it comes first, or in the same matrix.
    down: str = "mlp.down_proj"
    query: str = "self_attn.q_norm"  # of each head's queries, or of all together; many layers have none
    key: str = "self_attn.k_norm"
    offset: int = 0  # of the first position's embedding
    by_head: bool = False  # Whether the rows of `qkv` are sorted by head first.
    parallel: bool = False  # Whether attention and the MLP are added together, if the configuration does not say so.
    gain: int = 0  # What norms add to their weights.


LLAMA = Names("model")
GEMMA3 = Names(
    "model", after_attention="post_attention_layernorm", before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm", gain=1,
)  # fmt: skip
NAMES = {  # by the name of the class in transformers: models of other types may be Llamas too
    **dict.fromkeys(
        ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM",
         "GraniteForCausalLM", "StableLmForCausalLM"), LLAMA,
    ),
    "GemmaForCausalLM": Names("model", gain=1),
    "Gemma2ForCausalLM": GEMMA3,
    "Gemma3ForCausalLM": GEMMA3,
    "Olmo2ForCausalLM": Names(
        "model", before_attention=None, after_attention="post_attention_layernorm", before_mlp="",
        after_mlp="post_feedforward_layernorm",
    ),
    "Phi3ForCausalLM": Names("model", qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    "PhiForCausalLM": Names(
        "model", last="final_layernorm", out="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2",
        query="self_attn.q_layernorm", key="self_attn.k_layernorm", parallel=True,
    ),
    "Starcoder2ForCausalLM": Names("model", up=("mlp.c_fc",), down="mlp.c_proj"),
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


# {configuration: the parts around the layers of its small twin and in each of them, which the kernels compute}
_AGREE: dict[str, list[dict[str, type]]] = {}


class PackedLayer(nn.Module):
    """A decoder layer whose weights are packed: the buffers are the parts that `Layer` of decoder.h has."""

    def __init__(self, parts: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in parts.items():
            self.register_buffer(name.replace(".", "_"), tensor)
        self.parts = parts

    def forward(self, *args: object, **kwargs: object) -> None:
        raise UserError("this model is compiled: make other models of its layers before that")


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
        activations = ("hidden_activation", "hidden_act", "activation_function")
        self.activation: str = next(filter(None, (getattr(config, name, None) for name in activations)))
        self.gated = "gate" in self.names.up[0]
        # Of each layer, where classes know kinds of them; where they do not, all layers have the window.
        self.kinds: list[str] | None = config.layer_types if hasattr(type(config), "layer_types") else None
        self.window: int = (hasattr(type(config), "sliding_window") and config.sliding_window) or 0
        # Kinds that have rotary embeddings of their own:
        self.tables: list[str] = getattr(getattr(self.base, "rotary_emb", None), "layer_types", [])
        for what, has_kernels in {
            f"{model.dtype}": model.dtype in TOLERANCE,
            f"the activation {self.activation}": self.activation in ACTIVATIONS,
            f"heads of {self.width} numbers": self.width <= WIDEST and self.width % 2 == 0,
        }.items():
            if not has_kernels:
                raise RuntimeError(f"there are no kernels for {what}")

    def angles(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embeddings, float32 `[tables, capacity, r]`; r is 0 if there are none. Slots
        beyond the context are those of a tree's nodes, whose positions are smaller."""
        if not hasattr(self.base, "rotary_emb"):
            return torch.zeros(1, capacity, 0, dtype=torch.float32), torch.zeros(1, capacity, 0, dtype=torch.float32)
        positions = torch.arange(capacity).clamp_(max=context_of(self.config) - 1)
        kinds: list[tuple[str, ...]] = [(kind,) for kind in self.tables] or [()]
        both = zip(
            *(self.base.rotary_emb(torch.zeros(0, dtype=torch.float32), positions[None], *kind) for kind in kinds)
        )
        cos, sin = (torch.cat(x)[..., : x[0].shape[-1] // 2].contiguous() for x in both)
        return cos, sin

    def parts(self, layer: nn.Module) -> dict[str, Tensor]:
        """The packed weights of a layer."""
        weights: dict[str, Tensor] = {}
        for name in "before_attention", "after_attention", "before_mlp", "after_mlp", "query", "key":
            if module := self.norm_of(layer, name):
                weights |= norm(name, module, self.names.gain)
        for name in "qkv", "out", "up", "down":
            where = getattr(self.names, name)
            linears = [layer.get_submodule(each) for each in ([where] if isinstance(where, str) else where)]
            weights[name] = in_blocks(linears, partial(self.arranged, name))
            if linears[0].bias is not None:
                weights[f"{name}.bias"] = self.arranged(name, [linear.bias.detach() for linear in linears])
        return weights

    def norm_of(self, layer: nn.Module, name: str) -> nn.Module | None:
        """A norm of a layer, which may have none there."""
        module: nn.Module | None = layer if (where := getattr(self.names, name)) else None
        for part in (where or "").split("."):
            module = getattr(module, part, None)
        return self.norm_of(layer, "before_attention") if module is None and name == "before_mlp" else module

    def arranged(self, name: str, rows: Sequence[Tensor]) -> Tensor:
        """Rows `[out, ...]` of the linear layers that make one matrix, in the order that the kernels want."""
        if name == "qkv" and self.names.by_head:  # [heads * (q, k, v) * d, ...]: all queries, all keys, all values
            return rows[0].unflatten(0, (self.heads, 3, self.width)).transpose(0, 1).flatten(0, 2)
        if name == "up" and self.gated:  # Blocks of SIDE rows alternate; the last ones are filled with zeros.
            rows = rows[0].chunk(2) if len(rows) == 1 else rows
            missing = -len(rows[0]) % SIDE
            blocks = [pad(x, (0,) * (2 * x.dim() - 1) + (missing,)).unflatten(0, (-1, SIDE)) for x in rows]
            return torch.stack(blocks, 1).flatten(0, 2)
        joined = rows[0] if len(rows) == 1 else torch.cat(list(rows))
        if name == "qkv" and len(joined) != (self.heads + 2 * self.groups) * self.width:
            raise RuntimeError("its heads are not those of its configuration")
        return joined

    def around(self) -> nn.ModuleDict:
        """The parts before and after the layers. Of a `RestrictedHead` it has the layer inside."""
        names, head = self.names, self.model.get_output_embeddings()
        parts = {"embedding": names.embedding, "positions": names.positions, "last": names.last}
        around = {part: self.base.get_submodule(name) for part, name in parts.items() if name}
        return nn.ModuleDict(around | {"head": head.inner if isinstance(head, RestrictedHead) else head})

    def decoder(self, layers: Sequence[dict[str, Tensor]], tap: Tap | None = None, places: Sequence[int] = ()) -> Any:
        """The `Decoder` of these layers, with a tap. places: the numbers of the layers in the model, if not all."""
        config, names, around = self.config, self.names, self.around()
        embedding, last, head = around["embedding"], around["last"], around["head"]
        ends = {"embedding": embedding.weight.detach(), **norm("last", last, names.gain)}
        places = places or range(len(layers))
        kinds = [self.kinds[i] if self.kinds else "sliding_attention" for i in places]
        rotated = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
        tables = [self.tables.index(kind) if self.tables else 0 for kind in kinds]
        ends["tables"] = torch.tensor([table if rotated[i] else -1 for i, table in zip(places, tables)])
        ends["windowed"] = torch.tensor([int(self.window > 0 and kind == "sliding_attention") for kind in kinds])
        if names.positions:
            ends["positions"] = around["positions"].weight.detach()
        if isinstance(whole := self.model.get_output_embeddings(), RestrictedHead):
            ends["kept"] = whole.tokens
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
        inner = up.shape[0] * SIDE // (1 + self.gated) if quantised else down.shape[1] * down.shape[3]
        sizes = {
            "hidden": config.hidden_size, "heads": self.heads, "groups": self.groups, "width": self.width,
            "rotary": 2 * self.angles(1)[0].shape[-1], "inner": inner, "vocabulary": self.vocabulary,
            "offset": names.offset, "activation": ACTIVATIONS[self.activation], "gated": int(self.gated),
            "parallel": int(getattr(config, "use_parallel_residual", names.parallel)), "window": self.window,
            "rms": int(not isinstance(last, nn.LayerNorm)),
        }  # fmt: skip
        set_to = partial(getattr, config)
        numbers = {
            "eps": last.eps if hasattr(last, "eps") else last.variance_epsilon,
            "scale": set_to("attention_multiplier", set_to("query_pre_attn_scalar", self.width) ** -0.5),
            "cap": set_to("attn_logit_softcapping", None) or 0,
            "embedding_scale": set_to("embedding_multiplier", 1),
            "residual_scale": set_to("residual_multiplier", 1),
            "logit_scale": 1 / set_to("logits_scaling", 1),
            "logit_cap": set_to("final_logit_softcapping", None) or 0,
        }
        if hasattr(embedding, "embed_scale"):  # It is rounded as the embeddings are.
            numbers["embedding_scale"] = embedding.embed_scale.to(embedding.weight.dtype)
        decoder = torch.classes.native.Decoder
        return decoder(list(layers), ends, sizes, {name: float(number) for name, number in numbers.items()})

    def check(self, layers: nn.ModuleList) -> None:
        """Raise RuntimeError if the kernels do not compute what the model computes: first a small twin in float32, from
        the first position to the last, where every difference but rounding is seen; then the model itself with three
        of its layers, and with each whose numbers no earlier one has. (Some models scale each layer by its number.)
        All its parts are of the classes of the twin's: an adapter in a part's place may change so little that 16 bits
        hide it, or be in other layers."""
        key = f"{type(self.model)} {self.config.to_json_string(use_diff=False)}"
        is_head = isinstance(self.model, HeadNetwork)
        if key not in _AGREE and not is_head:
            try:
                small = small_twin(self.config, type(self.model))
            except Exception as error:  # A class that cannot be instantiated at this size can raise nearly anything.
                raise RuntimeError(f"no small twin can be created to check the kernels ({error})") from error
            twin = Description(small, 96)
            twin.check_layers(range(twin.config.num_hidden_layers), CONTEXT, OF_TWIN)
            _AGREE[key] = [parts_in(part) for part in [twin.around(), *getattr(twin.base, twin.names.layers)]]
        if any(shapes_in(layer) != shapes_in(layers[0]) for layer in layers):
            raise RuntimeError("its layers have several sizes")
        for part in [] if is_head else [self.around(), *layers]:
            if not any(parts_in(part).items() <= right.items() for right in _AGREE[key]):
                raise RuntimeError("parts of it are not those of its class")
        numbers, last = [numbers_in(layer) for layer in layers], numbers_in(self.around()["last"])
        if len({value for of in [*numbers, last] for _, name, value in of if name.endswith(("eps", "epsilon"))}) > 1:
            raise RuntimeError("its norms have several eps")
        others = {place for place, each in enumerate(numbers) if each not in numbers[:place]}
        self.check_layers(sorted({len(layers) // 2, len(layers) - 1} | others), 64)

    @torch.inference_mode()
    def check_layers(self, places: Sequence[int], count: int, tolerance: float | None = None) -> None:
        """Raise RuntimeError if the kernels do not compute what the model computes with the layers of these numbers
        alone, when it reads `count` tokens: logits and features. tolerance: relative; None: that of the dtype."""
        layers = getattr(self.base, self.names.layers)
        chosen, kinds, count = [layers[i] for i in places], self.kinds, min(count, context_of(self.config))
        tokens, positions = torch.arange(count)[None] % self.vocabulary, torch.arange(count)[None]
        tap = None
        if self.tap is not None:
            tapped = (min(layer, 1) if layer < len(layers) else len(chosen) for layer in self.tap.layers)
            tap = Tap(tuple(tapped), self.tap.fuse)
        decoder = self.decoder([self.parts(layer) for layer in chosen], tap, places)
        shape, dtype = (1, self.groups, count, self.width), self.model.dtype
        states = [[torch.zeros(shape, dtype=dtype) for _ in chosen] for _ in range(2)]
        features = torch.rand(
            1, count + 1, self.config.hidden_size, dtype=torch.float32, generator=torch.Generator().manual_seed(0)
        )
        before = {"features": features[:, :count].to(dtype)} if isinstance(self.model, HeadNetwork) else {}
        decoder.bind(*states, *self.angles(count), features)
        logits = decoder.forward(tokens, positions, *[None] * 5, 0)
        if tap is not None:  # transformers marks what it records hidden states of at the first time, and for good.
            self.model(input_ids=tokens[:, :1], use_cache=False, output_hidden_states=True)
        setattr(self.base, self.names.layers, nn.ModuleList(chosen))
        try:
            if kinds:
                self.config.layer_types = [kinds[i] for i in places]
            with torch.autocast("cpu", enabled=False):  # The kernels do not round as it would.
                shown = bool(tap or before)
                outputs = self.model(input_ids=tokens, **before, use_cache=False, output_hidden_states=shown)
        finally:
            setattr(self.base, self.names.layers, layers)
            if kinds:
                self.config.layer_types = kinds
        wanted = logits_of(self.model, outputs, self.vocabulary)
        results = [comparable(logits, wanted)]
        if tap is not None:
            results.append((features[:, 1:], tap(outputs.hidden_states)))
        if before:
            results.append((features[:, count], outputs.hidden_states[-1][:, count - 1]))
        tolerance = tolerance or tolerance_of(layers, dtype)
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


def parts_in(module: nn.Module) -> dict[str, type]:
    """{name: class} of the parts of a module but those that a copy in few bits has instead."""
    return {name: type(part) for name, part in module.named_modules() if not isinstance(part, QuantisedLinear)}


def numbers_in(layer: nn.Module) -> list[tuple[str, str, float]]:
    """(module, name, value) of the numbers that the modules of a layer keep, such as scales; not the layer's own."""
    modules = [(part, name, value) for part, module in layer.named_modules() for name, value in vars(module).items()]
    return [entry for entry in modules if isinstance(entry[2], (int, float)) and entry[1] != "layer_idx"]


def shapes_in(layer: nn.Module) -> dict[str, torch.Size]:
    """{name: shape} of the weights of a layer."""
    return {name: x.shape for name, x in (*layer.named_parameters(), *layer.named_buffers())}


def norm(name: str, module: nn.Module, gain: int = 0) -> dict[str, Tensor]:
    """The weights of a norm. gain: what it adds to them, in float32."""
    weight, bias = module.weight, getattr(module, "bias", None)
    weight = torch.ones(module.normalized_shape, dtype=torch.float32) if weight is None else weight.detach()
    weights = {name: weight.float() + gain if gain else weight}
    return weights if bias is None else weights | {f"{name}.bias": bias.detach()}


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
