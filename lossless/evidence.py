"""The proof of losslessness: are a sampler's tokens distributed as the target's own?

Given the text before it, an exact sampler draws each token x from p, and p can be computed once the text is there: the
target reads all of it again, without a cache. Two sums over the tokens then have distributions that are known exactly,
whatever the models are:

- PIT (probability integral transform; Rosenblatt 1952): u = F(x-) + v p(x), with v uniform and F summed over the
  vocabulary in any order that depends on the context alone, is uniform on [0, 1) and independent from token to token.
  The order here is by q / p, so that a leak of the draft crowds u at the right end.
- Surprise: -log p(x) has the mean H, p's entropy, and a variance that p gives too. The differences from the mean are a
  martingale, so that their sum over its standard deviation is a standard normal z (Brown 1971).

Greedy decoding has no chance in it: each token is compared with the target's argmax.
"""

from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from scipy.stats import chisquare, kstest, norm

import utils
from utils import Sampling, seen_after

BINS = 50
FALSE_ALARM = 1e-3  # probability that a run of exact samplers raises any alarm, all its tests together
ELEMENTS = 1 << 24  # probabilities looked at in one go: 64 MB a tensor
TESTS = {
    "chi_square": "chi-square",
    "kolmogorov_smirnov": "Kolmogorov-Smirnov",
    "surprise": "surprise",
    "neighbours": "independence",
    "impossible": "impossible tokens",
}


@dataclass
class Evidence:
    """What the tokens of some texts say of their sampler: float64 arrays `[texts, tokens]`.

    u: see above; nan where p(x) is 0. surprise: -log p(x) in nats; entropy, variance: its mean and variance under p.
    impossible: 1 where p(x) is 0 by more than rounding, else 0.
    """

    u: np.ndarray
    surprise: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray
    impossible: np.ndarray

    def __add__(self, other):
        return Evidence(*(np.concatenate(pair) for pair in zip(astuple(self), astuple(other))))

    def figures(self):
        """What a line of results holds: counts, p-values by test, perplexities."""
        kept = ~np.isnan(self.u)
        counts = np.histogram(self.u[kept], BINS, (0, 1))[0]
        z = ratio((self.surprise - self.entropy)[kept].sum(), self.variance[kept].sum())
        p = {
            "chi_square": chisquare(counts).pvalue if counts.mean() >= 5 else 1.0,  # fewer a bin are no chi-square
            "kolmogorov_smirnov": kstest(self.u[kept], "uniform").pvalue if kept.any() else 1.0,
            "surprise": 2 * norm.sf(abs(z)),
            "neighbours": 2 * norm.sf(abs(self.neighbours())),
        }
        return {
            "texts": len(self.u),
            "tokens": self.u.size,
            "excluded": int((~kept & (self.impossible == 0)).sum()),
            "impossible": int(self.impossible.sum()),
            "counts": counts.tolist(),
            "p": {name: float(value) for name, value in p.items()},
            "z": z,
            "perplexity": float(np.exp(self.surprise[kept].mean())) if kept.any() else float("nan"),
            "expected_perplexity": float(np.exp(self.entropy[kept].mean())) if kept.any() else float("nan"),
        }

    def neighbours(self):
        """z of the correlation of u with the next token's in the text, and with the same token's in the next text: the
        products of independent centred numbers are uncorrelated, and each has variance 1/144."""
        centred = np.nan_to_num(self.u - 0.5)
        products = (centred[:, 1:] * centred[:, :-1]).sum() + (centred[1:] * centred[:-1]).sum()
        return ratio(12 * products, centred[:, 1:].size + centred[1:].size)


def ratio(total, variance):
    """A sum over its standard deviation; 0 where nothing varies."""
    return float(total / variance**0.5) if variance > 0 else 0.0


def seen_by(figures, limit):
    """Names of the tests that tell the sampler from the target: a p-value below `limit`, or a token that the target
    gives no probability."""
    return [name for name, p in figures["p"].items() if p < limit] + ["impossible"] * (figures["impossible"] > 0)


def limit_of(methods):
    """The p-value below which one test of a run on so many methods says no (Bonferroni)."""
    return FALSE_ALARM / (methods * (len(TESTS) - 1))


