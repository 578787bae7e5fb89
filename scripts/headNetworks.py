"""The networks that `scripts.trainHead` trains: a head, and Medusa's heads. Both guess GAMMA tokens in a row.

`chain(batch, steps)` gives their last hidden states, from which the output layer guesses, in each step of a chain:
`[steps, B, n, d]`. In step j, that at position t is for the j-th guess after the true features of the tokens up to
t - j. What is guessed is the token t + 1; the tokens guessed before it are those of the text. So the first j - 1
positions of a text have no step j (`chain_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from engine.cachedModel import CachedModel
from engine.head import HeadNetwork, embedding_of
from scripts.training import GAMMA, Recipe
from utils import UserError

LAYERS = {"last": (1.0,), "three": (1 / 6, 1 / 2, 1.0)}  # where in the target a feature comes from
MLP = 4  # width of the MLP, as a multiple of the head's, where it is not that of the target's last layer
LIKE_TARGET = (  # what a head's config has from its target's, if it begins as the target's last layer
    "intermediate_size", "rms_norm_eps", "rope_parameters", "head_dim", "hidden_act", "attention_bias", "mlp_bias",
)  # fmt: skip
RIDGE = 1e-3  # of the mean square of what is read, added in the fit of a head's beginning


class TextBatch(NamedTuple):
    """Windows of the texts. tokens: int64 `[B, n]`. text: which text each is of, `[B, n]`. drawn: `[B, n]`, whether
    each was drawn with SAMPLING. before: the hidden states of the token before each, `[B, n, layers * d]`, 0 at the
    beginning of a text. last: the last hidden states of each `[B, n, d]`. sums: `[B, n, 3]`, see `losses.sums_of`."""

    tokens: Tensor
    text: Tensor
    drawn: Tensor
    before: Tensor
    last: Tensor
    sums: Tensor


def batch_of(windows: Sequence[tuple[dict[str, Tensor], int, int]], output: Tensor) -> TextBatch:
    """The windows (part, first token, length) of the texts, on the device of the output layer's weight `[V, d]`."""
    d = output.shape[1]
    rows = []
    for part, start, length in windows:
        at = slice(start, start + length)
        text, states = part["text"][at], part["states"][at]
        first = text[:1] if start == 0 else part["text"][start - 1 : start]
        earlier = torch.zeros_like(states[:1]) if start == 0 else part["states"][start - 1 : start]
        begins = text != torch.cat([first, text[:-1]])
        before = torch.cat([earlier, states[:-1]]).masked_fill(begins[:, None], 0.0)
        rows.append((part["tokens"][at].long(), text, part["drawn"][at], before, states[:, -d:], part["sums"][at]))
    return TextBatch(*(torch.stack(parts).to(output.device) for parts in zip(*rows)))


def chain_weights(text: Tensor, steps: int) -> Tensor:
    """1.0 where a chain of j steps ends in a text at the j-th of them, else 0.0, `[steps, B, n]`: not where it began
    before the text, or before the window."""
    earlier = [F.pad(text, (j, 0), value=-1)[:, : text.shape[1]] for j in range(steps)]
    return torch.stack([(there == text).float() for there in earlier])


def shifted(x: Tensor, by: int) -> Tensor:
    """`x[..., n, d]` with row t - by at place t, and zeros before: `shifted(x, 1)` is what stood one token before."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


class TrainedHead(HeadNetwork):
    """`HeadNetwork` with the training-time test of EAGLE-3: a chain whose first step reads true features. Step j reads
    at position t the hidden state that step j - 1 gave at t - 1."""

    def chain(self, batch: TextBatch, steps: int) -> Tensor:
        layer = self.model.layers[0]
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        features = self.features_before(batch)
        angles = self.model.rotary_emb(features, positions)
        cache: list[tuple[Tensor, Tensor]] = []
        hidden = []
        for _ in range(steps):
            x = self.inputs(batch.tokens, features)
            x = x + chain_attention(layer.self_attn, layer.input_layernorm(x), angles, batch.text, cache)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden.append(self.model.norm(x))
            features = shifted(hidden[-1], 1)
        return torch.stack(hidden)

    def features_before(self, batch: TextBatch) -> Tensor:
        """The true feature before each token, `[B, n, d]`."""
        return self.fuse(batch.before[..., -self.fuse.in_features :].float())


def chain_attention(
    layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], text: Tensor, cache: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """The attention of one step j over `x[B, n, d]`. cache: keys and values of the steps before, each `[B, heads, n,
    width]`; its own are added. text: int32 `[B, n]`; a token sees its own text alone.

    What the query at position t sees is what is in the KV cache in decoding, at the j-th guess:
    - the keys of step 1 up to position t - j + 1, the last token before whose place the true feature is known,
    - the key of step i at position t - j + i, for i = 2 ... j: one of each earlier guess, and its own.
    """
    n, heads = x.shape[1], (*x.shape[:2], -1, layer.head_dim)
    q, k, v = (project(x).view(heads).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *angles)
    groups = q.shape[1] // k.shape[1]
    cache.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    j, (first_keys, first_values) = len(cache), cache[0]
    visible = (text[:, :, None] == text[:, None]) & torch.ones(n, n, dtype=torch.bool, device=x.device).tril(1 - j)
    scores = [(q @ first_keys.mT).masked_fill(~visible[:, None], -math.inf)]  # [B, heads, n, n]
    later = [
        [shifted(y, j - i) for y in cache[i - 1]] for i in range(2, j + 1)
    ]  # of each later step [B, heads, n, width]
    scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in later]  # [B, heads, n, 1]
    weights = (torch.cat(scores, -1).float() * layer.scaling).softmax(-1).to(v.dtype)
    seen = weights[..., :n] @ first_values
    for i, (_, values) in enumerate(later):
        seen = seen + weights[..., n + i, None] * values
    return layer.o_proj(seen.transpose(1, 2).flatten(2))


class MedusaHeads(nn.Module):
    """Medusa's heads (Cai et al., arXiv 2401.10774): each guesses the token at its own distance from the target's last
    hidden state alone, with a residual block before the target's output layer. In step j, that of the token t - j is
    read at position t."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(GAMMA))
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # Each head begins as the target's own guess of the next token.
            nn.init.zeros_(block.bias)

    def chain(self, batch: TextBatch, steps: int) -> Tensor:
        before = batch.before[..., -self.blocks[0].in_features :].float()
        seen = [shifted(before, by) for by in range(steps)]
        return torch.stack([x + F.silu(block(x)) for block, x in zip(self.blocks, seen)])


