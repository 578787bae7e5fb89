"""The speed of speculative decoding over gamma (`--sweep`) and over texts decoded together (`--sweep batch`), beside
what theory.py predicts.

A cell of the map of batch and gamma is one queue of texts: throughput is all its tokens over its time, prefill
included. Beside it stands the costAware rule, which chooses gamma itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from decoding.drafter import Drafter, Fixed, LengthRule
from decoding.lengthRules import CostAware
from decoding.model import Model
from decoding.verification import VerificationRule
from engine.cachedModel import CachedModel
from experiments.loading import Inputs
from experiments.schema import Append, BatchCostsLine, Conditions, QueueLine
from experiments.settings import BATCHES
from experiments.speed import Timed, time_steps, time_texts
from experiments.theory import GAMMAS, expectations, overlaps_of
from inputs.progress import Bar
from methods.samplers import Sampler
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling, seen_after

BATCH_GAMMAS = 1, 2, 3, 4, 6, 8
ALPHA_GAMMA = 4
TEXTS, FEWEST = 2, 4  # of a queue: TEXTS for each row of its batch, FEWEST at least
REPEATS, BATCH_REPEATS = 13, 9  # of each step whose cost is measured


def samplers(target: Model, drafter: Drafter, verify: VerificationRule, batches: bool = False) -> dict[str, Sampler]:
    """{"target": plain decoding, "gamma 1": ..., "gamma 2": ...}: speculative sampling with each fixed gamma; with
    `batches` for BATCH_GAMMAS, and with "costAware"."""
    rules: dict[str, LengthRule] = {f"gamma {n}": Fixed(n) for n in (BATCH_GAMMAS if batches else GAMMAS)}
    if batches:
        rules["costAware"] = CostAware(max(BATCH_GAMMAS))
    guessing = partial(specSampling, target=target, drafter=drafter, verify=verify)
    return {"target": partial(regrSampling, target=target)} | {
        name: partial(guessing, gamma=rule) for name, rule in rules.items()
    }


def sweep_costs(
    inputs: Inputs,
    prompts: list[list[int]],
    target: CachedModel,
    drafter: Drafter,
    verify: VerificationRule,
    sampling: Sampling,
    max_len: int,
) -> dict[str, Any]:
    """The costs and the alpha from which theory predicts speed: fields of a `CostsLine`.

    alpha is the mean overlap of p and q over the contexts in which a guess was tested, with ALPHA_GAMMA guesses in a
    round; nan if none was. It is less noisy than counting accepted guesses: a context counts with its probability of
    acceptance, not with the outcome of one draw. The overlaps by position need rounds as long as the longest of GAMMAS.
    Such rounds visit other contexts, where the mean overlap is another, so alpha comes from texts of its own.
    """
    longest, device, spread = max(GAMMAS), inputs.device, inputs.processes.mapped
    options = prompts, device, sampling, max_len, None, inputs.settings.measuring.seed, spread
    (scoring,) = spread(lambda prompt: step_costs(prompt, target, sampling, device, longest, REPEATS), prompts[:1])
    if inputs.settings.decoding.acceptance is not None:  # Guesses are accepted whatever p and q are.
        return {"alpha": None, "scoring": scoring, "overlap_by_position": []}
    guessing = partial(specSampling, target=target, drafter=drafter, verify=verify)
    for_alpha, by_position = (overlaps_of(partial(guessing, gamma=Fixed(n)), *options) for n in (ALPHA_GAMMA, longest))
    alpha = expectations(for_alpha["overlap_by_position"])["overlap"]
    return {"alpha": alpha, "scoring": scoring, "overlap_by_position": by_position["overlap_by_position"]}


def step_costs(
    prompt: list[int],
    target: CachedModel,
    sampling: Sampling,
    device: str,
    gamma: int,
    repeats: int,
    rows: int = 1,
    drafts: Sequence[Any] = (),
) -> list[float]:
    """[v_1, v_2, ..., v_(gamma + 1)]: the cost of one forward of the target over m tokens in each of `rows` rows,
    including their distributions, in units of the cost for one token in each row. After these, the cost of one forward
    of each of `drafts` over one token in each row.

    Medians of paired ratios; the widths are timed interleaved. The paper assumes that all v are 1.
    """
    steps = [(target, width) for width in range(1, gamma + 2)] + [(model, 1) for model in drafts]
    start, tokens = len(prompt), torch.tensor([(prompt * (gamma + 1))[: gamma + 1]] * rows, device=device)
    for model in dict.fromkeys(model.cache_of or model for model, _ in steps):
        model.reserve(rows, start + gamma + 1)
        model.forward(torch.tensor([prompt] * rows, device=device), torch.arange(start, device=device).repeat(rows, 1))

    def scored(model: CachedModel, width: int) -> Callable[[], None]:
        """A forward, its distributions, and a host sync, as each round has one."""
        seen = torch.zeros(rows, model.vocabulary, dtype=torch.bool, device=device)
        block, at = tokens[:, :width].contiguous(), torch.arange(start, start + width, device=device).repeat(rows, 1)

        def step() -> None:
            model.probabilities(model.forward(block, at), sampling, seen_after(seen.clone(), block))[0, -1, 0].item()

        return step

    timed = time_steps({number: scored(*step) for number, step in enumerate(steps)}, range(repeats), 0, device)
    seconds = np.array(list(timed.values()))
    return np.median(seconds / seconds[0], axis=1).tolist()


def measure_batches(
    inputs: Inputs,
    prompts: list[list[int]],
    methods: Mapping[str, Timed],
    target: CachedModel,
    drafter: Drafter,
    sampling: Sampling,
    conditions: Conditions,
    append: Append,
) -> None:
    """Measure the whole map, batch by batch. methods: those of `samplers`, whose texts have no end but `maxLen`. The
    prompts are used cyclically, each text with a seed of its own."""
    gamma, drafts, device = max(BATCH_GAMMAS), drafter.models[:1], inputs.device
    seed, repeats = inputs.settings.measuring.seed, inputs.settings.measuring.repeats_of("sweep")
    with Bar("batches", len(BATCHES) * len(methods) * repeats) as bar:
        for batch in BATCHES:
            costs = step_costs(prompts[0], target, sampling, device, gamma, BATCH_REPEATS, batch, drafts)
            line = {"batch": batch, "scoring": costs[: gamma + 1], "drafting": costs[-1] if drafts else 0.0}
            append(cast(BatchCostsLine, {"kind": "costs", "of": "batch", **conditions, **line}))
            texts = list(itertools.islice(itertools.cycle(prompts), max(FEWEST, TEXTS * batch)))
            for _, queue in time_texts(methods, texts, repeats, seed, device, batch, warm_up=1):
                append(cast(QueueLine, {"kind": "queue", **conditions, **(queue or {})}))
                bar.update()
