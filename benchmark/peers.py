"""What this project's decoding is compared with: `transformers`' own decoding, and speculative sampling without a KV
cache.

Samplers are f(prompt, generator) -> (tokens, records), as `speed.measure` takes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from decoding.record import Record
from decoding.verification import token_rule
from engine.twins import twin
from experiments.speed import Timed
from utils import Sampling, draw, probabilities

SAMPLING = Sampling()  # of all rows
Generated = tuple[list[list[int]], list[Record]]  # the new tokens of one prompt and its record, each in a list of one


def library_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A twin with `transformers`' own attention."""
    other = twin(model)
    other.set_attn_implementation("sdpa")
    return other


class Times(BaseStreamer):
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


def by_library(
    model: PreTrainedModel,
    max_len: int,
    assistant: PreTrainedModel | None = None,
    gamma: int | None = None,
    **options: Any,
) -> Timed:
    """`generate` of `transformers`. assistant: the draft. It guesses `gamma` tokens a round; None: as it does by
    default."""

    def sampler(prompt: list[int], generator: Generator) -> Generated:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        if assistant is not None:  # The assistant's own configuration decides how it guesses.
            config = assistant.generation_config
            config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0 if gamma else None
            config.num_assistant_tokens_schedule = "constant" if gamma else None
        torch.manual_seed(generator.initial_seed())
        times, tokens = Times(), torch.tensor([prompt], device=model.device)
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_len,
            do_sample=True,
            temperature=SAMPLING.temperature,
            top_p=SAMPLING.top_p,
            top_k=SAMPLING.top_k,
            assistant_model=assistant,
            streamer=times,
            **options,
        )[0, len(prompt) :].tolist()
        return [made], [times.record]

    return sampler


@torch.inference_mode()
def cache_free(
    prompt: Sequence[int],
    target: PreTrainedModel,
    draft: PreTrainedModel,
    max_len: int,
    gamma: int,
    generator: Generator | None = None,
    sampling: Sampling = SAMPLING,
    vocabulary: int | None = None,
) -> Generated:
    """Speculative sampling as in course reports: without a KV cache, so each forward reads the whole text."""

    def distributions(model: PreTrainedModel, count: int) -> Tensor:
        return probabilities(model(input_ids=text, use_cache=False).logits[:, -count:, :vocabulary], sampling)

    start, text, record = time.perf_counter(), torch.tensor([prompt], device=target.device), Record()
    while record.tokens < max_len:
        length = text.shape[1]
        q: list[Tensor] = []
        for _ in range(min(gamma, max_len - record.tokens - 1)):
            q.append(distributions(draft, 1))
            text = torch.cat([text, draw(q[-1], generator)], 1)
        p, drafts = distributions(target, len(q) + 1), text[:, length:]
        u = torch.rand(1, len(q) + 1, device=target.device, generator=generator)
        accepted, token = token_rule(p, torch.cat(q, 1) if q else p[:, :0], drafts, u)
        text = torch.cat([text[:, : length + accepted.item()], token[:, None]], 1)
        record.add(time.perf_counter() - start, text.shape[1] - length, len(q), accepted.item())
    return [text[0, len(prompt) :].tolist()], [record]
