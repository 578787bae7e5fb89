"""Speed over gamma, beside what theory expects of the alpha and the costs measured in the same run."""

import itertools
import time

import numpy as np
import torch

from decoding.draftLength import Fixed
from experiments.measure import theory
from experiments.speed import interval, paired_ratios, quiet, summarize
from methods.catalogue import loop
from specSampling import specSampling
from utils import probabilities, seen_after

GAMMAS = range(1, 11)


def samplers(target, drafter, verify):
    """{"gamma 1": ..., ...}: speculative sampling for each of GAMMAS."""
    return {f"gamma {gamma}": loop(target, drafter, Fixed(gamma), verify) for gamma in GAMMAS}


def costs(prompts, target, drafter, sampling, verify, max_len, seed, device):
    """What theory needs beside the timed texts: {"alpha": by overlap, "scoring": [v_1, v_2, ...]}."""
    return {
        "alpha": overlap_alpha(prompts, target, drafter, sampling, verify, max_len, seed),
        "scoring": scoring_costs(prompts[0], target, sampling, device),
    }


def overlap_alpha(prompts, target, drafter, sampling, verify, max_len, seed):
    """Acceptance rate as the mean of `theory.overlap(p, q)` over the contexts in which a guess was tested: less noisy
    than counting, since a context counts with its probability, not with what the dice said."""
    found = []

    def watched(p, q, drafts, u):
        accepted, token = verify(p, q, drafts, u)
        found.append(theory.overlap(p[0, : q.shape[1]], q[0])[: int(accepted[0]) + 1].double())
        return accepted, token

    watched.waits = True  # for the number of contexts
    generator = torch.Generator(device=target.device).manual_seed(seed)
    for prompt in prompts:
        specSampling([prompt], target, drafter, max_len, 4, sampling, generator=generator, verify=watched)
    return torch.cat(found).mean().item() if found else float("nan")


@torch.inference_mode()
def scoring_costs(prompt, target, sampling, device, repeats=15):
    """[v_1, v_2, ...]: what it costs the target to read m tokens at once, their distributions included, in units of one
    token; interleaved, as medians of paired ratios. The paper takes all of them for 1."""
    widths = range(1, max(GAMMAS) + 2)
    start, tokens = len(prompt), torch.tensor([(prompt * len(widths))[: len(widths)]], device=device)
    target.reserve(1, start + len(widths))
    target.forward(torch.tensor([prompt], device=device), torch.arange(start, device=device)[None])
    seen = torch.zeros(1, target.vocabulary, dtype=torch.bool, device=device)
    seconds = np.zeros((repeats, len(widths)))
    with quiet(device):
        for repeat, (at, width) in itertools.product(range(repeats), enumerate(widths)):
            begin, block = time.perf_counter(), tokens[:, :width].contiguous()
            logits = target.forward(block, torch.arange(start, start + width, device=device)[None])
            p = probabilities(logits, sampling, seen_after(seen, block))
            p[0, -1, 0].item()  # the host waits for it, as it does once a round
            seconds[repeat, at] = time.perf_counter() - begin
    seconds = seconds[2:]
    return np.median(seconds / seconds[:, :1], axis=0).tolist()


def predict(lines, costs):
    """One row for each gamma: the measured figures of `speed.summarize` and, beside them, "paper": the improvement of
    the paper's theorem 3.8; "theory": the same with the measured cost of scoring. Of the lines of one temperature."""
    rows = {row["method"]: row for row in summarize(lines)}
    c = interval(paired_ratios(lines, "draft", "target", "tpot"))[0] if "draft" in rows else 0.0  # lookup is free
    counts = [pair for m in lines if m["method"].startswith("gamma") for pair in m["acceptance_by_position"]]
    tested, passed = (sum(column) for column in zip(*counts or [(0, 0)]))
    alpha = passed / tested if tested else float("nan")
    found = []
    for gamma in (gamma for gamma in GAMMAS if f"gamma {gamma}" in rows):  # all, but in a run that was stopped
        row = rows[f"gamma {gamma}"]
        found.append(
            row
            | {
                "gamma": gamma,
                "paper": theory.improvement(alpha, gamma, c),
                "theory": theory.improvement(alpha, gamma, c, costs["scoring"][gamma]),
            }
        )
    return {"alpha": alpha, "c": c, "rows": found, "plain": rows["target"], "best": theory.best_gamma(alpha, c)}
