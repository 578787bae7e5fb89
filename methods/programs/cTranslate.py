"""CTranslate2."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from methods.programs.program import SITE, Answer, LoadRequest, Program, Row, TextRequest, Weights
from utils import GREEDY


class CTranslate(Program):
    """With the number of threads that decodes faster: 1 or `request.threads`.

    More threads are not always faster: a layer of a small model takes less time than the threads' waiting for each
    other. It has no 16-bit type on CPUs.
    """

    name = "ctranslate2"
    rows = {"plain": Row("float32", precision="float32"), "int8": Row("weights in int8", precision="int8")}
    requirements = "ctranslate2==4.8.5", "pyyaml"
    installed = SITE / "ctranslate2"
    TRIAL, TRIALS = TextRequest([0], 8, GREEDY, 0), 4  # what is decoded to find the number, and how often

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
    def convert(weights: Weights, folder: Path, form: str) -> None:
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
        specification.optimize("int8" if form == "int8" else None)
        specification.save(str(folder))

    def start(self, threads: int) -> float:
        """Load the model for `threads` threads, and return the seconds of decoding a few tokens."""
        self.generator = None  # The memory of the model before it must be free.
        self.generator = self.library.Generator(
            self.request.target, compute_type=self.request.precision, intra_threads=threads
        )
        return min(self.generate(self.TRIAL).times[-1][0] for _ in range(self.TRIALS))

    def generate(self, request: TextRequest) -> Answer:
        self.library.set_random_seed(request.seed)
        sampling = request.sampling
        if sampling.repetition_penalty != 1:
            raise ValueError("its repetition penalty leaves out the prompt's tokens")
        options: dict[str, Any] = {"sampling_topk": 1}
        if sampling.temperature:
            filters = {"topk": sampling.top_k, "topp": sampling.top_p, "temperature": sampling.temperature}
            options |= {f"sampling_{name}": value for name, value in filters.items()}
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
        return Answer(result.sequences_ids[0], times)
