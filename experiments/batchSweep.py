"""Speed over the number of texts that are decoded together, and over gamma (`test.py --sweep batch`).

A cell of the map is one queue of texts: throughput is all its tokens over its time, prefill included. Beside it stand
the speed that theory predicts from what scoring costs, and the costAware rule, which chooses gamma itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from decoding.drafter import Drafter
from decoding.lengthRules import CostAware, Fixed
from decoding.verification import VerificationRule
from engine.cachedModel import CachedModel
from experiments.intervals import interval
from experiments.schema import Append, BatchCostsLine, Conditions, Line, QueueFigures, QueueLine, of_kind
from experiments.settings import BATCHES
from experiments.speed import Timed, time_texts
from experiments.sweep import scoring_costs
from inputs.progress import Bar
from methods.samplers import Sampler
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling

GAMMAS = (1, 2, 3, 4, 6, 8)
TEXTS = 2  # of a queue, for each row of its batch; FEWEST at least
FEWEST = 4
REPEATS = 9  # of each step whose cost is measured; the first two do not count


def samplers(
    target: CachedModel, drafter: Drafter, verify: VerificationRule, gammas: Sequence[int] = ()
) -> dict[str, Sampler]:
    """{"target": plain decoding, "gamma 1": ..., "costAware": ...}. gammas: none for GAMMAS."""
    gammas = gammas or GAMMAS
    rules = {f"gamma {gamma}": Fixed(gamma) for gamma in gammas} | {"costAware": CostAware(max(gammas))}
    guessing = {
        name: partial(specSampling, target=target, drafter=drafter, gamma=rule, verify=verify)
        for name, rule in rules.items()
    }
    return {"target": partial(regrSampling, target=target), **guessing}


def costs(
    batch: int, prompts: Sequence[list[int]], target: CachedModel, drafter: Drafter, sampling: Sampling, device: str
) -> tuple[list[float], float]:
    """The costs of scoring 1, 2, ... tokens of each row, and of a guess of each row; in units of a plain step."""
    drafts = drafter.models[:1]
    measured = scoring_costs(prompts[0], target, sampling, device, REPEATS, batch, max(GAMMAS), drafts)
    return measured[: max(GAMMAS) + 1], measured[-1] if drafts else 0.0


def measure_batches(
    prompts: Sequence[list[int]],
    methods: Mapping[str, Timed],
    target: CachedModel,
    drafter: Drafter,
    sampling: Sampling,
    conditions: Conditions,
    repeats: int,
    seed: int,
    device: str,
    append: Append,
) -> None:
    """Measure the whole map, batch by batch. methods: those of `samplers`, whose texts have no end but `maxLen`. The
    prompts are used cyclically, each text with a seed of its own."""
    with Bar("batches", len(BATCHES) * len(methods) * repeats) as bar:
        for batch in BATCHES:
            scoring, drafting = costs(batch, prompts, target, drafter, sampling, device)
            line = {"batch": batch, "scoring": scoring, "drafting": drafting}
            append(cast(BatchCostsLine, {"kind": "costs", "of": "batch", **conditions, **line}))
            texts = list(itertools.islice(itertools.cycle(prompts), max(FEWEST, TEXTS * batch)))
            for _, queue in time_texts(methods, texts, repeats, seed, device, batch, warm_up=1):
                append(cast(QueueLine, {"kind": "queue", **conditions, **cast(QueueFigures, queue)}))
                bar.update()


def predict(lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
    """{batch: the measurements, and the predictions of theory}.

    "plain": tokens per second of plain decoding, an `Interval`. "rows": for each other method "gamma", its "speedup"
    over plain decoding of the same batch (median of ratios, repeat by repeat), "throughput", "tokens_per_round", and
    "theory": tokens a round over what drafting and scoring cost. "controller": the speed of costAware over that of the
    best cell, repeat by repeat.
    """
    predictions: dict[int, dict[str, Any]] = {}
    queued, costs_of = of_kind(lines, QueueLine), {line["batch"]: line for line in of_kind(lines, BatchCostsLine)}
    for batch in dict.fromkeys(line["batch"] for line in queued):
        speeds: dict[str, dict[int, QueueLine]] = {}
        for line in queued:
            if line["batch"] == batch:
                speeds.setdefault(line["method"], {})[line["repeat"]] = line
        plain, rows = speeds.pop("target"), []
        for method, repeats in speeds.items():
            pairs = [(line, plain[repeat]) for repeat, line in repeats.items() if repeat in plain]
            tokens, drafted = (
                float(np.mean([line[figure] or 0 for line in repeats.values()]))
                for figure in ("tokens_per_round", "drafted_per_round")
            )
            rows.append(
                {
                    "gamma": method.removeprefix("gamma "),
                    "speedup": interval([line["throughput"] / base["throughput"] for line, base in pairs]),
                    "throughput": interval([line["throughput"] for line in repeats.values()]),
                    "tokens_per_round": tokens,
                    "theory": tokens / cost_of_round(costs_of[batch], drafted) if batch in costs_of else float("nan"),
                }
            )
        fixed = {method: of for method, of in speeds.items() if method.startswith("gamma")} | {"target": plain}
        best = max(fixed, key=lambda method: np.median([line["throughput"] for line in fixed[method].values()]))
        auto = speeds.get("costAware", {})
        shares = {
            name: interval(
                [line["throughput"] / of[repeat]["throughput"] for repeat, line in auto.items() if repeat in of]
            )
            for name, of in (("best", fixed[best]), ("plain", plain))
        }
        predictions[batch] = {
            "plain": interval([line["throughput"] for line in plain.values()]),
            "rows": rows,
            "best": best,
            "controller": shares,
        }
    return predictions


def cost_of_round(line: BatchCostsLine, drafted: float) -> float:
    """The cost of a round with `drafted` guesses in each row, in units of a plain step."""
    return drafted * line["drafting"] + float(
        np.interp(drafted + 1, range(1, len(line["scoring"]) + 1), line["scoring"])
    )
