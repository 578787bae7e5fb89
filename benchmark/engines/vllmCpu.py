"""vLLM's CPU build, in an environment of its own (`install.py`): many texts at once, plain or with prompt lookup."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmark.engines.engineProcess import ENVIRONMENTS, Answer, BatchRequest, LoadRequest, TextRequest, Weights

LOOKUP = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}  # tokens that must match, as in vLLM's documentation
BLOCK = 128  # tokens of a block of the KV cache
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine runs in this process, which is stopped while it is idle.
    "VLLM_USE_AOT_COMPILE": "0",  # What 0.32 compiled ahead of time for a CPU it cannot load, and compiles it again.
    "VLLM_CACHE_ROOT": str(ENVIRONMENTS["vllmCpu"] / "cache"),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def convert(weights: Weights, folder: Path, bits: int) -> None:
    """Write the model as transformers does, with its vocabulary cut, in the type of its weights."""
    model = AutoModelForCausalLM.from_pretrained(weights.folder, dtype="auto")
    model.resize_token_embeddings(weights.vocabulary)
    model.save_pretrained(folder)


class Engine:
    """An engine for up to `request.batch` texts at once, compiled as vLLM does by default."""

    def __init__(self, request: LoadRequest) -> None:
        os.environ.update(VARIABLES, OMP_NUM_THREADS=str(request.threads))  # Unset, torch would have one thread.
        torch.set_num_threads(request.threads)
        import vllm

        self.library, self.version = vllm, vllm.__version__
        model = Weights(Path(request.target), 0)
        options: dict[str, Any] = {"max_num_seqs": request.batch, "enable_prefix_caching": False}
        if request.lookup:
            options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": request.gamma, **LOOKUP}
        self.settings = options | {"preloaded": [Path(name).name for name in preloaded()]}
        self.engine = vllm.LLM(
            model=request.target,
            dtype=request.precision,
            max_model_len=min(request.context, model.context),
            kv_cache_memory_bytes=cache_bytes(request, model),
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **options,
        ).llm_engine
        self.number = 0  # of texts so far

    def generate(self, request: TextRequest) -> Answer:
        (answer,) = self.decode([request], 1)
        return answer

    def batch(self, request: BatchRequest) -> list[Answer]:
        return self.decode(request.singles, request.batch)

    def decode(self, requests: list[TextRequest], batch: int) -> list[Answer]:
        """Continue all prompts, `batch` at once: the next starts when a text ends."""
        answers: dict[str, Answer] = {}
        waiting = requests[::-1]
        start = time.perf_counter()

        def add() -> None:
            request, name = waiting.pop(), str(self.number)
            self.number += 1
            answers[name] = [], []
            self.engine.add_request(name, {"prompt_token_ids": request.prompt}, self.sampling(request))

        for _ in range(min(batch, len(requests))):
            add()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                now = time.perf_counter() - start
                tokens, times = answers[output.request_id]
                new = output.outputs[0].token_ids
                tokens.extend(new)
                times.append((now, len(new)))
                if output.finished and waiting:
                    add()
        return list(answers.values())

    def sampling(self, request: TextRequest) -> Any:
        """How a text is drawn. Each step returns the tokens that are new."""
        return self.library.SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p if request.temperature else 1.0,
            seed=request.seed32,
            max_tokens=request.count,
            ignore_eos=True,
            detokenize=False,
            output_kind=self.library.sampling_params.RequestOutputKind.DELTA,
        )


def preloaded() -> list[str]:
    """The libraries that were loaded before all others."""
    return [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]


def cache_bytes(request: LoadRequest, model: Weights) -> int:
    """The bytes of a KV cache for `request.batch` texts of `request.context` tokens, with a block to spare for each."""
    each = 2 * model.layers * model.groups * model.head * torch.finfo(getattr(torch, request.precision)).bits // 8
    blocks = request.batch * (-(-request.context // BLOCK) + 1) + 1
    return blocks * BLOCK * each
