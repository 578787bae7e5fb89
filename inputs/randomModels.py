"""Models of Pythia's true shapes with random weights: for measuring speed without a download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from inputs import files
from inputs.files import gigabytes
from inputs.progress import followed
from utils import UserError

PREFIX = "random:"
VOCABULARY = 50304
SEED = 0
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


def made_model(name: str) -> str:
    """The name of the model that "random:SHAPE" stands for, models/random-SHAPE, which is written at its first use in
    bfloat16. Any other name is returned unchanged. Raises UserError for an unknown shape, or if the disk is too
    small."""
    if not name.startswith(PREFIX):
        return name
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise UserError(f"there is no shape {shape!r}; known are: {', '.join(PREFIX + known for known in SHAPES)}")
    folder = files.MODELS / f"random-{shape}"
    if not (folder / "config.json").exists():
        needed, free = 2 * weights_of(shape), shutil.disk_usage(files.MODELS).free
        if needed > free:
            raise UserError(
                f"{name} needs about {gigabytes(needed)} on the disk, where only {gigabytes(free)} are free"
            )
        making = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(making, ignore_errors=True)
        random_model(shape).save_pretrained(making)
        write_tokenizer(making)
        making.rename(folder)
    return folder.name


def weights_of(shape: str) -> int:
    """The number of weights of a shape, but for norms and biases."""
    hidden, layers, _ = SHAPES[shape]
    return 12 * layers * hidden**2 + 2 * VOCABULARY * hidden


def config_of(shape: str) -> GPTNeoXConfig:
    """The configuration of a shape."""
    hidden, layers, heads = SHAPES[shape]
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
    )


def random_model(shape: str, dtype: torch.dtype = torch.bfloat16) -> GPTNeoXForCausalLM:
    """A GPT-NeoX model of `shape` with random weights."""
    config = config_of(shape)
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config).to(dtype)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    weights = list(model.named_parameters())
    for key, weight in followed(weights, f"making random:{shape}", len(weights)):
        if weight.dim() > 1:
            weight.normal_(0, 0.02, generator=generator)
        else:
            weight.fill_(0.0 if key.endswith("bias") else 1.0)
    return model


def write_tokenizer(folder: Path) -> None:
    """The bundled tokenizer with as many tokens as the model has logits."""
    for file in (files.MODELS / TOKENIZER).glob("*token*.json"):
        shutil.copy(file, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    first = 1 + max(*known.values(), *(token["id"] for token in tokenizer["added_tokens"]))
    known |= {f"<random {token}>": token for token in range(first, VOCABULARY)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
