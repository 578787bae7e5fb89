"""`small_twin`: a model of the same class and configuration as another, of a few layers and thousands of weights.

Which tokens a layer attends to, where positions go, what a cache keeps: all of this is code of a model's class,
selected by its configuration, and does not depend on the weights. So a twin with random weights shows whether a model
is decoded correctly, in milliseconds and before the model's own weights are loaded. Its windows are small, too: a few
dozen tokens exceed them.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from types import NoneType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

WINDOW = 16  # tokens, where a configuration has a window or chunks of any size
CONTEXT = 128  # tokens that the twin can read; where rotary embeddings are stretched, half of them without that
HEADS, HEAD = 4, 16  # heads of queries, and numbers in each
LAYERS = 8  # the most, if fewer do not have a layer of each kind among them
BUILDING = threading.RLock()  # A twin needs the process's own generator, and one thread of torch's.
WEIGHTS = 1 << 26  # the most; more mean that some sizes were not recognised

# Names of sizes in configurations, and the twin's values; below, the most that it has. The first match counts.
EXACT = {
    r".*vocab(_size.*)?": 96,
    r"original_max_position_embeddings": CONTEXT // 2,
    r".*(max_position|positions|n_ctx|max_seq|max_length|seq_length|context_length).*": CONTEXT,
    r".*qk_head_dim": 2 * HEAD,
    r".*(head_dim|head_size|kv_channels|dim_head|d_head)": HEAD,
    r".*heads?|heads_per_layer": HEADS,
    r"hidden_size|d_model|n_embd|dim|.*embedding_size|word_embed_proj_dim|embed_dim": HEADS * HEAD,
}
SIZES = {
    r"first_k_dense_replace": 1,
    r"rotary_dim|laurel_rank": 8,
    r".*(rank|per_layer_input).*|query_pre_attn_scalar": HEAD,
    r".*(layer|pattern|interval|period|every|kernel|stride|type|cycles).*|seed": 1 << 62,  # no sizes
    r"block_size": 2,  # BigBird attends to later tokens too, in texts of 11 blocks and more
    r".*(window|chunk|local_attention).*|index_topk|floor_scale": WINDOW,
    r".*group.*": 1,
    r".*(experts_per_tok|top_?k|moe_k).*": 2,
    r".*(experts?|expert_num)": 4,
    r".*(intermediate|ffn|dff|dim_ff|d_ff|inner|feed_forward|mlp|emb|hidden|width).*": HEADS * HEAD,
}
COUNTS_LAYERS = r"(num_hidden|n|num|decoder|num_decoder|encoder|num_encoder)_layers?"


def small_twin(config: PretrainedConfig, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """The twin of a model of class `kind`, float32 on the CPU. Raises whatever transformers raises if the class does
    not support these sizes, and ValueError if the twin is not small."""
    small = copy.deepcopy(config if isinstance(config, kind.config_class) else config.get_text_config(decoder=True))
    shrink(small)
    small._attn_implementation = None  # That of the class, whatever the model was given.
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind._from_config(copy.deepcopy(small)).parameters())
    if count > WEIGHTS:
        raise ValueError(f"its twin has {count} weights")
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed the generators of GPUs, too.
        model = kind._from_config(small, dtype=torch.float32).eval()
        for weight in model.parameters():  # So large that a token which is read by mistake changes the logits.
            noise = torch.randn_like(weight)
            weight.copy_(noise / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else weight + noise / 4)
    return model


def shrink(config: PretrainedConfig) -> None:
    """Make the sizes of a configuration and of those inside it small, in place, and keep its first layers, some of each
    kind."""
    values = {name: value for name, value in vars(config).items() if not isinstance(value, (NoneType, bool))}
    for name in [name for name, value in values.items() if isinstance(value, PretrainedConfig)]:
        shrink(values.pop(name))
    depth = max((value for name, value in values.items() if re.fullmatch(COUNTS_LAYERS, name)), default=0)
    per_layer = {name for name, value in values.items() if isinstance(value, list) and len(value) == depth > 0}
    kinds = list(zip(*(values[name] for name in per_layer if len(set(map(str, values[name]))) <= 4)))
    last_new = max((i for i, kind in enumerate(kinds) if kind not in kinds[:i]), default=0)
    layers = min(depth, max(2, last_new + 1), LAYERS)
    if shared := values.pop("num_kv_shared_layers", 0):  # This number of last layers read the keys of earlier ones.
        layers = min(2 * layers, depth)
        config.num_kv_shared_layers = min(shared, layers // 2)
    new = [i for i, kind in enumerate(kinds) if i >= layers and kind not in kinds[:i]]
    later = [] if shared else new[: layers // 2]
    kept = [*range(layers - len(later)), *later]  # The last ones are of the kinds that come later.
    heads = next((values[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in values), 0)
    width = values.get("head_dim") or values.get("hidden_size", 0) // (heads or 1) or HEAD
    for name, value in values.items():
        small: Any
        if name in per_layer:
            small = [size_of(name, value[i], heads) for i in kept]
        elif re.fullmatch(COUNTS_LAYERS, name):
            small = min(value, layers)
        elif name.endswith("_token_id"):
            small = value % 3 if isinstance(value, int) and value > 2 else value
        else:
            small = small_rope(value, width) if name == "rope_parameters" else size_of(name, value, heads)
        if small != value:
            setattr(config, name, small)
    if spec := values.get("_heterogeneity_spec"):  # what some layers have otherwise
        spec.per_layer_overrides = {
            layer: {name: size_of(name, value, heads) for name, value in other.items()}
            for layer, other in spec.per_layer_overrides.items()
            if layer < layers
        }


def size_of(name: str, value: Any, heads: int) -> Any:
    """The small value of the field `name`. heads: query heads. There are between 1 and `heads` key heads."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(entry, int) for entry in value):
        return type(value)(size_of(name, entry, heads) for entry in value)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if re.fullmatch(r".*(key_value|kv|query)_(heads|groups)", name):
        return HEADS if value == heads else 1 if value == 1 else HEADS // 2
    for pattern, exact in EXACT.items():
        if re.fullmatch(pattern, name) and value > 0:
            return exact
    return min(value, next((most for pattern, most in SIZES.items() if re.fullmatch(pattern, name)), value))


def small_rope(rope: dict[str, Any], width: int) -> dict[str, Any]:
    """Parameters of rotary embeddings for small heads, and for a context of a few dozen tokens. width: numbers in a
    head as it was."""
    small: dict[str, Any] = {
        name: small_rope(value, width) if isinstance(value, dict) else value for name, value in rope.items()
    }
    for name in {"short_factor", "long_factor"} & small.keys():  # one for each pair of numbers that are rotated
        pairs = max(1, len(rope[name]) * HEAD // width)
        small |= {name: (rope[name] * HEAD)[:pairs], "partial_rotary_factor": 2 * pairs / HEAD}
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = CONTEXT // 2
    if "mrope_section" in small:
        small["mrope_section"] = [2, 3, 3]
    return small
