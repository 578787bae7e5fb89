"""The speed of speculative decoding over gamma (`--sweep`) and over texts decoded together (`--sweep batch`), beside
what theory.py predicts.

A cell of the map of batch and gamma is one queue of texts: throughput is all its tokens over its time, prefill
included. Beside it stands the costAware rule, which chooses gamma itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
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
REPEATS = 13  # of each step whose cost is measured


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
    longest, spread, chance = max(GAMMAS), inputs.processes.mapped, inputs.settings.decoding.acceptance
    options = prompts, inputs.device, sampling, max_len, inputs.settings.measuring.seed, spread
    (costs,) = spread(lambda prompt: step_costs(prompt, target, drafter, sampling, longest), prompts[:1])
    guessing = partial(specSampling, target=target, drafter=drafter, verify=verify)
    positions = overlaps_of(partial(guessing, gamma=Fixed(longest)), *options)["overlap_by_position"]
    if chance is not None:  # A guess is accepted with this probability, whatever p and q are.
        positions = [[reached, tested, chance * tested] for reached, tested, _ in positions]
        return {"alpha": None, "overlap_by_position": positions, **costs}
    for_alpha = overlaps_of(partial(guessing, gamma=Fixed(ALPHA_GAMMA)), *options)["overlap_by_position"]
    return {"alpha": expectations(for_alpha)["overlap"], "overlap_by_position": positions, **costs}


def step_costs(
    prompt: list[int], target: CachedModel, drafter: Drafter, sampling: Sampling, gamma: int, rows: int = 1
) -> dict[str, Any]:
    """{"scoring": [v_1, v_2, ..., v_(gamma + 1)], "drafting": c}.

    v_m: the cost of one forward of the target over m tokens in each of `rows` rows, including their distributions, in
    units of the cost for one token in each row. c: that of the draft's over one token; 0 without a draft model.

    Medians of paired ratios; the widths are timed interleaved. The paper assumes that all v are 1.
    """
    steps = [(target, width) for width in range(1, gamma + 2)]
    steps += [(cast(CachedModel, model), 1) for model in drafter.models[:1]]
    # The positions after the prompt must be within every context.
    prompt = prompt[: min(model.context for model, _ in steps) - gamma - 1]
    start, tokens = len(prompt), torch.tensor([(prompt * (gamma + 1))[: gamma + 1]] * rows)
    for model in dict.fromkeys(model.cache_of or model for model, _ in steps):
        model.reserve(rows, start + gamma + 1)
        at = torch.arange(start, device=model.device).repeat(rows, 1)
        model.forward(torch.tensor([prompt] * rows, device=model.device), at)

    def scored(model: CachedModel, width: int) -> Callable[[], None]:
        """A forward, its distributions, and a host sync, as each round has one."""
        seen = torch.zeros(rows, model.vocabulary, dtype=torch.bool, device=model.device)
        block = tokens[:, :width].to(model.device).contiguous()
        at = torch.arange(start, start + width, device=model.device).repeat(rows, 1)

        def step() -> None:
            model.probabilities(model.forward(block, at), sampling, seen_after(seen.clone(), block))[0, -1, 0].item()

        return step

    timed = time_steps({number: scored(*step) for number, step in enumerate(steps)}, range(REPEATS), target.device)
    seconds = np.array(list(timed.values()))
    costs = np.median(seconds / seconds[0], axis=1).tolist()
    return {"scoring": costs[: gamma + 1], "drafting": costs[gamma + 1] if drafter.models else 0.0}


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
    seed, repeats = inputs.settings.measuring.seed, inputs.settings.measuring.repeats_of("sweep")
    with Bar("batches", len(BATCHES) * len(methods) * repeats) as bar:
        for batch in BATCHES:
            costs = step_costs(prompts[0], target, drafter, sampling, max(BATCH_GAMMAS), batch)
            append(cast(BatchCostsLine, {"kind": "costs", "of": "batch", **conditions, "batch": batch, **costs}))
            texts = list(itertools.islice(itertools.cycle(prompts), max(FEWEST, TEXTS * batch)))
            for _, queue in time_texts(methods, texts, repeats, seed, inputs.device, batch, warm_up=1):
                append(cast(QueueLine, {"kind": "queue", **conditions, **(queue or {})}))
                bar.update()
