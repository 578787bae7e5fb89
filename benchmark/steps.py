"""`measure_steps`: the costs of the steps of decoding (`test.py --steps`): forwards beside the time to read as many
bytes, prefill, the growth with the context, and the parts of a round."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Generator, Tensor

from decoding.drafter import Drafter
from decoding.rows import Rows, uniform
from decoding.verification import synthetic, token_rule
from engine.cachedModel import CachedModel
from engine.decoderLayers import PackedLayer
from engine.kernels.packedLinear import on_huge_pages
from engine.quantised import in_few_bits
from experiments.loading import Inputs, LoadedModels
from experiments.schema import Append, StepLine
from experiments.speed import Step, synchronize, time_steps
from methods.samplers import guesser
from specSampling import specSampling
from utils import Sampling, UserError

WIDTHS, CONTEXTS = (1, 2, 5, 9, 17, 32), (64, 256, 1024, 2000)  # tokens scored at once; tokens before a drawn one
PROMPTS = (16, 64, 256, 1024)  # tokens of the prompts whose prefill is timed
START = 64  # tokens before those of a forward
ROUNDS = 3  # that are timed at once; the first does not count
LARGE = 512 << 20  # Bytes: more than any processor's cache holds.
TURNS, BUDGET = (5, 40), 20.0  # The least and the most turns; seconds after which no new turn begins.
READ = "reading"  # the role of a line that says how long it takes to read bytes

TimeAll = Callable[[Mapping[Any, Step]], dict[Any, list[float]]]


def measure_steps(inputs: Inputs, models: LoadedModels, append: Append) -> None:
    """Measure everything of this module, and append its lines. Models are the target and the one that drafts."""
    settings, target = inputs.settings, models["target"]
    (prompt, *_) = inputs.rows
    sampling, gamma = settings.sampling.of("steps"), settings.decoding.gamma_of("fixed")
    drafter = guesser(dict(models), settings.decoding)
    least = min((target, *drafter.models), key=lambda model: model.context)
    if not drafter.varies and 1 + ROUNDS * (gamma + 1) >= least.context:
        rounds = f"{ROUNDS} rounds of {gamma} guesses, which the context of {least.name} does not hold"
        raise UserError(f"--steps times {rounds} ({least.context} tokens): lower --gamma")
    roles = dict(zip(("target", "draft"), (target, *cast(list[CachedModel], drafter.models[:1]))))
    conditions = inputs.conditions_of("steps", len(prompt), sampling)
    time_all = partial(times, device=inputs.device)
    parts = [forward_lines(roles, time_all), token_lines(target, sampling, time_all)]
    if not drafter.varies:  # A round with lookup has as many guesses as it finds.
        parts.append(round_lines(target, drafter, prompt, gamma, sampling, time_all))
    for line in itertools.chain.from_iterable(parts):  # Each is written before the next is measured.
        append(cast(StepLine, {"kind": "costs", "of": "step", **conditions, **line}))


def times(steps: Mapping[Any, Step], device: torch.device | str) -> dict[Any, list[float]]:
    """The seconds of steps that are timed interleaved, for BUDGET seconds."""
    for step in steps.values():
        step()  # It may compile something.
    end = time.perf_counter() + BUDGET
    turns = itertools.takewhile(lambda turn: turn < TURNS[0] or time.perf_counter() < end, range(TURNS[1]))
    return time_steps(steps, turns, device)


def fill(model: CachedModel, length: int, capacity: int) -> None:
    """Read `length` tokens into a KV cache of `capacity` slots. Memory that was never written would be mapped to a
    single page, and reading it would be too fast."""
    owner = model.cache_of or model
    owner.reserve(1, capacity)
    for start in range(0, length, 256):  # In pieces, so that the logits stay small.
        at = torch.arange(start, min(start + 256, length), device=model.device)[None]
        owner.forward(at % model.vocabulary, at, keep=torch.tensor([at.shape[1] - 1], device=model.device))


def forward(model: CachedModel, count: int, start: int) -> Callable[[], Tensor]:
    """A step: the forward of `count` tokens from position `start` on."""
    at = torch.arange(start, start + count, device=model.device)[None]
    tokens = at % model.vocabulary
    return lambda: model.forward(tokens, at)


def finish(step: Step, device: torch.device) -> None:
    """Take a step, and wait until `device` has done it."""
    step()
    synchronize(device)


def one_token(model: CachedModel, start: int, sampling: Sampling) -> Step:
    """A step: reads the token at position `start` and draws the next one."""
    at = torch.tensor([[start]], device=model.device)
    tokens, generator = at % model.vocabulary, Generator(model.device).manual_seed(0)

    def step() -> None:
        u = uniform(1, 1, device=model.device, generator=generator)
        model.draw(tokens, at, u, sampling)[0].item()

    return step


def bytes_of_weights(model: CachedModel) -> int:
    """Bytes of the weights that a forward must read: all but the input embedding, of which it needs only a few rows."""
    layers = [module for module in model.model.modules() if isinstance(module, PackedLayer)]
    if layers:  # They are no parameters.
        parts = [part for layer in layers for part in layer.parts.values()]
        return sum(part.nbytes for part in (*parts, model.model.get_output_embeddings().packed))
    few = [x for _, x in in_few_bits(model.model)]  # They are no parameters either.
    weights = {x.data_ptr(): x.nbytes for x in (*model.model.parameters(), *few)}
    embedding = model.model.get_input_embeddings().weight
    if getattr(model.model.get_output_embeddings(), "weight", None) is not embedding:
        weights.pop(embedding.data_ptr())
    return sum(weights.values())


@torch.inference_mode()
def forward_lines(
    roles: Mapping[str, CachedModel], time_all: TimeAll, widths: Sequence[int] = WIDTHS
) -> Iterator[dict[str, Any]]:
    """Forwards of `widths` tokens, and reading as many bytes as the weights have, and a large buffer.

    A buffer is read in several ways. One may be slow for a reason of its own, so the fastest of each turn counts.
    """
    sizes = {role: bytes_of_weights(model) for role, model in roles.items()}
    buffers: dict[str, Tensor] = {}
    steps: dict[tuple[str, str, int], Step] = {}  # (what is read, "read" or "forward", the way or the tokens)
    for name, size in (sizes | {"memory": LARGE}).items():
        device = roles.get(name, roles["target"]).device
        shape = max(min(size, LARGE) // 4096, 1), 1024
        empty = on_huge_pages(shape, torch.float32) if device.type == "cpu" else torch.empty(shape, device=device)
        buffers[name] = buffer = empty.uniform_()
        ways = buffer.sum, buffer.norm, partial(torch.mv, buffer, torch.ones(1024, device=device))
        steps |= {(name, "read", way): read for way, read in enumerate(ways)}
        if name in roles:
            fill(roles[name], START, START + max(widths))
            steps |= {(name, "forward", n): forward(roles[name], n, START) for n in widths}
    # The draft may have a device of its own, for which `time_steps` does not wait.
    devices = {name: buffer.device for name, buffer in buffers.items()}
    seconds = time_all({key: partial(finish, step, devices[key[0]]) for key, step in steps.items()})
    for name, buffer in buffers.items():
        turns = zip(*(taken for key, taken in seconds.items() if key[:2] == (name, "read")))
        yield {"what": READ, "role": name, "bytes": buffer.nbytes, "seconds": [min(turn) for turn in turns]}
    for (name, kind, n), taken in seconds.items():
        if kind == "forward":
            cache: Any = (roles[name].cache_of or roles[name]).cache
            cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            size = sizes[name] + cached * (START + n) // cache.capacity
            yield {"what": "forward", "role": name, "tokens": n, "bytes": size, "seconds": taken}


@torch.inference_mode()
def token_lines(target: CachedModel, sampling: Sampling, time_all: TimeAll) -> Iterator[dict[str, Any]]:
    """Prefill: reading a prompt and drawing the first token, as every decoding method of this project begins. The KV
    cache has as many slots for each length, so that it is not allocated anew. Growth: a token of the target, drawn
    after contexts of growing length."""
    lengths = sorted({min(length, target.context - 1) for length in PROMPTS})

    def first_step(length: int) -> Step:
        prompt = (torch.arange(length) % target.vocabulary).tolist()
        generator, room = Generator(target.device).manual_seed(0), lengths[-1] + 1 - length
        return lambda: target.first_token(Rows([prompt], room, [target], generator=generator), sampling)

    for length, taken in time_all({length: first_step(length) for length in lengths}).items():
        yield {"what": "prefill", "role": "target", "tokens": length, "seconds": taken}
    contexts = sorted({min(length, target.context) for length in CONTEXTS})
    fill(target, contexts[-1], contexts[-1])
    for context, taken in time_all({n: one_token(target, n - 1, sampling) for n in contexts}).items():
        yield {"what": "growth", "role": "target", "tokens": context, "seconds": taken}


@torch.inference_mode()
def round_lines(
    target: CachedModel, drafter: Drafter, prompt: Sequence[int], gamma: int, sampling: Sampling, time_all: TimeAll
) -> Iterator[dict[str, Any]]:
    """The parts of a round with `gamma` guesses.

    "plain step", "draft step": a token of the target, and of the draft. "scoring": gamma + 1 tokens scored at once, and
    verified. "round": a whole round in which all guesses are accepted. "sampling": its filters, draws and verification
    alone.
    """
    room = 1 + ROUNDS * (gamma + 1)  # the first token and those of such rounds
    models = {"plain step": target, "draft step": cast(CachedModel, drafter.models[0])}
    prompt = prompt[: min(model.context for model in models.values()) - room]
    start, parts = len(prompt), dict[str, Step]()
    for part, model in models.items():
        fill(model, start, start + room)
        parts[part] = one_token(model, start, sampling)
    generator = Generator(target.device).manual_seed(0)
    numbers = partial(uniform, device=target.device, generator=generator)
    logits = forward(target, gamma + 1, start)()
    at = torch.arange(gamma + 1, device=target.device)[None] + start
    q = target.probabilities(logits[:, :gamma], sampling)
    drafts = target.pick(q, numbers(1, gamma))
    block = torch.cat([at[:, :1] % target.vocabulary, drafts], 1)

    def scoring() -> None:
        target.score_block(block, at, q, numbers(1, gamma + 1), sampling, token_rule)[1].tolist()

    def filters_and_draws() -> None:
        for i in range(gamma):
            target.pick(target.probabilities(logits[:, i], sampling), numbers(1))
        p = target.probabilities(logits, sampling)
        target.rule(token_rule)(p, q, drafts, numbers(1, gamma + 1))[0].tolist()

    def whole_round() -> float:
        """The first round does not count: in it the draft reads the prompt."""
        rule = synthetic(1.0, target.rule(token_rule))
        _, (record,) = specSampling(
            [list(prompt)], target, drafter, room, gamma, sampling, None, generator, verify=rule
        )
        return (record.times[-1] - record.times[1]) / (len(record.times) - 2)

    parts |= {"scoring": scoring, "sampling": filters_and_draws, "round": whole_round}
    for part, taken in time_all(parts).items():
        yield {"what": "round", "role": part, "tokens": gamma, "seconds": taken}
