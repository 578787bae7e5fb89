"""`LibraryMethod`: decoding by `generate` of `transformers`, as a method that is timed beside this project's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmark.engines.engineProcess import PeerError, short_reason
from decoding.record import Record
from experiments.speed import Written
from methods import customGenerate
from utils import Sampling

COMPILING: dict[str, Any] = {}  # how the library compiles its forward: arguments of its `CompileConfig`


class RecordStreamer(BaseStreamer):
    """Notes when `generate` has new tokens on the host: after each forward of the target."""

    def __init__(self) -> None:
        self.start, self.record = time.perf_counter(), Record()
        self.prompt = True  # The library passes the prompt first.

    def put(self, value: Tensor) -> None:
        if not self.prompt:
            self.record.add(time.perf_counter() - self.start, value.numel(), 0, 0)
        self.prompt = False

    def end(self) -> None:
        pass


class LibraryMethod:
    """A method of `transformers`.

    kind: "plain"; "static" with a static cache; "compiled", the same with its forward compiled by the library, on a
    CPU only if requested; "lookup": its prompt lookup; "draft": its assisted decoding with `gamma` guesses a
    round, "assisted" with a number that it chooses; "custom": this project's speculative sampling inside `generate`.
    models: {role: model}, with the library's own attention. vocabulary: models may have more logits than the tokenizer
        has tokens.
    """

    version = None
    settings: Mapping[str, Any] = {}

    def __init__(self, kind: str, models: Mapping[str, PreTrainedModel], vocabulary: int, gamma: int) -> None:
        self.kind, self.model, self.gamma = kind, models["target"], gamma
        self.failed: str | None = None
        self.assistant = models["draft"] if kind in ("draft", "assisted") else None
        self.precision = str(self.model.dtype).removeprefix("torch.")
        self.unit_roundoff = torch.finfo(self.model.dtype).eps / 2
        outside = list(range(vocabulary, self.model.config.vocab_size))
        self.options: dict[str, Any] = {"suppress_tokens": outside} if outside and kind != "custom" else {}
        if kind == "static":
            self.options |= {"cache_implementation": "static", "disable_compile": True}
        elif kind == "compiled":
            config = CompileConfig(**COMPILING)
            config._compile_all_devices = True  # Without it, accelerators alone.
            self.options |= {"cache_implementation": "static", "compile_config": config}
        elif kind == "lookup":
            self.options["prompt_lookup_num_tokens"] = gamma
        elif kind == "custom":
            plug_in = customGenerate.speculative(models["draft"], gamma, vocabulary=vocabulary)
            self.options["custom_generate"] = plug_in

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        """`count` new tokens after each prompt, one text after another. Raises PeerError if the library fails: some
        models, devices and versions do not support what it does."""
        if batch > 1:
            raise PeerError("it decodes one text at a time here")
        try:
            pairs = [self.text(prompt, count, sampling, seed) for prompt, seed in zip(prompts, seeds)]
        except Exception as error:
            raise PeerError(short_reason(f"{type(error).__name__}: {error}")) from error
        return [tokens for tokens, _ in pairs], [record for _, record in pairs]

    def text(self, prompt: list[int], count: int, sampling: Sampling, seed: int) -> tuple[list[int], Record]:
        """One text and its record."""
        model = self.model
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        if self.assistant is not None:  # The assistant's own configuration decides how it guesses.
            config, gamma = self.assistant.generation_config, self.gamma if self.kind == "draft" else None
            config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0 if gamma else None
            config.num_assistant_tokens_schedule = "constant" if gamma else None
        torch.manual_seed(seed)
        streamer, tokens = RecordStreamer(), torch.tensor([prompt], device=model.device)
        filters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=sampling.temperature > 0,
            assistant_model=self.assistant,
            streamer=streamer,
            **(filters if sampling.temperature else {}),
            **self.options,
        )
        if self.kind == "compiled" and not hasattr(model, "_compiled_call"):
            raise RuntimeError("this version of the library does not compile its forward on this device")
        return output[0, len(prompt) :].tolist(), streamer.record

    def fail(self, error: Exception) -> None:
        """Skip the method from now on."""
        self.failed = short_reason(str(error))

    def close(self) -> None:
        """Nothing to close."""