class Witness:
    """Recomputes p, teacher-forced.

    target: a `CachedModel`, whose `score` uses no cache: a stale slot in the sampler's shows. order: the model whose
    probabilities are q in the order of the vocabulary; None: the most probable tokens come last.
    """

    def __init__(self, target, order, sampling, seed=0):
        self.target, self.order, self.sampling = target, order, sampling
        self.random = np.random.default_rng(seed)

    @torch.inference_mode()
    def evidence(self, prompts, texts):
        """`Evidence` of `texts`, equally many tokens each, that a sampler wrote after `prompts` (lists of ids)."""
        length = max(map(len, prompts)) + len(texts[0])
        rows = max(1, ELEMENTS // (length * self.target.vocabulary))
        parts = [self.some(prompts[i : i + rows], texts[i : i + rows]) for i in range(0, len(texts), rows)]
        return sum(parts[1:], parts[0])

    def some(self, prompts, texts):
        block, at, x, seen = self.blocks(prompts, texts)
        logits = at_places(self.target.score(block), at)
        p = distribution(logits, self.sampling, seen)
        if self.order is None:
            order = 1 / p
        else:
            order = distribution(at_places(self.order.score(block), at), self.sampling, seen) / p
        p_x, order_x = p.gather(-1, x), order.gather(-1, x)
        # Nothing is sorted: what stands before x is summed. Of equals the one with the smaller id comes first.
        before = order < order_x
        before |= (order == order_x) & (torch.arange(p.shape[-1], device=p.device) < x)
        u = (p * before).sum(-1)
        u += torch.as_tensor(self.random.random(u.shape), device=p.device, dtype=p.dtype) * p_x[..., 0]
        log = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        entropy = -(p * log).sum(-1)
        variance = (p * (log + entropy[..., None]) ** 2).sum(-1)
        lost = p_x[..., 0] == 0
        impossible = torch.zeros_like(lost)
        if lost.any():
            impossible[lost] = ~self.at_the_edge(logits[lost], x[lost], None if seen is None else seen[lost])
        u = u.clamp(0, 1 - 1e-7).masked_fill(lost, torch.nan)
        fields = u, -log.gather(-1, x)[..., 0], entropy, variance, impossible
        return Evidence(*(field.double().cpu().numpy() for field in fields))

    def blocks(self, prompts, texts):
        """Prompts and texts, shorter ones filled up at the right; where to read each text's logits; its tokens; and
        what stood before each of them, where the sampling asks."""
        device, count = self.target.device, len(texts[0])
        whole = [[*prompt, *text] for prompt, text in zip(prompts, texts)]
        longest = max(map(len, whole))
        block = torch.tensor([row + row[-1:] * (longest - len(row)) for row in whole], device=device)[:, :-1]
        at = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)[:, None]
        at = (at + torch.arange(count, device=device))[..., None]
        seen = None
        if self.sampling.repetition_penalty != 1:
            none = torch.zeros(len(whole), self.target.vocabulary, dtype=torch.bool, device=device)
            seen = at_places(seen_after(none, block), at)
        return block, at, torch.tensor(texts, device=device)[..., None], seen

    def at_the_edge(self, logits, x, seen):
        """Whether top-k and top-p would keep x, had rounding favoured it: `logits[N, V]`, `x[N, 1]` -> bool `[N]`.

        A logit's rounding d changes the share s of the tokens above the cut by at most s (1 - s) d."""
        d = rounding(self.target, logits)
        raised = logits.scatter_add(-1, x, d)
        top_p, heat = self.sampling.top_p, self.sampling.temperature or 1
        kept = []
        for i in range(len(x)):
            wider = replace(self.sampling, top_p=min(1.0, top_p + top_p * (1 - top_p) * float(d[i]) / heat))
            kept.append(distribution(raised[i], wider, None if seen is None else seen[i])[x[i, 0]] > 0)
        return torch.stack(kept)

    @torch.inference_mode()
    def gaps(self, prompts, texts):
        """How far each token is from being the target's choice: its logit below the largest, 0 for the argmax itself
        and for its equals, and how much of that may be rounding; two tensors `[texts, tokens]`. The third, bool: the
        token is the argmax."""
        found = []
        for prompt, text in zip(prompts, texts):
            block, at, x, seen = self.blocks([prompt], [text])
            logits = at_places(self.target.score(block), at)
            penalty = Sampling(1.0, 0, 1.0, self.sampling.repetition_penalty)
            scores = distribution(logits, penalty, seen).log()  # logits after the penalty, less a constant
            gap = scores.amax(-1) - scores.gather(-1, x)[..., 0]
            found.append((gap, rounding(self.target, logits)[..., 0], scores.argmax(-1) == x[..., 0]))
        return tuple(torch.cat(each).cpu() for each in zip(*found))


def distribution(logits, sampling, seen):
    """`utils.probabilities` without the kernels of `--compile`: those are part of what is tested."""
    kernels, utils.kernels = utils.kernels, None
    try:
        return utils.probabilities(logits, sampling, seen)
    finally:
        utils.kernels = kernels


def at_places(tensor, at):
    """`tensor[B, n, V]` at the places `at[B, m, 1]`."""
    return tensor.gather(1, at.expand(-1, -1, tensor.shape[-1]))


def rounding(model, logits):
    """How far the difference of two logits may lie from another computation of it in the model's dtype, `[..., 1]`.

    The residual stream of a model of L layers is a sum of 2 L parts, each of which is rounded by the dtype's unit
    roundoff, and computed from sums of d products in float32, whose error grows as sqrt(d); independent errors add as
    their squares do. Relative to a logit such an error is as large as the logits' own spread over the vocabulary. That
    is a standard deviation (measured: 0.04 to 0.93 of it), but for a few large numbers that make its tails heavy
    (measured: up to 6.6 of it): 8 of them are allowed.
    """
    config = model.model.config.get_text_config()
    unit, accumulated = (torch.finfo(dtype).eps / 2 for dtype in (model.dtype, torch.float32))
    relative = (2 * config.num_hidden_layers) ** 0.5 * (unit + config.hidden_size**0.5 * accumulated)
    return 8 * relative * logits.std(-1, keepdim=True)


def greedy_figures(texts, plain, prompts, witness):
    """What a line of results holds of greedy texts beside plain decoding's (`plain`): how many differ, how many tokens
    are not the argmax of the text read whole but within rounding of it, and how many beyond it. Where a text first
    differs the context is the same: plain decoding's token is put to the same test there."""
    gap, limit, is_argmax = witness.gaps(prompts, texts)
    beyond = gap > limit
    forks, far = 0, 0
    for prompt, ours, theirs in zip(prompts, texts, plain):
        if ours != theirs:
            fork = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
            other, allowed, _ = witness.gaps([prompt], [theirs[: fork + 1]])
            forks, far = forks + 1, far + int(other[0, -1] > allowed[0, -1])
    return {
        "texts": len(texts),
        "tokens": gap.numel(),
        "differing": forks,
        "near_ties": int((~is_argmax & ~beyond).sum()),
        "beyond": int(beyond.sum()) + far,
        "largest_gap": float(gap.max()),
        "allowed": float(limit.max()),
    }
