"""Models of Pythia's true shapes with random weights, made in memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from inputs.progress import followed

VOCABULARY = 50304
#                   hidden layers heads
SHAPES = {
    "pythia-70m": (512, 6, 8),
    "pythia-160m": (768, 12, 12),
    "pythia-410m": (1024, 24, 16),
    "pythia-1b": (2048, 16, 8),
    "pythia-1.4b": (2048, 24, 16),
    "pythia-2.8b": (2560, 32, 32),
}


def configuration(name: str, **options: Any) -> GPTNeoXConfig:
    """The configuration of the Pythia model of that name."""
    hidden, layers, heads = SHAPES[name]
    return GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        rotary_pct=0.25,
        max_position_embeddings=2048,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )


def weights_of(name: str) -> int:
    """The number of weights in the matrices of that shape, embeddings included."""
    hidden, layers, _ = SHAPES[name]
    return 12 * layers * hidden**2 + 2 * VOCABULARY * hidden


def random_model(name: str, dtype: torch.dtype, device: str, seed: int) -> GPTNeoXForCausalLM:
    """A GPT-NeoX model of that shape with random weights, made on the device and in the dtype: no weight is copied."""
    config = configuration(name, attn_implementation="sdpa")
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    # The rotary embedding is computed, not loaded: `to_empty` has left its buffers empty.
    model.gpt_neox.rotary_emb = type(model.gpt_neox.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    weights = list(model.named_parameters())
    for key, weight in followed(weights, f"making {name}", len(weights)):
        if weight.dim() > 1:
            weight.normal_(0, 0.02, generator=generator)
        else:
            weight.fill_(0.0 if key.endswith("bias") else 1.0)
    return model
