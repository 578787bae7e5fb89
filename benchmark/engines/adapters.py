"""The engines' side: `main` runs in the process of one engine, which `peers.EngineProcess` starts.

It reads messages from stdin and answers on stdout, one JSON object a line. A failure is answered by {"error"}.

    {"do": "convert", "module", "source", "folder", "vocabulary", "bits"}    answered by {}
    {"do": "load", "module", ...}    the fields of `LoadRequest`              answered by {"version", "settings"}
    {"do": "generate", ...}          the fields of `TextRequest`              answered by {"tokens", "times"}
    {"do": "batch", "prompts", "seeds", "batch", ...}    `batch` texts at once    answered by {"texts": [as above]}
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from inputs.files import ROOT

FOLDER = ROOT / ".peers"  # what `python -m benchmark.engines.install` installs, and the converted models
SITE, SERVER, VLLM = FOLDER / "site", FOLDER / "llama-server", FOLDER / "vllm"
CLASSES = {  # {module: class}. Each is imported in its own process alone: its library may be missing.
    "openvinoGenai": "benchmark.engines.openvinoGenai:OpenVino",
    "llamaCpp": "benchmark.engines.llamaCpp:LlamaCpp",
    "cTranslate": "benchmark.engines.adapters:CTranslate",
    "vllmCpu": "benchmark.engines.adapters:Vllm",
}
EMBEDDINGS = ("gpt_neox.embed_in.weight", "embed_out.weight", "lm_head.weight", "model.embed_tokens.weight")
ALIASES = {  # a weight that a file lacks, and what it is then: under the name of a newer transformers, or tied
    "embed_out.weight": "lm_head.weight",
    "lm_head.weight": "model.embed_tokens.weight",
}
# The tokens, and [seconds since the call, tokens that came then], as they came.
Answer = tuple[list[int], list[tuple[float, int]]]


@dataclass(frozen=True)
class LoadRequest:
    """The models that an engine loads: the folders of converted models. draft: None if no model drafts. context: the
    tokens of a text, prompt included. alpha: of synthetic acceptance. lookup: whether prompt lookup drafts. batch: the
    texts that it can decode at once."""

    target: str
    draft: str | None
    precision: str
    threads: int
    gamma: int
    context: int
    alpha: float | None = None
    lookup: bool = False
    batch: int = 1


@dataclass(frozen=True)
class TextRequest:
    """The request of one text. temperature: 0 for greedy decoding. The text never ends early. seed: of 32 bits."""

    prompt: list[int]
    count: int
    temperature: float
    top_p: float
    seed: int


class Weights:
    """The GPT-NeoX or Llama model in `folder`, read one weight at a time: `weights[name]` is a float32 array. Rows of
    the embeddings past `vocabulary` are cut off.

    Raises ValueError for another architecture.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] not in ("gpt_neox", "llama"):
            raise ValueError(f"only GPT-NeoX and Llama models are converted, not {config['model_type']}")
        rope = config["rope_parameters"]
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rotary embeddings of type {rope['rope_type']} are not converted")
        self.llama = config["model_type"] == "llama"
        self.folder, self.vocabulary, self.config = folder, vocabulary, config
        self.layers, self.heads, self.hidden = (
            config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        self.head = config.get("head_dim") or self.hidden // self.heads
        self.groups = config.get("num_key_value_heads", self.heads)
        self.rotary, self.theta = int(rope.get("partial_rotary_factor", 1) * self.head), rope["rope_theta"]
        self.epsilon = config["rms_norm_eps" if self.llama else "layer_norm_eps"]
        self.context = config["max_position_embeddings"]
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self.files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored(name).float().numpy()

    def stored(self, name: str) -> Tensor:
        """A weight in the type that the file has. It is mapped from the file, not copied."""
        while name not in self.files and name in ALIASES:
            name = ALIASES[name]
        weight = self.files[name].get_tensor(name)
        return weight[: self.vocabulary] if name in EMBEDDINGS else weight

    def library_model(self) -> Any:
        """The model as transformers loads it, in the type of its weights, with its vocabulary cut."""
        from transformers import AutoModelForCausalLM  # It takes seconds, and most engines do without it.

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype="auto")
        model.resize_token_embeddings(self.vocabulary)
        return model


