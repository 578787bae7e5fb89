"""How the time to the first token grows with the prompt."""

from __future__ import annotations

import torch
from torch import Generator

from benchmark.inTurn import Work, in_turn
from benchmark.peers import SAMPLING
from benchmark.samplers import Variants
from benchmark.stepTimes import Line
from decoding.rounds import first_token
from decoding.rows import Rows
from engine.cachedModel import CachedModel

LENGTHS = (16, 64, 256, 1024)  # tokens of a prompt


def prefill(variants: Variants, device: str, seed: int) -> list[Line]:
    """[{variant, tokens, seconds}]: reading a prompt of that many tokens and drawing the first token, as every decoding
    method of this project begins."""
    room = min(models["target"].context for models in variants.values()) - 1
    lengths = sorted({min(each, room) for each in LENGTHS})
    works: dict[tuple[str, int], Work] = {}
    for variant, models in variants.items():
        generator = Generator(device).manual_seed(seed)
        works |= {(variant, each): first(models["target"], each, lengths[-1], generator) for each in lengths}
    seconds = in_turn(works, device, "prompts")
    return [{"variant": variant, "tokens": each, "seconds": own} for (variant, each), own in seconds.items()]


def first(target: CachedModel, length: int, longest: int, generator: Generator) -> Work:
    """A function: reads a prompt of `length` tokens and draws a token. The KV cache has as many slots for each length,
    so that it is not allocated anew."""
    prompt = (torch.arange(length) % target.vocabulary).tolist()

    def work() -> None:
        first_token(Rows([prompt], longest + 1 - length, [target]), target, SAMPLING, generator)

    return work
