"""OpenVINO GenAI."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmark.engines.engineModule import Answer, Asked, Load
from benchmark.engines.openvinoGraph import write_graph
from benchmark.engines.weights import Weights

CACHE = 1  # GB of KV cache; speculative decoding needs a scheduler, and that a size.


def convert(weights: Weights, folder: Path, bits: int) -> None:
    """Write the graph, what GenAI reads beside it, and the tokenizer if there is one: a draft model needs it."""
    write_graph(weights, bits, folder)
    kept = {key: value for key, value in weights.config.items() if isinstance(value, (int, float, str))}
    (folder / "config.json").write_text(json.dumps(kept | {"vocab_size": weights.vocabulary}))
    (folder / "generation_config.json").write_text("{}")
    if (weights.folder / "tokenizer.json").exists():
        from openvino_tokenizers import convert_tokenizer
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(weights.folder)
        for name, made in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True)):
            openvino.save_model(made, folder / f"openvino_{name}.xml")


class Times(openvino_genai.StreamerBase):
    """Notes when tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.start = time.perf_counter()
        self.times: list[tuple[float, int]] = []

    def write(self, tokens: Any) -> openvino_genai.StreamingStatus:
        self.times.append((time.perf_counter() - self.start, 1 if isinstance(tokens, int) else len(tokens)))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Engine:
    """A pipeline. Unquantised rows have an unquantised KV cache too: by default OpenVINO keeps it in 8 bits."""

    version = openvino_genai.__version__

    def __init__(self, load: Load) -> None:
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": load.threads}
        if load.precision != "int8":
            short = {"bfloat16": "bf16", "float32": "f32"}[load.precision]
            settings |= {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
        more: dict[str, Any] = {}
        self.gamma = None
        if load.draft:
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.cache_size = CACHE
            more = {
                "draft_model": openvino_genai.draft_model(str(load.draft), "CPU", **settings),
                "scheduler_config": scheduler,
            }
            self.gamma = load.gamma
        self.pipeline = openvino_genai.LLMPipeline(str(load.target), "CPU", **settings, **more)

    def generate(self, asked: Asked) -> Answer:
        """Continue one prompt."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.rng_seed = asked.count, True, asked.seed % (1 << 32)
        if asked.temperature:
            config.do_sample, config.temperature, config.top_p = True, asked.temperature, asked.top_p
        if self.gamma:
            config.num_assistant_tokens = self.gamma
        tokens = openvino.Tensor(np.array([asked.prompt], np.int64))
        mask = openvino.Tensor(np.ones((1, len(asked.prompt)), np.int64))
        times = Times()
        made = self.pipeline.generate(openvino_genai.TokenizedInputs(tokens, mask), config, times)
        return list(made.tokens[0]), times.times
