"""`HeadNetwork`: one decoder layer that guesses from the target's own features (EAGLE, Li et al., arXiv 2401.15077;
EAGLE-3, arXiv 2503.01840). `HeadModel`: the draft model of a head and a target."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.cachedModel import CachedModel, Tap
from engine.sharedWeights import RestrictedHead
from utils import UserError

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OF_TARGET = ("model.embed_tokens.", "lm_head.")  # weights that are not trained


class HeadNetwork(LlamaForCausalLM):
    """A Llama of one layer. What it reads at position t is the token t and the feature before it, at t - 1.

    A feature `[d]` is computed by `fuse` from the hidden states of some of the target's layers. Where the target has
    not read a token yet, the network's own last hidden state stands for the feature. The token embedding is the
    target's, and so is the output layer, or some of its rows (`RestrictedHead`): neither is trained.

    config.head: "layers", whose hidden states make a feature, counted as transformers' `hidden_states` (0: embeddings,
        the last one: after the last norm).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = nn.Linear(len(config.head["layers"]) * d, d, bias=False)
        self.join = nn.Linear(2 * d, d, bias=False)
        self.token_norm, self.feature_norm = LlamaRMSNorm(d, eps), LlamaRMSNorm(d, eps)

    def joined(self, tokens: Tensor, features: Tensor) -> Tensor:
        """The input of `join`, `[B, n, 2 * d]`, from int64 `tokens[B, n]` and the features before them `[B, n, d]`."""
        return torch.cat([self.token_norm(self.model.embed_tokens(tokens)), self.feature_norm(features)], -1)

    def forward(
        self, input_ids: Tensor | None = None, features: Tensor | None = None, **options: Any
    ) -> CausalLMOutputWithPast:
        """`LlamaForCausalLM.forward` of tokens and the features before them, or of `inputs_embeds`."""
        if input_ids is not None and features is not None:
            options["inputs_embeds"] = self.join(self.joined(input_ids, features))
        return super().forward(**options)

    @classmethod
    def of(cls, config: LlamaConfig, target: CachedModel, tokens: Tensor | None = None) -> HeadNetwork:
        """A network whose embedding and output layer are the target's. Its other weights are random.

        tokens: int64 `[N]`, those that the output layer is cut to; None: all.
        """
        vocabulary, config.vocab_size = config.vocab_size, 1  # Neither is allocated: they are replaced.
        config.pad_token_id = None
        network, config.vocab_size = cls(config), vocabulary
        network.vocab_size = network.model.vocab_size = vocabulary
        network.set_input_embeddings(target.model.get_input_embeddings())
        whole = target.model.get_output_embeddings()
        network.set_output_embeddings(whole if tokens is None else RestrictedHead(whole, tokens.to(target.device)))
        return network

    def trained(self) -> dict[str, Tensor]:
        """{name: weight} of the trained weights."""
        return {name: x for name, x in self.state_dict().items() if not name.startswith(OF_TARGET)}


class HeadModel(CachedModel):
    """A draft that reads the features of `features_of`, its target, and has a KV cache of one layer.

    Features are addressed by position and overwritten, never rolled back, like keys and values. The target writes the
    features of all tokens that it reads beside its KV cache. The network reads the one before each token, and writes
    its own last hidden state for the last token of a block, or for every node: their features are not known yet. When
    the target scores the guesses, it overwrites them. A wrong feature costs acceptance, and no more: q is what a guess
    was drawn from.

    Creating one sets the target's tap and replaces that of an earlier head. Create it before the target is compiled.
    Raises UserError if the network cannot read this target's features.
    """

    def __init__(self, network: HeadNetwork, target: CachedModel, name: str = "head") -> None:
        layers, depth = network.config.head["layers"], target.model.config.num_hidden_layers
        if not layers or not all(isinstance(layer, int) and 0 <= layer <= depth for layer in layers):
            raise UserError(f"{name} reads the layers {layers}, and {target.name} has 0 to {depth}")
        weight = network.join.weight
        if target.is_spread or (weight.device, weight.dtype) != (target.device, target.dtype):
            raise UserError(f"{name} must have the dtype of {target.name} and be on the same, single device")
        target.keep_features(Tap(tuple(layers), network.fuse))
        super().__init__(network, target.vocabulary, name, features=target)


def save_head(network: HeadNetwork, folder: Path, target: str, record: Mapping[str, Any]) -> None:
    """Write a trained network to a folder, which `load_head` reads: CONFIG and WEIGHTS, in bfloat16.

    target: the version of the target's weights (`inputs.models.model_version`). record: further entries of config.json
    on the training, under "head".
    """
    output = network.get_output_embeddings()
    weights = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in network.trained().items()}
    about = {"target": target, "layers": network.config.head["layers"], "tokens": None}
    if isinstance(output, RestrictedHead):
        weights["tokens"], about["tokens"] = output.tokens.cpu(), len(output.tokens)
    config = network.config.to_dict() | {"vocab_size": network.vocab_size, "head": {**record, **about}}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / f"{WEIGHTS}.new")
    (folder / f"{CONFIG}.new").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in WEIGHTS, CONFIG:  # Renamed when complete.
        os.replace(folder / f"{name}.new", folder / name)


def load_head(folder: Path, target: CachedModel, version: str | None = None) -> HeadModel:
    """The head in a folder that `save_head` wrote, for `target`.

    version: of the target's weights (`inputs.models.model_version`); None: unknown. Raises UserError if the head
    belongs to another target, or if the folder does not contain a complete head.
    """

    try:
        config = LlamaConfig(**json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        trained_for, _, count = (config.head[key] for key in ("target", "layers", "tokens"))
        weights = load_file(folder / WEIGHTS)
        tokens = weights.pop("tokens", None)
        ids = torch.empty(0) if tokens is None else tokens
        sizes, wanted = [config.vocab_size, config.hidden_size], [*target.model.get_input_embeddings().weight.shape]
        if version is not None and trained_for != version:
            raise UserError(f"it was trained for {trained_for}, and the target is {version}")
        if sizes != wanted:
            raise UserError("it has {} tokens and a width of {}, and the target {} and {}".format(*sizes, *wanted))
        if (None if tokens is None else len(tokens)) != count or ((ids < 0) | (ids >= target.vocabulary)).any():
            raise UserError(f"{WEIGHTS} does not have the tokens of {CONFIG}")
        network = HeadNetwork.of(config, target, tokens)
        if wrong := sorted(weights.keys() ^ network.trained().keys()):
            raise UserError(f"{wrong[0]} is missing in {WEIGHTS}, or unexpected")
        network.load_state_dict(weights, strict=False)
    except Exception as error:  # A broken folder can raise nearly anything.
        reason = str(error) if isinstance(error, UserError) else f"it cannot be read ({type(error).__name__}: {error})"
        reason = " ".join(reason.split())[:300]
        raise UserError(
            f"{folder} is not a head for {target.name}: {reason}; train one, or name another folder"
        ) from None
    for name, weight in network.to(target.device).named_parameters():  # The rotary embeddings stay in float32.
        if not name.startswith(OF_TARGET):  # The others are the target's own.
            weight.requires_grad_(False).data = weight.data.to(target.dtype)
    return HeadModel(network, target, folder.name)
