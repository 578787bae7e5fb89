"""Speed over gamma (`--sweep`), and over the number of texts that are decoded together too (`--sweep batch`), with the
costs from which theory predicts it.

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

from decoding.drafter import Drafter
from decoding.lengthRules import CostAware, Fixed, LengthRule
from decoding.model import Model
from decoding.verification import VerificationRule
from engine.cachedModel import CachedModel
from experiments.acceptance import expectations, expected_chain, improvement, overlaps_of
from experiments.intervals import interval, speedup, summarize, tested_and_passed
from experiments.loading import Inputs
from experiments.schema import Append, BatchCostsLine, Conditions, CostsLine, Line, QueueLine, TimedText, of_kind
from experiments.settings import BATCHES
from experiments.speed import Timed, time_steps, time_texts
from inputs.progress import Bar
from methods.samplers import Sampler
from regrSampling import regrSampling
from specSampling import specSampling
from utils import Sampling, seen_after

GAMMAS, BATCH_GAMMAS = range(1, 11), (1, 2, 3, 4, 6, 8)
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
    guessing = partial(specSampling, target=target, drafter=drafter, verify=verify)
    for_alpha, by_position = (overlaps_of(partial(guessing, gamma=Fixed(n)), *options) for n in (ALPHA_GAMMA, longest))
    alpha = expectations(for_alpha["overlap_by_position"])["overlap"]
    return {"alpha": alpha, "scoring": scoring, "overlap_by_position": by_position["overlap_by_position"]}


@torch.inference_mode()
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


def predict(texts: Sequence[TimedText], costs: CostsLine) -> dict[str, Any]:
    """The measurements at one temperature, and the predictions of theory.

    "rows": for each gamma the measured figures of `intervals.summarize`, with "paper", the speed-up by the paper's
    theorem 3.8, and "theory", the same with the measured cost of scoring; "expected", the tokens a round that follow
    from the overlaps of p and q (nan where the record has none). "alpha", "c": the inputs of theory. "plain": the
    target alone. "best": the gamma that is best by the paper's theorem.
    """
    by_method = {row["method"]: row for row in summarize(texts)}
    # Without a draft model (lookup) a guess costs nothing.
    c = speedup(texts, "draft", "target", "tpot").middle if "draft" in by_method else 0.0
    tested, passed = map(sum, tested_and_passed([text for text in texts if text["method"].startswith("gamma")]))
    alpha = passed / tested if tested else float("nan")
    rates = [position[2] / position[1] for position in costs.get("overlap_by_position", ())]
    rows = [
        by_method[f"gamma {gamma}"]
        | {
            "gamma": gamma,
            "paper": improvement(alpha, gamma, c),
            "theory": improvement(alpha, gamma, c, costs["scoring"][gamma]),
            "expected": expected_chain(rates[:gamma]) if len(rates) >= gamma else float("nan"),
        }
        for gamma in GAMMAS
        if f"gamma {gamma}" in by_method  # Some are missing in a run that was stopped.
    ]
    best = max(range(33), key=lambda gamma: improvement(alpha, gamma, c))
    return {"alpha": alpha, "c": c, "rows": rows, "plain": by_method["target"], "best": best}


def predict_batches(lines: Sequence[Line]) -> dict[int, dict[str, Any]]:
    """{batch: the measurements, and the predictions of theory}.

    "plain": tokens per second of plain decoding, an `Interval`. "rows": for each other method "gamma", its "speedup"
    over plain decoding of the same batch (median of ratios, repeat by repeat), and "theory": tokens a round over what
    drafting and scoring cost. "best": the fastest cell, "controller": the speed of costAware over it, repeat by repeat.
    """
    predictions: dict[int, dict[str, Any]] = {}
    costs_of = {line["batch"]: line for line in of_kind(lines, BatchCostsLine)}
    queued = of_kind(lines, QueueLine)
    for batch in dict.fromkeys(line["batch"] for line in queued):
        queues = [line for line in queued if line["batch"] == batch]
        by_method: dict[str, list[QueueLine]] = {}
        for line in queues:
            by_method.setdefault(line["method"], []).append(line)
        speeds = {name: interval([line["throughput"] for line in of]) for name, of in by_method.items()}
        rows = []
        for name in [name for name in by_method if name != "target"]:
            tokens, drafted = (
                float(np.mean([line[figure] or 0 for line in by_method[name]]))
                for figure in ("tokens_per_round", "drafted_per_round")
            )
            theory = float("nan")
            if costs := costs_of.get(batch):  # in units of a plain step
                scoring = np.interp(drafted + 1, range(1, len(costs["scoring"]) + 1), costs["scoring"])
                theory = tokens / float(drafted * costs["drafting"] + scoring)
            ratio = speedup(queues, name, "target")
            rows.append({"gamma": name.removeprefix("gamma "), "speedup": ratio, "theory": theory})
        best = max((name for name in speeds if name != "costAware"), key=lambda name: speeds[name].middle)
        share = speedup(queues, "costAware", best)
        predictions[batch] = {"plain": speeds["target"], "rows": rows, "best": best, "controller": share}
    return predictions
