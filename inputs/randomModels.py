"""Models of Pythia's true shapes with random weights: for measuring speed without a download."""

from __future__ import annotations

import json
import shutil

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from inputs import files
from inputs.commandLine import did_you_mean
from inputs.files import new_folder
from inputs.hub import check_disk
from inputs.progress import followed
from utils import UserError

PREFIX = "random:"
VOCABULARY = 50304
POOL = 1 << 24  # random numbers, which the weights share: to draw one for each takes many times as long
TOKENIZER = "bundled-target"  # Its first tokens are those of text; the others never come from text.
SHAPES = {
    #             hidden layers heads
    "pythia-70m": (512, 6, 8),
    "pythia-160m": (768, 12, 12),
    "pythia-410m": (1024, 24, 16),
    "pythia-1b": (2048, 16, 8),
    "pythia-1.4b": (2048, 24, 16),
    "pythia-2.8b": (2560, 32, 32),
}


def write_random(name: str) -> str:
    """Write the model that "random:SHAPE" stands for as models/random-SHAPE, in bfloat16, unless it exists; returns its
    name. Any other name is returned unchanged. Raises UserError for an unknown shape, or if the disk is too small."""
    if not name.startswith(PREFIX):
        return name
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        shapes = [PREFIX + known for known in SHAPES]
        raise UserError(f"there is no shape {shape!r}; known are: {', '.join(shapes)}{did_you_mean(name, shapes)}")
    folder = files.MODELS / f"random-{shape}"
    if (folder / "config.json").exists():
        return folder.name
    check_disk(files.MODELS, 2 * weight_count(shape))
    with new_folder(folder) as written:
        random_model(shape).save_pretrained(written)
        for file in (files.MODELS / TOKENIZER).glob("*token*.json"):
            shutil.copy(file, written)
        tokenizer = json.loads((written / "tokenizer.json").read_text(encoding="utf-8"))
        known = tokenizer["model"]["vocab"]  # as many tokens as the model has logits
        first = 1 + max(*known.values(), *(token["id"] for token in tokenizer["added_tokens"]))
        known |= {f"<random {token}>": token for token in range(first, VOCABULARY)}
        (written / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return folder.name


def weight_count(shape: str) -> int:
    """The number of weights of a shape, but for norms and biases."""
    hidden, layers, _ = SHAPES[shape]
    return 12 * layers * hidden**2 + 2 * VOCABULARY * hidden


def config_of(shape: str) -> GPTNeoXConfig:
    hidden, layers, heads = SHAPES[shape]
    return GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        rotary_pct=0.25,
        eos_token_id=0,
    )


def random_model(shape: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> GPTNeoXForCausalLM:
    """A GPT-NeoX model of `shape` with random weights from a pool that `device` draws."""
    config = config_of(shape)
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.gpt_neox.rotary_emb = GPTNeoXRotaryEmbedding(config).to(device)  # Its buffers are no parameters.
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.randn(POOL, generator=generator, device=device).mul_(0.02).to(dtype)
    at, weights = 0, list(model.named_parameters())
    for key, weight in followed(weights, f"making random:{shape}", len(weights)):
        if weight.dim() == 1:
            weight.fill_(0.0 if key.endswith("bias") else 1.0)
            continue
        for part in weight.flatten().split(POOL // 2):
            at = at if at + len(part) <= POOL else 0
            part.copy_(drawn[at : at + len(part)])
            at += len(part)
    return model