class Engine:
    """One engine with a model loaded. version, settings: what is recorded of it.

    Each has convert(weights, folder, bits), static: write the model in its own format, with `bits` bits a weight; and
    generate(request) -> answer: continue one prompt. Some have batch(requests, batch) -> answers too, which continues
    all prompts, `batch` at once: the next starts when a text ends.
    """

    version = ""
    settings: Mapping[str, Any] = {}


class CTranslate(Engine):
    """CTranslate2, with the number of threads that decodes faster: 1 or `request.threads`.

    More threads are not always faster: a layer of a small model takes less time than the threads' waiting for each
    other.
    """

    TRIAL, TRIALS = TextRequest([0], 8, 0.0, 1.0, 0), 4  # what is decoded to find the number, and how often

    def __init__(self, request: LoadRequest) -> None:
        if request.precision == "float32":
            # oneDNN multiplies. The default on Intel processors is MKL, with which a second thread made a small model
            # several times slower. The library reads the variable when it is imported.
            os.environ["CT2_USE_MKL"] = "0"
        import ctranslate2

        self.library, self.request, self.version = ctranslate2, request, ctranslate2.__version__
        self.generator: Any = None
        choices = sorted({1, request.threads})
        seconds = {threads: self.start(threads) for threads in choices}
        best = min(choices, key=seconds.__getitem__)
        if best != choices[-1]:
            self.start(best)
        self.settings = {"intra_threads": best}

    @staticmethod
    def convert(weights: Weights, folder: Path, bits: int) -> None:
        """By the library's own converter. It keeps the type of the weights, and loading widens them."""
        from ctranslate2.converters.transformers import GPTNeoXLoader, LlamaLoader

        model = weights.library_model()
        # The converters look for these where older versions of transformers had them.
        model.config.rotary_pct, model.config.rope_theta = weights.rotary / weights.head, weights.theta
        model.embed_out = model.get_output_embeddings()
        specification = (LlamaLoader if weights.llama else GPTNeoXLoader)().get_model_spec(model)
        # CTranslate2 takes prompts as strings of tokens: t0, t1, ...
        specification.register_vocabulary([f"t{token}" for token in range(weights.vocabulary)])
        specification.config.bos_token = specification.config.eos_token = specification.config.unk_token = "t0"
        specification.config.layer_norm_epsilon = weights.epsilon
        specification.validate()
        specification.optimize("int8" if bits == 8 else None)
        specification.save(str(folder))

    def start(self, threads: int) -> float:
        """Load the model for `threads` threads, and return the seconds of decoding a few tokens."""
        self.generator = None  # The memory of the model before it must be free.
        compute_type = "int8" if self.request.precision == "int8" else "float32"
        self.generator = self.library.Generator(self.request.target, compute_type=compute_type, intra_threads=threads)
        return min(self.generate(self.TRIAL)[1][-1][0] for _ in range(self.TRIALS))

    def generate(self, request: TextRequest) -> Answer:
        self.library.set_random_seed(request.seed)
        options: dict[str, Any] = {"sampling_topk": 1}
        if request.temperature:
            options = {"sampling_topk": 0, "sampling_topp": request.top_p, "sampling_temperature": request.temperature}
        times: list[tuple[float, int]] = []
        start = time.perf_counter()
        (result,) = self.generator.generate_batch(
            [[f"t{token}" for token in request.prompt]],
            max_length=request.count,
            include_prompt_in_result=False,
            end_token=[],
            callback=lambda step: times.append((time.perf_counter() - start, 1)),
            **options,
        )
        return result.sequences_ids[0], times


