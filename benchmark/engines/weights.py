"""`Weights`: the weights of a GPT-NeoX model in a folder, read one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

EMBEDDINGS = ("gpt_neox.embed_in.weight", "embed_out.weight", "lm_head.weight")


class Weights:
    """The model in `folder`: `weights[name]` is a float32 array. Rows of the embeddings past `vocabulary` are cut off.

    Raises ValueError for another architecture than GPT-NeoX.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] != "gpt_neox":
            raise ValueError(f"only GPT-NeoX models are converted, not {config['model_type']}")
        rope = config["rope_parameters"]
        self.folder, self.vocabulary, self.config = folder, vocabulary, config
        self.layers, self.heads, self.hidden = (
            config[f] for f in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        self.head = self.hidden // self.heads
        self.rotary, self.theta = int(rope["partial_rotary_factor"] * self.head), rope["rope_theta"]
        self.epsilon, self.context = config["layer_norm_eps"], config["max_position_embeddings"]
        self.files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = safe_open(file, "pt")
            self.files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored(name).float().numpy()

    def stored(self, name: str) -> Tensor:
        """A weight in the type that the file has. It is mapped from the file, not copied."""
        if name not in self.files and name == "embed_out.weight":
            name = "lm_head.weight"  # as newer versions of transformers call it
        found = self.files[name].get_tensor(name)
        return found[: self.vocabulary] if name in EMBEDDINGS else found
