"""Timing samplers side by side: interleaved, repeated, with intervals.

TTFT: from the call to the first token on the host. TPOT: (t_last - t_first) / (n - 1). Throughput: n / t_last. The
report divides otherwise: its time per token is total / n, the prompt's reading included; it is kept beside them.
"""

import gc
import hashlib
from contextlib import contextmanager

import numpy as np
import torch
from scipy.stats import bootstrap


@contextmanager
def quiet(device):
    """A timed stretch: no garbage collection inside, the device's queue empty at both ends."""
    gc.collect()
    gc.disable()
    try:
        synchronize(device)
        yield
        synchronize(device)
    finally:
        gc.enable()


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def digest(tokens):
    """16 hexadecimal digits that stand for token ids, or for texts."""
    return hashlib.sha256(repr(tokens).encode(errors="surrogatepass")).hexdigest()[:16]


def measure(methods, prompts, repeats, seed, device, warm_up=2):
    """Time every method on every prompt, `repeats` times, interleaved (A B C A B C ...).

    methods: {name: f(prompt, generator) -> (tokens, records)}, f continuing the one prompt it is given.
    Yields one dictionary a measurement, in seconds and tokens per second. The generator's seed depends on prompt and
    repeat alone, so a method's tokens do not depend on which others run. `warm_up` calls of each come first, uncounted.
    """
    for _ in range(warm_up):
        for method in methods.values():
            method(prompts[0], torch.Generator(device).manual_seed(seed))
    gc.collect()
    gc.freeze()  # else every collection between two measurements walks all of torch's objects, a quarter of a second
    try:
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                for name, method in methods.items():
                    generator = torch.Generator(device).manual_seed(seed + 1_000_003 * repeat + index)
                    with quiet(device):
                        (tokens,), (record,) = method(prompt, generator)
                    yield {
                        "method": name,
                        "prompt": index,
                        "repeat": repeat,
                        "prompt_tokens": len(prompt),
                        "tokens": record.tokens,
                        "ttft": record.ttft,
                        "tpot": record.tpot,
                        "throughput": record.throughput,
                        "report_tpot": record.times[-1] / record.tokens,
                        "tokens_per_round": record.tokens_per_round,
                        "seconds": record.times[-1],
                        "rounds": len(record.times) - 1,
                        "drafted": sum(record.drafted),
                        "accepted": sum(record.accepted),
                        "acceptance_by_position": record.acceptance_by_position,
                        "input": digest(prompt),
                        "sha256": digest(tokens),
                    }
    finally:
        gc.unfreeze()


def interval(values, statistic=np.median, seed=0):
    """Median (or another statistic) of `values` and its 95 % bootstrap interval by percentiles: (median, low, high).
    nan values are left out; the interval of fewer than two is nan."""
    values = np.asarray(values, dtype=float)
    values = values[~np.isnan(values)]
    if not len(values):
        return (float("nan"),) * 3
    middle = float(statistic(values))
    if len(values) < 2 or np.ptp(values) == 0:
        return middle, *((middle,) * 2 if len(values) > 1 else (float("nan"),) * 2)
    found = bootstrap(
        (values,), statistic, method="percentile", n_resamples=2000, rng=np.random.default_rng(seed)
    ).confidence_interval
    return middle, float(found.low), float(found.high)


def paired_ratios(measurements, method, baseline, figure="throughput"):
    """`method`'s figure over `baseline`'s for each prompt and repeat that both have (a single token has no TPOT)."""
    tables = [
        {(m["prompt"], m["repeat"]): m[figure] for m in measurements if m["method"] == name and m[figure] is not None}
        for name in (method, baseline)
    ]
    return [tables[0][key] / tables[1][key] for key in tables[0] if key in tables[1]]


def summarize(measurements, baseline="target"):
    """One row of figures for each method, in order: medians with intervals over prompts and repeats, and the speed-up
    over `baseline` as the median of paired throughput ratios."""
    rows = []
    for name in dict.fromkeys(m["method"] for m in measurements):
        own = [m for m in measurements if m["method"] == name]
        counts = [m["acceptance_by_position"] for m in own]
        width = max(map(len, counts))
        tested, passed = (np.array([sum(c[i][j] for c in counts if i < len(c)) for i in range(width)]) for j in (0, 1))
        rows.append(
            {
                "method": name,
                "runs": len(own),
                **{
                    figure: interval([m[figure] for m in own])
                    for figure in ("ttft", "tpot", "throughput", "report_tpot", "tokens_per_round", "seconds")
                },
                **{figure: np.mean([m[figure] for m in own]) for figure in ("rounds", "drafted", "accepted")},
                "speedup": interval(paired_ratios(measurements, name, baseline)),
                "alpha": passed.sum() / tested.sum() if width else float("nan"),
                "acceptance_by_position": [float(a / t) for t, a in zip(tested, passed) if t],
            }
        )
    return rows
