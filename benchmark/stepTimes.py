"""What forwards cost: beside the time to read as many bytes from memory, and after contexts of growing length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from benchmark.inTurn import Work, in_turn
from benchmark.peers import SAMPLING
from benchmark.samplers import Variants
from decoding import drawing, rounds
from engine.cachedModel import CachedModel
from engine.kernels.hugePages import on_huge_pages

Line = dict[str, Any]  # one measurement of the record

WIDTHS, CONTEXTS = (1, 2, 5, 9, 17, 32), (64, 256, 1024, 2000)  # tokens scored at once; tokens before a drawn one
PROMPT = 64  # tokens
LARGE = 512 << 20  # Bytes: more than any processor's cache holds.
WAYS = 3  # of reading a buffer


def fill(model: CachedModel, length: int, capacity: int) -> None:
    """Read `length` tokens into a KV cache of `capacity` slots. Memory that was never written would be mapped to a
    single page, and reading it would be too fast."""
    model.reserve(1, capacity)
    for start in range(0, length, 256):  # In pieces, so that the logits stay small.
        at = torch.arange(start, min(start + 256, length), device=model.device)[None]
        model.forward(at % model.vocabulary, at, keep=[at.shape[1] - 1] * len(at))


def forward(model: CachedModel, count: int, start: int) -> Callable[[], Tensor]:
    """A function: the forward of `count` tokens from position `start` on."""
    at = torch.arange(start, start + count, device=model.device)[None]
    tokens = at % model.vocabulary
    return lambda: rounds.forward(model, tokens, at)


def one_token(model: CachedModel, start: int, generator: Generator) -> Work:
    """A function: reads the token at position `start` and draws the next one."""
    at = torch.tensor([[start]], device=model.device)
    tokens = at % model.vocabulary

    def work() -> None:
        drawing.draw_tokens(model, tokens, at, 1, SAMPLING, generator)[0].item()

    return work


def weight_bytes(model: CachedModel) -> int:
    """Bytes of the weights that a forward must read: all but the input embedding, of which it needs only a few rows."""
    weights = {weight.data_ptr(): weight.nbytes for weight in model.model.parameters()}
    if model.model.get_input_embeddings().weight is not model.model.get_output_embeddings().weight:
        weights.pop(model.model.get_input_embeddings().weight.data_ptr())
    return sum(weights.values())


def reads_of(buffer: Tensor) -> list[Work]:
    """Several ways of reading a buffer `[n, 1024]`. One way may be slow for a reason of its own, so the fastest one of
    each turn counts."""
    one = torch.ones(1024, device=buffer.device)
    return [buffer.sum, buffer.norm, lambda: buffer @ one]


def limits(variants: Variants, device: str) -> tuple[list[Line], dict[str, list[float]]]:
    """Forwards of WIDTHS tokens beside the memory limit: `share` is the time to read as many bytes over the time of the
    forward.

    Each model's forwards are timed in turn with reading as many bytes as its weights have, and with reading a large
    buffer. Returns [{role, variant, tokens, bytes, seconds, share}], and the bytes per second of each reading.
    """
    sizes = {role: weight_bytes(model) for role, model in variants["eager"].items()}
    works: dict[tuple[str, str, int], Work] = {}
    buffers = {}
    for what, size in (sizes | {"memory": LARGE}).items():
        buffers[what] = on_huge_pages(torch.empty(max(min(size, LARGE) // 4096, 1), 1024, device=device)).uniform_()
        works |= {(what, "read", way): work for way, work in enumerate(reads_of(buffers[what]))}
        for variant, models in variants.items() if what in sizes else ():
            fill(models[what], PROMPT, PROMPT + max(WIDTHS))
            works |= {(what, variant, n): forward(models[what], n, PROMPT) for n in WIDTHS}
    seconds = in_turn(works, device, "forwards")
    speeds = {}
    for what, buffer in buffers.items():
        fastest = [min(ways) for ways in zip(*(seconds[what, "read", way] for way in range(WAYS)))]
        speeds[what] = [buffer.nbytes / each for each in fastest]
    lines = []
    for role, variant, n in (key for key in works if key[1] != "read"):
        size = sizes[role] + cache_bytes(variants[variant][role], PROMPT + n)
        own = seconds[role, variant, n]
        share = [size / speed / each for speed, each in zip(speeds[role], own)]
        lines.append({"role": role, "variant": variant, "tokens": n, "bytes": size, "seconds": own, "share": share})
    return lines, speeds


def cache_bytes(model: CachedModel, length: int) -> int:
    """Bytes of the first `length` slots of a model's KV cache."""
    assert model.cache is not None
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in model.cache.layers)
    return kept * length // model.cache.capacity


def growth(variants: Variants, device: str, seed: int) -> list[Line]:
    """[{variant, context, seconds}]: a token of the target, drawn after a context of that many tokens."""
    context = min(models["target"].context for models in variants.values())
    contexts = sorted({min(each, context) for each in CONTEXTS})
    works: dict[tuple[str, int], Work] = {}
    generator = Generator(device).manual_seed(seed)
    for variant, models in variants.items():
        fill(models["target"], contexts[-1], min(2048, context))
        works |= {(variant, each): one_token(models["target"], each - 1, generator) for each in contexts}
    seconds = in_turn(works, device, "context")
    return [{"variant": variant, "context": each, "seconds": own} for (variant, each), own in seconds.items()]
