"""OpenVINO GenAI."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from methods.programs.program import SITE, Answer, LoadRequest, Program, Row, TextRequest, Weights

CACHE = 1  # GB of KV cache


class OpenVino(Program):
    """A pipeline. Unquantised rows have an unquantised KV cache too: by default OpenVINO keeps it in 8 bits."""

    name = "openvino"
    rows = {
        "plain": Row("OpenVINO GenAI", form="bfloat16"),
        "draft": Row("the draft model guesses", "draft", form="bfloat16"),
        "lookup": Row("its prompt lookup", "lookup", form="bfloat16", matched=3),
        "int8": Row("weights in int8", precision="int8"),
    }
    requirements = "openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"
    installed = SITE / "openvino_genai"

    def __init__(self, request: LoadRequest) -> None:
        import openvino_genai

        self.version = openvino_genai.__version__
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": request.threads}
        if request.precision != "int8":
            short = {"bfloat16": "bf16", "float32": "f32"}[request.precision]
            settings |= {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
        # By default it keeps the keys and values of earlier prompts, and reads a prompt that it knows in half the time.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE, False
        options: dict[str, Any] = {"scheduler_config": scheduler}
        self.gamma = request.gamma if request.draft or request.matched else None
        self.matched = request.matched  # at most. With a draft model it would change how guesses are accepted.
        if request.draft:
            options["draft_model"] = openvino_genai.draft_model(request.draft, "CPU", **settings)
        if request.matched:
            options["prompt_lookup"] = True
        lengths = {"num_assistant_tokens": self.gamma, "max_ngram_size": self.matched}
        self.settings = settings | lengths | {"enable_prefix_caching": False}
        self.pipeline = openvino_genai.LLMPipeline(request.target, "CPU", **settings, **options)

    @staticmethod
    def convert(weights: Weights, folder: Path, form: str) -> None:
        """The graph, its other files for GenAI, and the tokenizer if it exists: a draft model needs it."""
        import openvino

        from methods.programs.openvinoGraph import GraphBuilder

        path, builder = folder / "openvino_model.xml", GraphBuilder(weights, form)
        openvino.save_model(builder.model(), path, compress_to_fp16=False)
        # Mark conversions of weights as decompression, as OpenVINO's own converter does; its Python interface has no
        # call for that. Otherwise the plugin widens all weights to float32 when it loads the graph, and keeps them
        # beside the ones that it computes with: three times the memory.
        tree = ElementTree.parse(path)
        for layer in tree.iter("layer"):
            if layer.get("name") in builder.decompressions:
                mark = ElementTree.Element("rt_info")
                ElementTree.SubElement(mark, "attribute", name="decompression", version="0")
                layer.insert(1, mark)  # after <data>
        tree.write(path, encoding="utf-8", xml_declaration=True)
        config = {key: value for key, value in weights.config.items() if isinstance(value, (int, float, str))}
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": weights.vocabulary}))
        (folder / "generation_config.json").write_text("{}")
        if (weights.folder / "tokenizer.json").exists():
            from openvino_tokenizers import convert_tokenizer
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(weights.folder, local_files_only=True, trust_remote_code=False)
            for name, model in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True)):
                openvino.save_model(model, folder / f"openvino_{name}.xml")

    def generate(self, request: TextRequest) -> Answer:
        import openvino
        import openvino_genai as genai

        class Streamer(genai.StreamerBase):
            """Notes when tokens come."""

            def write(self, tokens: Any) -> Any:
                times.append((time.perf_counter() - start, 1 if isinstance(tokens, int) else len(tokens)))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.rng_seed = request.count, True, request.seed
        sampling, config.repetition_penalty = request.sampling, request.sampling.repetition_penalty
        if sampling.temperature:
            config.do_sample, config.temperature, config.top_p = True, sampling.temperature, sampling.top_p
            config.top_k = sampling.top_k or config.top_k  # By default it keeps all.
        if self.gamma:
            config.num_assistant_tokens = self.gamma
            config.max_ngram_size = self.matched
        tokens = openvino.Tensor(np.array([request.prompt], np.int64))
        prompt = genai.TokenizedInputs(tokens, openvino.Tensor(np.ones((1, len(request.prompt)), np.int64)))
        times: list[tuple[float, int]] = []
        start = time.perf_counter()
        result = self.pipeline.generate(prompt, config, Streamer())
        return Answer(list(result.tokens[0]), times)