def tapped(config: Any, layers: str) -> list[int]:
    """The layers of the target whose hidden states make a feature, as transformers counts `hidden_states`."""
    return [round(share * config.num_hidden_layers) for share in LAYERS[layers]]


def new_network(recipe: Recipe, target: CachedModel, tokens: Tensor | None) -> TrainedHead | MedusaHeads:
    """An untrained network. tokens: those that the output layer is cut to, or None."""
    of_target = target.model.config.get_text_config()
    d, heads = of_target.hidden_size, of_target.num_attention_heads
    if recipe.kind == "medusa":
        return MedusaHeads(d)
    if embedding_of(target).shape[1] != d:
        raise UserError(f"{target.name} has embeddings whose width differs from its layers'; heads are not supported")
    config = LlamaConfig(
        vocab_size=len(embedding_of(target)),
        hidden_size=d,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(of_target, "num_key_value_heads", None) or heads,
        max_position_embeddings=target.context,
        tie_word_embeddings=False,
        head={"layers": tapped(of_target, recipe.layers)},
        **(
            {name: getattr(of_target, name) for name in LIKE_TARGET}
            if llama_layers(target)
            else {"intermediate_size": MLP * d}
        ),
    )
    return TrainedHead.of(config, target, tokens)


def llama_layers(target: CachedModel) -> list[nn.Module]:
    """The target's layers, if they are of the kind that a head has, else none."""
    return [module for module in target.model.modules() if isinstance(module, LlamaDecoderLayer)]


@torch.no_grad()
def begin_near_target(network: TrainedHead, target: CachedModel, texts: Sequence[TextBatch]) -> None:
    """Let a head begin as a copy of the target's last layer, which reads the best linear guess of what it reads there.

    The feature is the target's last hidden state, and `join` is fitted by least squares. The norm after the layer is
    the target's too. If the target's layers are of another kind than the head's, the head's layer begins as one that
    changes nothing, and `join` is fitted to what the last norm reads.

    texts: batches of one text each, from its beginning. A token counts by the inverse size of what is fitted, because
    some, such as the first one of a text, have huge hidden states.
    """
    d, layer, norm = network.config.hidden_size, network.model.layers[0], network.model.norm
    network.fuse.weight.zero_()[:, -d:].fill_diagonal_(1.0)
    copied = llama_layers(target)
    if copied:
        layer.load_state_dict(copied[-1].state_dict())
        norm.load_state_dict(target.model.base_model.norm.state_dict())
    else:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        norm.weight.copy_(torch.cat([text.last[0].float() for text in texts]).square().mean(0).sqrt())
    products = torch.zeros(3 * d, 3 * d, dtype=torch.float64, device=norm.weight.device)
    for text in texts:
        read = network.joined(text.tokens, network.features_before(text))
        if copied:
            states = target.model.base_model(text.tokens, use_cache=False, output_hidden_states=True).hidden_states
        wanted = states[-2].float() if copied else text.last.float() / norm.weight
        pairs = torch.cat([read, wanted], -1) / wanted.square().mean(-1, keepdim=True).sqrt()
        products += pairs[0].double().mT @ pairs[0].double()
    squares, cross = products[: 2 * d, : 2 * d], products[: 2 * d, 2 * d :]
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    network.join.weight.copy_(torch.linalg.solve(squares, cross).mT)
