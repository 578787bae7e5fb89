"""CTranslate2."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from ctranslate2.converters.transformers import GPTNeoXLoader
from transformers import AutoModelForCausalLM

from benchmark.engines.catalogue import Answer, Asked, Load
from benchmark.engines.weights import Weights


def convert(weights: Weights, folder: Path, bits: int) -> None:
    """Write the model with the library's own converter."""
    model = AutoModelForCausalLM.from_pretrained(weights.folder, dtype=torch.float32)
    model.resize_token_embeddings(weights.vocabulary)
    # The converter looks for these where older versions of transformers had them.
    model.config.rotary_pct, model.embed_out = weights.rotary / weights.head, model.get_output_embeddings()
    specification = GPTNeoXLoader().get_model_spec(model)
    specification.register_vocabulary([word(token) for token in range(weights.vocabulary)])
    specification.config.bos_token = specification.config.eos_token = specification.config.unk_token = word(0)
    specification.validate()
    specification.optimize("int8" if bits == 8 else None)
    specification.save(str(folder))


def word(token: int) -> str:
    """What a token is called. The library takes prompts in words."""
    return f"t{token}"


class Engine:
    """A generator."""

    version = ctranslate2.__version__

    def __init__(self, load: Load) -> None:
        kind = "int8" if load.precision == "int8" else "float32"
        self.generator = ctranslate2.Generator(str(load.target), compute_type=kind, intra_threads=load.threads)

    def generate(self, asked: Asked) -> Answer:
        """Continue one prompt."""
        ctranslate2.set_random_seed(asked.seed % (1 << 32))
        drawn: dict[str, Any] = {"sampling_topk": 1}
        if asked.temperature:
            drawn = {"sampling_topk": 0, "sampling_topp": asked.top_p, "sampling_temperature": asked.temperature}
        times: list[tuple[float, int]] = []
        start = time.perf_counter()
        (made,) = self.generator.generate_batch(
            [[word(token) for token in asked.prompt]],
            max_length=asked.count,
            include_prompt_in_result=False,
            end_token=[],
            callback=lambda step: times.append((time.perf_counter() - start, 1)),
            **drawn,
        )
        return made.sequences_ids[0], times
