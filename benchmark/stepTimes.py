"""What the steps of decoding cost: forwards beside the time to read as many bytes, the parts of a round, and the growth
with prompts and contexts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Generator, Tensor

from benchmark.contenders import SAMPLING, DrafterOf, Variants, synthetic
from benchmark.records import OWN_COPY, ForwardLine, GrowthLine, PartLine, PrefillLine, StepRecord
from decoding.drafter import Drafter
from decoding.rows import Rows, uniform
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from engine.decoderLayers import PackedLayer
from engine.kernels.packedLinear import on_huge_pages
from experiments.speed import quiet, synchronize
from inputs.progress import Bar
from methods.drafters import ModelDrafter
from specSampling import specSampling

Key = TypeVar("Key", bound=Hashable)
Step = Callable[[], object]

WIDTHS, CONTEXTS = (1, 2, 5, 9, 17, 32), (64, 256, 1024, 2000)  # tokens scored at once; tokens before a drawn one
COPY_WIDTHS = (1, 2, 3, 5, 9)  # likewise by the target's own copy, which scores the guesses of a draft at most
PROMPTS = (16, 64, 256, 1024)  # tokens of the prompts whose prefill is timed
PROMPT = 64  # tokens of the prompts of all other measurements
LARGE = 512 << 20  # Bytes: more than any processor's cache holds.
TURNS, BUDGET = (5, 40), 20.0  # The least and the most turns; seconds after which no new turn begins.
WARM, LONG = 0.005, 0.5  # seconds; a step that takes LONG fills the caches itself


def step_times(
    variants: Variants,
    prompt: list[int],
    gamma: int,
    gamma_copy: int,
    device: torch.device | str,
    seed: int,
    drafter_of: DrafterOf = ModelDrafter,
) -> StepRecord:
    """All measurements of this module. prompt: the text before the parts of a round."""
    forwards, bandwidth = forward_times(variants, device)
    return {
        "forwards": forwards,
        "bandwidth": bandwidth,
        "parts": round_times(variants, prompt, gamma, gamma_copy, device, seed, drafter_of),
        "prefill": prefill_times(variants, device, seed),
        "growth": growth_times(variants, device, seed),
    }


@torch.inference_mode()
def time_in_turn(steps: Mapping[Key, Step], device: torch.device | str, title: str) -> dict[Key, list[float]]:
    """{name: [seconds, ...]} of `steps`, called in turn (A B C A B C ...). title: of the progress bar.

    A step that returns a float has timed itself. Before each call that counts, the step is called for WARM seconds: in
    decoding, a forward follows others of its own model, but here the step before it has filled the processor's caches.
    A step that takes LONG is not called for that: what was in the caches is soon read again.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in steps}
    began, latest = 0.0, dict.fromkeys(steps, 0.0)
    with quiet(device), Bar(title, TURNS[1]) as bar:
        for turn in range(-2, TURNS[1]):  # The first two turns warm up.
            if turn == 0:
                began = time.perf_counter()
            for name, step in steps.items():
                start = time.perf_counter()
                while latest[name] < LONG and time.perf_counter() - start < WARM:
                    step()
                    synchronize(device)
                start = time.perf_counter()
                result = step()
                synchronize(device)
                latest[name] = time.perf_counter() - start
                if turn >= 0:
                    seconds[name].append(result if isinstance(result, float) else latest[name])
            if turn >= 0:
                bar.update()
            if turn + 1 >= TURNS[0] and time.perf_counter() - began > BUDGET:
                break
    return seconds


def fill(model: CachedModel, length: int, capacity: int) -> None:
    """Read `length` tokens into a KV cache of `capacity` slots. Memory that was never written would be mapped to a
    single page, and reading it would be too fast."""
    model.reserve(1, capacity)
    for start in range(0, length, 256):  # In pieces, so that the logits stay small.
        at = torch.arange(start, min(start + 256, length), device=model.device)[None]
        model.forward(at % model.vocabulary, at, keep=torch.tensor([at.shape[1] - 1], device=model.device))


def forward(model: CachedModel, count: int, start: int) -> Callable[[], Tensor]:
    """A step: the forward of `count` tokens from position `start` on."""
    at = torch.arange(start, start + count, device=model.device)[None]
    tokens = at % model.vocabulary
    return lambda: model.forward(tokens, at)


def one_token(model: CachedModel, start: int, generator: Generator) -> Step:
    """A step: reads the token at position `start` and draws the next one."""
    at = torch.tensor([[start]], device=model.device)
    tokens = at % model.vocabulary

    def step() -> None:
        u = uniform(1, 1, device=model.device, generator=generator)
        model.draw(tokens, at, u, SAMPLING)[0].item()

    return step


