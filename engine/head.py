"""`HeadNetwork`: one decoder layer that guesses from the target's own features (EAGLE, Li et al., arXiv 2401.15077;
EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class HeadNetwork(LlamaForCausalLM):
    """A Llama of one layer. What it reads at position t is the token t and the feature before it, at t - 1.

    A feature `[d]` is made by `fuse` from the hidden states of some of the target's layers. Where the target has not
    read a token yet, the network's own last hidden state stands for the feature. The token embedding is the target's,
    and so is the output layer, or those of its rows that `config.head["tokens"]` names: neither is trained.

    config.head: "layers", whose hidden states make a feature, counted as transformers' `hidden_states` (0: embeddings,
        the last one: after the last norm).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = nn.Linear(len(config.head["layers"]) * d, d, bias=False)
        self.join = nn.Linear(2 * d, d, bias=False)
        self.token_norm, self.feature_norm = LlamaRMSNorm(d, eps), LlamaRMSNorm(d, eps)

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """What the layer reads, `[B, n, d]`, of int64 `tokens[B, n]` and the features before them `[B, n, d]`."""
        embedded = self.model.embed_tokens(tokens)
        return self.join(torch.cat([self.token_norm(embedded), self.feature_norm(features)], -1))
