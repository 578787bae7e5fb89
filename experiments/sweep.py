"""Speed over gamma, and the speed that theory predicts from the alpha and the costs measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from decoding.drafter import Drafter
from decoding.lengthRules import Fixed
from decoding.model import Model
from decoding.verification import VerificationRule
from engine.cachedModel import CachedModel
from experiments import theory
from experiments.acceptance import expected, overlaps_of
from experiments.intervals import interval, paired_ratios, summarize
from experiments.schema import SweepCosts, TimedText
from experiments.speed import time_steps
from methods.samplers import Sampler
from specSampling import specSampling
from utils import Sampling, seen_after

GAMMAS = range(1, 11)
ALPHA_GAMMA = 4


def sampler(target: Model, drafter: Drafter, gamma: int, verify: VerificationRule) -> Sampler:
    """Speculative sampling with a fixed number of guesses."""
    return partial(specSampling, target=target, drafter=drafter, gamma=Fixed(gamma), verify=verify)


def samplers(target: Model, drafter: Drafter, verify: VerificationRule) -> dict[str, Sampler]:
    """{"gamma 1": ..., "gamma 2": ..., ...}: speculative sampling for each of GAMMAS."""
    return {f"gamma {gamma}": sampler(target, drafter, gamma, verify) for gamma in GAMMAS}


def costs(
    prompts: Sequence[list[int]],
    target: CachedModel,
    drafter: Drafter,
    sampling: Sampling,
    verify: VerificationRule,
    max_len: int,
    seed: int,
    device: str,
    spread: Callable[..., Iterable[Any]] = map,
) -> SweepCosts:
    """The costs and the alpha from which theory predicts speed. spread: applies a function to each item, as the builtin
    `map`.

    alpha is the mean overlap of p and q over the contexts in which a guess was tested, with ALPHA_GAMMA guesses in a
    round; nan if none was. It is less noisy than counting accepted guesses: a context counts with its probability of
    acceptance, not with the outcome of one draw. The overlaps by position need rounds as long as the longest of GAMMAS.
    Such rounds visit other contexts, where the mean overlap is another, so alpha comes from texts of its own.
    """
    (scoring,) = spread(lambda prompt: scoring_costs(prompt, target, sampling, device), prompts[:1])
    for_alpha, by_position = (
        overlaps_of(
            sampler(target, drafter, gamma, verify), prompts, device, sampling, max_len, None, seed, spread
        ).positions
        for gamma in (ALPHA_GAMMA, max(GAMMAS))
    )
    return {"alpha": expected(for_alpha)["overlap"], "scoring": scoring, "overlap_by_position": by_position}


@torch.inference_mode()
def scoring_costs(
    prompt: list[int],
    target: CachedModel,
    sampling: Sampling,
    device: str,
    repeats: int = 13,
    rows: int = 1,
    gamma: int | None = None,
    drafts: Sequence[Any] = (),
) -> list[float]:
    """[v_1, v_2, ...]: the cost of one forward of the target over m tokens in each of `rows` rows, including their
    distributions, in units of the cost for one token in each row. m is at most gamma + 1; None: the longest of GAMMAS.

    After these, the cost of one forward of each of `drafts` over one token in each row.
    Medians of paired ratios; the widths are timed interleaved. The paper assumes that all v are 1.
    """
    gamma = gamma or max(GAMMAS)
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


def predict(texts: Sequence[TimedText], costs: SweepCosts) -> dict[str, Any]:
    """The measurements at one temperature, and the predictions of theory.

    "rows": for each gamma the measured figures of `intervals.summarize`, with "paper", the speed-up by the paper's
    theorem 3.8, and "theory", the same with the measured cost of scoring; "expected", the tokens a round that follow
    from the overlaps of p and q (nan where the record has none). "alpha", "c": the inputs of theory. "plain": the
    target alone. "best": the gamma that is best by the paper's theorem.
    """
    by_method = {row["method"]: row for row in summarize(texts)}
    # Without a draft model (lookup) a guess costs nothing.
    c = interval(paired_ratios(texts, "draft", "target", "tpot"))[0] if "draft" in by_method else 0.0
    counts = [pair for text in texts if text["method"].startswith("gamma") for pair in text["acceptance_by_position"]]
    tested, passed = (sum(column) for column in zip(*counts or [(0, 0)]))
    alpha = passed / tested if tested else float("nan")
    rates = [position[2] / position[1] for position in costs.get("overlap_by_position", ())]
    rows = [
        by_method[f"gamma {gamma}"]
        | {
            "gamma": gamma,
            "paper": theory.improvement(alpha, gamma, c),
            "theory": theory.improvement(alpha, gamma, c, costs["scoring"][gamma]),
            "expected": theory.expected_chain(rates[:gamma]) if len(rates) >= gamma else float("nan"),
        }
        for gamma in GAMMAS
        if f"gamma {gamma}" in by_method  # Some are missing in a run that was stopped.
    ]
    return {"alpha": alpha, "c": c, "rows": rows, "plain": by_method["target"], "best": theory.best_gamma(alpha, c)}