class Vllm(Engine):
    """vLLM's CPU build, in an environment of its own (`install.py`), compiled as vLLM does by default: up to
    `request.batch` texts at once, plain or with prompt lookup."""

    LOOKUP = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}  # tokens that must match, as in vLLM's documentation
    BLOCK = 128  # tokens of a block of the KV cache
    VARIABLES = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine runs in this process, which is stopped while it is idle.
        "VLLM_USE_AOT_COMPILE": "0",  # What 0.32 compiled ahead of time for a CPU it cannot load, and compiles again.
        "VLLM_CACHE_ROOT": str(VLLM / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def __init__(self, request: LoadRequest) -> None:
        # Unset, torch would have one thread.
        os.environ.update(self.VARIABLES, OMP_NUM_THREADS=str(request.threads))
        torch.set_num_threads(request.threads)
        import vllm

        self.library, self.version = vllm, vllm.__version__
        model = Weights(Path(request.target), 0)
        options: dict[str, Any] = {"max_num_seqs": request.batch, "enable_prefix_caching": False}
        if request.lookup:
            lookup = {"method": "ngram", "num_speculative_tokens": request.gamma, **self.LOOKUP}
            options["speculative_config"] = lookup
        preloaded = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
        self.settings = options | {"preloaded": [Path(name).name for name in preloaded]}
        # Each text has a KV cache of `context` tokens, with a block to spare.
        blocks = request.batch * (-(-request.context // self.BLOCK) + 1) + 1
        slot = 2 * model.layers * model.groups * model.head * getattr(torch, request.precision).itemsize
        self.engine = vllm.LLM(
            model=request.target,
            dtype=request.precision,
            max_model_len=min(request.context, model.context),
            kv_cache_memory_bytes=blocks * self.BLOCK * slot,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **options,
        ).llm_engine
        self.number = 0  # of texts so far

    @staticmethod
    def convert(weights: Weights, folder: Path, bits: int) -> None:
        weights.library_model().save_pretrained(folder)

    def generate(self, request: TextRequest) -> Answer:
        return self.batch([request], 1)[0]

    def batch(self, requests: Sequence[TextRequest], batch: int) -> list[Answer]:
        answers: dict[str, Answer] = {}
        waiting, running = list(requests[::-1]), 0
        start = time.perf_counter()
        while waiting or running:
            while waiting and running < batch:
                request, name = waiting.pop(), str(self.number)
                sampling = self.library.SamplingParams(
                    temperature=request.temperature,
                    top_p=request.top_p if request.temperature else 1.0,
                    seed=request.seed,
                    max_tokens=request.count,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=self.library.sampling_params.RequestOutputKind.DELTA,  # Each step returns new tokens.
                )
                answers[name] = [], []
                self.engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)
                self.number, running = self.number + 1, running + 1
            for output in self.engine.step():
                tokens, times = answers[output.request_id]
                new = output.outputs[0].token_ids
                times.append((time.perf_counter() - start, len(new)))
                tokens.extend(new)
                running -= output.finished
        return list(answers.values())


def main() -> None:
    """Answer messages until stdin ends."""
    os.setpgrp()  # `EngineProcess` stops and ends the whole group.
    # Engines print to stdout. Answers go to a copy of it, and everything else to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        fields = json.loads(line)
        do, answer = fields.pop("do"), {}
        try:
            if do == "convert":
                weights = Weights(Path(fields["source"]), fields["vocabulary"])
                pkgutil.resolve_name(CLASSES[fields["module"]]).convert(weights, Path(fields["folder"]), fields["bits"])
            elif do == "load":
                engine = pkgutil.resolve_name(CLASSES[fields.pop("module")])(LoadRequest(**fields))
                answer = {"version": engine.version, "settings": engine.settings}
            elif do == "generate":
                tokens, times = engine.generate(TextRequest(**fields))
                answer = {"tokens": list(map(int, tokens)), "times": times}
            else:
                prompts, seeds, batch = (fields.pop(name) for name in ("prompts", "seeds", "batch"))
                requests = [TextRequest(prompt=prompt, seed=seed, **fields) for prompt, seed in zip(prompts, seeds)]
                texts = engine.batch(requests, batch)
                answer = {"texts": [{"tokens": list(map(int, new)), "times": times} for new, times in texts]}
        except Exception as error:  # Whatever an engine raises is the reason why its row is left out.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