def weight_bytes(model: CachedModel) -> int:
    """Bytes of the weights that a forward must read: all but the input embedding, of which it needs only a few rows."""
    layers = [module for module in model.model.modules() if isinstance(module, PackedLayer)]
    if layers:  # They are no parameters.
        parts = [part for layer in layers for part in layer.parts.values()]
        return sum(part.nbytes for part in (*parts, model.model.get_output_embeddings().packed))
    weights = {weight.data_ptr(): weight.nbytes for weight in model.model.parameters()}
    if model.model.get_input_embeddings().weight is not model.model.get_output_embeddings().weight:
        weights.pop(model.model.get_input_embeddings().weight.data_ptr())
    return sum(weights.values())


def cache_bytes(model: CachedModel, length: int) -> int:
    """Bytes of the first `length` slots of a model's KV cache."""
    assert model.cache is not None
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in model.cache.layers)
    return size * length // model.cache.capacity


def forward_times(variants: Variants, device: torch.device | str) -> tuple[list[ForwardLine], dict[str, list[float]]]:
    """Forwards of WIDTHS tokens beside the memory limit, and the bytes per second of each reading.

    Each model's forwards are timed in turn with reading as many bytes as its weights have, and with reading a large
    buffer. A buffer is read in several ways. One may be slow for a reason of its own, so the fastest of each turn
    counts. The limit is the fastest reading of all turns (`limit_of`), so that no share is above 1.
    """
    by_role = {role: model for models in reversed(variants.values()) for role, model in models.items()}
    sizes = {role: weight_bytes(model) for role, model in by_role.items()}
    steps: dict[tuple[str, str, int], Step] = {}  # (what is read, "read" or a variant, the way or the number of tokens)
    buffers: dict[str, Tensor] = {}
    for name, size in (sizes | {"memory": LARGE}).items():
        buffer = on_huge_pages(torch.empty(max(min(size, LARGE) // 4096, 1), 1024, device=device)).uniform_()
        buffers[name] = buffer
        ways = (buffer.sum, buffer.norm, partial(torch.mv, buffer, torch.ones(1024, device=device)))
        steps |= {(name, "read", way): read for way, read in enumerate(ways)}
        for variant, models in variants.items():
            if name in models:
                fill(models[name], PROMPT, PROMPT + max(WIDTHS))
                widths = COPY_WIDTHS if name == "copy" else WIDTHS
                steps |= {(name, variant, n): forward(models[name], n, PROMPT) for n in widths}
    seconds = time_in_turn(steps, device, "forwards")
    speeds = {}
    for name, buffer in buffers.items():
        turns = zip(*(taken for key, taken in seconds.items() if key[:2] == (name, "read")))
        speeds[name] = [buffer.nbytes / min(turn) for turn in turns]
    lines: list[ForwardLine] = []
    for (role, variant, n), taken in seconds.items():
        if variant != "read":
            size = sizes[role] + cache_bytes(variants[variant][role], PROMPT + n)
            lines.append({"role": role, "variant": variant, "tokens": n, "bytes": size, "seconds": taken, "share": []})
    for line in lines:
        limit = limit_of(line["role"], sizes, speeds, lines)
        line["share"] = [line["bytes"] / limit / took for took in line["seconds"]]
    return lines, speeds


def limit_of(
    role: str, sizes: Mapping[str, int], speeds: Mapping[str, Sequence[float]], lines: Iterable[ForwardLine]
) -> float:
    """The memory limit of a model's forwards, in bytes per second: the fastest that as many bytes, or more, were read
    in any turn, by reading alone or by a forward.

    A pair of the same turn would not do: on a machine whose memory is shared, each of the two may meet another load,
    and the share would be above 1 where the reading was disturbed. More bytes count too, because fewer are not slower
    to read; fewer do not, because the processor's cache may hold them.

    sizes: {role: bytes of the weights}. speeds: {what was read, a role or "memory": bytes per second of each turn}.
    """
    sizes = {"memory": LARGE, **sizes}
    fastest = {name: max(turns) for name, turns in speeds.items()}
    for line in lines:
        fastest[line["role"]] = max(fastest[line["role"]], line["bytes"] / min(line["seconds"]))
    return max(speed for name, speed in fastest.items() if sizes[name] >= min(sizes[role], LARGE))


def round_times(
    variants: Variants,
    prompt: list[int],
    gamma: int,
    gamma_copy: int,
    device: torch.device | str,
    seed: int,
    drafter_of: DrafterOf = ModelDrafter,
) -> list[PartLine]:
    """The parts of a round, and as a variant of their own those of a round in which the target's copy guesses.

    "plain step", "draft step": a token of the target, and of the draft. "scoring": gamma + 1 tokens scored at once, and
    verified. "round": a whole round in which all guesses are accepted. "sampling": its filters, draws and verification
    alone.
    """
    generator = Generator(device).manual_seed(seed)
    steps: dict[tuple[str, str], Step] = {}
    for variant, models in variants.items():
        by_name = round_steps(models["target"], models["draft"], prompt, gamma, generator, drafter_of)
        steps |= {(variant, part): step for part, step in by_name.items()}
    seconds = time_in_turn(steps, device, "a round")
    for variant, models in variants.items():  # Afterwards: the capacity of the target's KV cache depends on gamma.
        if "copy" in models:
            by_name = round_steps(models["target"], models["copy"], prompt, gamma_copy, generator)
            steps = {(variant + OWN_COPY, part): step for part, step in by_name.items()}
            seconds |= time_in_turn(steps, device, "a round of the copy")
    return [{"variant": variant, "part": part, "seconds": taken} for (variant, part), taken in seconds.items()]


@torch.inference_mode()
def round_steps(
    target: CachedModel,
    draft: CachedModel,
    prompt: list[int],
    gamma: int,
    generator: Generator,
    drafter_of: DrafterOf = ModelDrafter,
) -> dict[str, Step]:
    """{part of a round: its step}. The KV caches hold as many tokens as the prompt."""
    for model in (target, draft):
        fill(model, len(prompt), len(prompt) + tokens_of_rounds(gamma))
    logits = forward(target, gamma + 1, len(prompt))()
    at = torch.arange(gamma + 1, device=target.device)[None] + len(prompt)
    q = target.probabilities(logits[:, :gamma], SAMPLING)
    drafts = target.pick(q, torch.rand(q.shape[:-1], device=target.device, generator=generator))
    block = torch.cat([at[:, :1] % target.vocabulary, drafts], 1)

    def numbers(*shape: int) -> Tensor:
        return uniform(*shape, device=target.device, generator=generator)

    def scoring() -> None:
        target.score_block(block, at, q, numbers(1, gamma + 1), SAMPLING, token_rule)[1].tolist()

    def sampling() -> None:
        for i in range(gamma):
            target.pick(target.probabilities(logits[:, i], SAMPLING), numbers(1))
        p = target.probabilities(logits, SAMPLING)
        target.rule(token_rule)(p, q, drafts, numbers(1, gamma + 1))[0].tolist()

    return {
        "plain step": one_token(target, len(prompt), generator),
        "draft step": one_token(draft, len(prompt), generator),
        "scoring": scoring,
        "sampling": sampling,
        "round": lambda: seconds_of_round(target, drafter_of(draft), prompt, gamma, generator),
    }


def tokens_of_rounds(gamma: int) -> int:
    """New tokens of the text that `seconds_of_round` times: the first one, and three rounds."""
    return 1 + 3 * (gamma + 1)


def seconds_of_round(
    target: CachedModel, drafter: Drafter, prompt: list[int], gamma: int, generator: Generator
) -> float:
    """Mean seconds of two rounds in which all guesses are accepted. The round before them does not count: in it the
    draft reads the prompt."""
    rule, max_len = synthetic(1.0, target.rule(token_rule)), tokens_of_rounds(gamma)
    _, (record,) = specSampling([prompt], target, drafter, max_len, gamma, SAMPLING, None, generator, verify=rule)
    return (record.times[-1] - record.times[1]) / (len(record.times) - 2)


def prefill_times(variants: Variants, device: torch.device | str, seed: int) -> list[PrefillLine]:
    """Reading a prompt and drawing the first token, as every decoding method of this project begins."""
    limit = shortest_context(variants) - 1
    lengths = sorted({min(length, limit) for length in PROMPTS})
    steps: dict[tuple[str, int], Step] = {}
    for variant, models in variants.items():
        generator = Generator(device).manual_seed(seed)
        steps |= {(variant, n): first_step(models["target"], n, lengths[-1], generator) for n in lengths}
    seconds = time_in_turn(steps, device, "prompts")
    return [{"variant": variant, "tokens": n, "seconds": taken} for (variant, n), taken in seconds.items()]


def first_step(target: CachedModel, length: int, longest: int, generator: Generator) -> Step:
    """A step: reads a prompt of `length` tokens and draws a token. The KV cache has as many slots for each length, so
    that it is not allocated anew."""
    prompt = (torch.arange(length) % target.vocabulary).tolist()

    def step() -> None:
        target.first_token(Rows([prompt], longest + 1 - length, [target], generator=generator), SAMPLING)

    return step


def growth_times(variants: Variants, device: torch.device | str, seed: int) -> list[GrowthLine]:
    """A token of the target, drawn after contexts of growing length."""
    limit = shortest_context(variants)
    contexts = sorted({min(length, limit) for length in CONTEXTS})
    steps: dict[tuple[str, int], Step] = {}
    generator = Generator(device).manual_seed(seed)
    for variant, models in variants.items():
        fill(models["target"], contexts[-1], min(2048, limit))
        steps |= {(variant, n): one_token(models["target"], n - 1, generator) for n in contexts}
    seconds = time_in_turn(steps, device, "context")
    return [{"variant": variant, "context": n, "seconds": taken} for (variant, n), taken in seconds.items()]


def shortest_context(variants: Variants) -> int:
    """The most tokens that every variant of the target can read."""
    return min(models["target"].context for models in variants.values())
