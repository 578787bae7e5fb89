"""The speed of speculative decoding over gamma (`--sweep`) and over texts decoded together (`--sweep batch`), beside
what theory.py predicts.

A cell of the map of batch and gamma is one queue of texts, prompts used cyclically, each text with a seed of its own.
Beside it stands the costAware rule, which chooses gamma itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from decoding.drafter import Drafter, Fixed, LengthRule
from decoding.lengthRules import CostAware
from decoding.model import Model
from decoding.verification import VerificationRule
from engine.cachedModel import CachedModel
from experiments.loading import Inputs
from experiments.speed import time_steps
from experiments.theory import GAMMAS, expectations, overlaps_of
from methods.samplers import Sampler
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling, seen_after

BATCH_GAMMAS = 1, 2, 3, 4, 6, 8
REPEATS = 13  # of each step whose cost is measured


def samplers(target: Model, drafter: Drafter, verify: VerificationRule, batches: bool = False) -> dict[str, Sampler]:
    """{"target": plain decoding, "gamma 1": ..., "gamma 2": ...}: speculative sampling with each fixed gamma; with
    `batches` for BATCH_GAMMAS, and with "costAware"."""
    rules: dict[str, LengthRule] = {f"gamma {n}": Fixed(n) for n in (BATCH_GAMMAS if batches else GAMMAS)}
    rules |= {"costAware": CostAware(max(BATCH_GAMMAS))} if batches else {}
    guessing = partial(specSampling, target=target, drafter=drafter, verify=verify)
    chains = {name: partial(guessing, gamma=rule) for name, rule in rules.items()}
    return {"target": partial(regrSampling, target=target), **chains}


def sweep_costs(
    inputs: Inputs,
    prompts: list[list[int]],
    target: CachedModel,
    drafter: Drafter,
    verify: VerificationRule,
    sampling: Sampling,
    max_len: int,
) -> dict[str, Any]:
    """The costs from which theory predicts speed, and the overlaps in rounds of the longest of GAMMAS: fields of a
    `CostsLine`.

    The ends of texts do not count in the overlaps, since `experiments.theory.expected_in_text` knows them. alpha is the
    mean overlap over the contexts in which a guess was tested, nan if none was. It is less noisy than counting accepted
    guesses: a context counts with its probability of acceptance, not with the outcome of one draw.
    """
    longest, spread, chance = max(GAMMAS), inputs.processes.mapped, inputs.settings.decoding.acceptance
    (costs,) = spread(lambda prompt: step_costs(prompt, target, drafter, sampling, longest), prompts[:1])
    sampler = partial(specSampling, target=target, drafter=drafter, verify=verify, gamma=Fixed(longest))
    options = prompts, inputs.device, sampling, max_len, inputs.settings.measuring.seed, spread
    positions = overlaps_of(sampler, *options, ends=False)["overlap_by_position"]
    if chance is not None:  # A guess is accepted with this probability, whatever p and q are.
        positions = [[reached, tested, chance * tested] for reached, tested, _ in positions]
    alpha = expectations(positions)["overlap"] if chance is None else None
    return {"alpha": alpha, "overlap_by_position": positions, **costs}


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
    start = min(len(prompt), min(model.context for model, _ in steps) - gamma - 1)
    text = torch.tensor([(prompt[:start] * (gamma + 2))[: start + gamma + 1]] * rows)
    # A draft with another tokenizer may have fewer tokens.
    sizes = {model: min(model.vocabulary, model.model.config.get_text_config().vocab_size) for model, _ in steps}

    def block(model: CachedModel, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Tokens that the model can read, `[rows, last - first]`, and their positions."""
        at = torch.arange(first, last, device=model.device).repeat(rows, 1)
        return (text[:, first:last] % sizes[model]).to(model.device), at

    for model in dict.fromkeys(model for model, _ in steps if not model.cache_of):
        model.reserve(rows, start + gamma + 1)
        model.forward(*block(model, 0, start))

    def scored(model: CachedModel, width: int) -> Callable[[], None]:
        """A forward, its distributions, and a host sync, as each round has one."""
        tokens, at = block(model, start, start + width)
        penalised = sampling.repetition_penalty != 1  # Without a penalty decoding does not count what a text holds.
        seen = torch.zeros(rows, sizes[model], dtype=torch.bool, device=model.device) if penalised else None

        def step() -> None:
            held = None if seen is None else seen_after(seen.clone(), tokens)
            model.probabilities(model.forward(tokens, at), sampling, held)[0, -1, 0].item()

        return step

    timed = time_steps({number: scored(*step) for number, step in enumerate(steps)}, range(REPEATS), target.device)
    seconds = np.array(list(timed.values()))
    costs = np.median(seconds / seconds[0], axis=1).tolist()
    return {"scoring": costs[: gamma + 1], "drafting": costs[gamma + 1] if drafter.models else 0.0}
