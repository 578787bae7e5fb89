"""`Evidence`: statistics that show whether a sampler's tokens are distributed as the target's own.

Given the text before it, an exact sampler draws each token x from p, the target's distribution. Once a text is
written, p can be computed again (lossless/scorer.py). The distributions of two statistics are then known exactly, for
any models:

- PIT (probability integral transform; Rosenblatt 1952). Let F be the cumulative sum of p over the vocabulary, in any
  order that depends on the context alone, and v uniform on [0, 1). Then u = F(x-) + v p(x) is uniform on [0, 1), and
  independent from token to token. The order here is by q / p: if the draft's distribution leaks into the text, u is too
  often near 1.
- Surprise. The mean of -log p(x) is H, the entropy of p, and all its moments follow from p too. The differences from
  the mean are a martingale.
- Guesses. Let x be a guess that is drawn after the same text and independently of the token. The token is x with
  probability p(x), whatever drew x and whatever its reported distribution. So the number of tokens that are the
  guess, minus the sum of p(x), is a martingale too. It grows if the drafter's guesses leak into the text.

The p-value of such a sum T is Chernoff's bound, 2 exp(min_s(K(s) - s T)), where K(s) is the log of E exp(s T). It is at
least the probability of so large a sum, also of few tokens, whose T over its standard deviation is far from normal if a
rare token or a rare guess decides. It is at most some ten times that probability where limits usually lie.
(The variance of T is taken as fixed: s is the best one for the contexts that there are.)

Greedy decoding draws nothing. There each token is compared with the target's argmax (`scorer.greedy_figures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import chisquare, kstest, norm

from experiments.schema import EvidenceFigures

BINS = 50
LISTED = 20  # tokens that are listed with their places
# The share of impossible tokens that is put down to the tokenizer, where texts came without token ids: an engine that
# samples may write the letters of a word in other tokens. On the bundled pair 0.1 % of the tokens become impossible.
RETOKENISED = 0.02
TILTS = (-1.0, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1.0)  # of the distributions of the surprise
SEEN = 0.9  # The power is that of departures that are seen with this probability.
CONFIDENCE = 0.95  # of `lossless.audit.variation_of`
UNLIKELY = 1e-9  # Rounding does not put more tokens outside of a filter, nor more beside the argmax, if so unlikely.
FALSE_ALARM = 1e-3  # Probability, at most, that all tests of a run of exact samplers, taken together, raise any alarm.
TESTS = {
    "chi_square": "chi-square",
    "kolmogorov_smirnov": "Kolmogorov-Smirnov",
    "surprise": "surprise",
    "neighbours": "independence",
    "guesses": "guesses",
    "impossible": "impossible tokens",
}


@dataclass
class Evidence:
    """Statistics of the tokens of some texts: float64 arrays `[texts, tokens of the longest]`. Where a shorter text has
    no token, all are nan.

    u: the PIT of each token; nan where p(x) is 0.
    surprise: -log p(x) in nats. entropy, variance: its mean and its variance under p.
    log_mgf: `[texts, tokens, TILTS]`, log E exp(s (surprise - entropy)) under p for each s of TILTS.
    impossible: 1 where p(x) is 0 and rounding cannot explain it, else 0.
    edge: the probability, at most, of a token whose p is 0 for an exact sampler whose logits are rounded.
    hits, chances: `[texts, tokens, places]`, of the guesses for each token: 1 where it is the guess, else 0; and the
        guess's p. nan where nothing was guessed. None: no guesses are known.
    """

    u: np.ndarray
    surprise: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray
    log_mgf: np.ndarray
    impossible: np.ndarray
    edge: np.ndarray
    hits: np.ndarray | None = None
    chances: np.ndarray | None = None

    def __add__(self, other: Evidence) -> Evidence:
        """The texts of both. Rows of shorter texts are filled up with nan."""
        longest = max(self.u.shape[1], other.u.shape[1])
        arrays = []
        for pair in zip(self.arrays, other.arrays):
            more = [[(0, 0), (0, longest - x.shape[1]), (0, 0)][: x.ndim] for x in pair]
            arrays.append(np.concatenate([np.pad(x, n, constant_values=np.nan) for x, n in zip(pair, more)]))
        return Evidence(*arrays)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays, without those that are None."""
        return [array for array in vars(self).values() if array is not None]

    @property
    def lost(self) -> np.ndarray:
        """Where p(x) is 0."""
        return np.isnan(self.u) & ~np.isnan(self.surprise)

    @property
    def beyond_rounding(self) -> np.ndarray:
        """Where p(x) is 0 and rounding cannot explain it: each token by itself, or all if there are too many."""
        at_edge, written = self.lost & (self.impossible == 0), ~np.isnan(self.surprise)
        return self.lost if too_many(at_edge[written], self.edge[written]) else self.lost & ~at_edge

    def figures(self) -> EvidenceFigures:
        """The figures of a line of results: counts, p-values by test, perplexities."""
        possible, impossible = ~np.isnan(self.u), self.beyond_rounding
        counts = np.histogram(self.u[possible], BINS, (0, 1))[0]
        total, variance = (self.surprise - self.entropy)[possible].sum(), self.variance[possible].sum()
        p = {
            # The statistic of few numbers has a longer tail than chi-square: p-values below 1e-5 come 1.8 times as
            # often as they should with 5 or 8 numbers a bin, and 1.2 times with 20.
            "chi_square": chisquare(counts).pvalue if counts.mean() >= 20 else 1.0,
            "kolmogorov_smirnov": kstest(self.u[possible], "uniform").pvalue if possible.any() else 1.0,
            "surprise": surprise_p_value(total, variance, self.log_mgf[possible].sum(0)),
            "neighbours": 2 * norm.sf(abs(self.neighbours())),
        }
        figures: EvidenceFigures = {
            "texts": len(self.u),
            "tokens": int((~np.isnan(self.surprise)).sum()),
            "excluded": int((self.lost & ~impossible).sum()),
            "impossible": int(impossible.sum()),
            "counts": counts.tolist(),
            "p": {name: float(value) for name, value in p.items()},
            "z": z_score(total, variance),
            "perplexity": float(np.exp(self.surprise[possible].mean())) if possible.any() else float("nan"),
            "expected_perplexity": float(np.exp(self.entropy[possible].mean())) if possible.any() else float("nan"),
        }
        if self.hits is not None and self.chances is not None:
            varies = (self.chances > 0) & (self.chances < 1)  # Where p(x) is 0 or 1, the token says nothing.
            groups = [varies, *(varies & (np.arange(varies.shape[2]) == place) for place in range(varies.shape[2]))]
            tested = [(self.hits[where], self.chances[where]) for where in groups if where.any()]
            figures["guesses"] = {"hits": int(self.hits[varies].sum()), "expected": float(self.chances[varies].sum())}
            # The least p-value of all guesses and of each place, times the number of these (Bonferroni).
            figures["p"]["guesses"] = min([1.0, *(len(tested) * hits_p_value(hits, p) for hits, p in tested)])
        return figures

    def neighbours(self) -> float:
        """z of the correlation of u with two neighbours: the token before it in the text, and the same token of the
        text before. Given these, u is uniform, with a variance of 1/12, whatever came before."""
        u = np.nan_to_num(self.u - 0.5)
        before = np.zeros_like(u)  # the sum of the two neighbours
        before[:, 1:] += u[:, :-1]
        before[1:] += u[:-1]
        return z_score((u * before).sum(), (before[~np.isnan(self.u)] ** 2).sum() / 12)


def z_score(total: float, variance: float) -> float:
    """A sum whose mean is 0, over its standard deviation; 0 if nothing varies."""
    return float(total / variance**0.5) if variance > 0 else 0.0


def surprise_p_value(total: float, variance: float, log_mgf: np.ndarray) -> float:
    """Chernoff's bound for the sum of the surprise minus its mean. log_mgf: its K(s) at TILTS. Between them K(s) / s^2,
    which is half the variance at 0, is interpolated."""
    s = np.geomspace(1e-4, 1, 400)
    s = np.concatenate([-s, s])
    ratios = np.insert(log_mgf / np.square(TILTS), 4, variance / 2)
    exponents = s**2 * np.interp(s, np.insert(TILTS, 4, 0.0), ratios) - s * total
    return min(1.0, float(2 * np.exp(exponents.min())))


def hits_p_value(hits: np.ndarray, p: np.ndarray) -> float:
    """Chernoff's bound for the number of hits, each of which comes with its probability of `p`."""
    total = hits.sum()
    minimum = minimize_scalar(lambda s: np.log1p(p * np.expm1(s)).sum() - s * total, bounds=(-30, 30), method="bounded")
    return min(1.0, float(2 * np.exp(minimum.fun)))


def too_many(hits: np.ndarray, p: np.ndarray) -> bool:
    """Whether there are more hits than rounding explains, if each comes with its probability of `p` at most."""
    return bool(hits.sum() > p.sum() and hits_p_value(hits, p) < UNLIKELY)


def seen_by(figures: Mapping[str, Any], limit: float) -> list[str]:
    """The tests that tell the sampler from the target: those whose p-value is below `limit`, and "impossible" if some
    token has probability 0 under the target."""
    return [name for name, p in figures["p"].items() if p < limit] + ["impossible"] * (figures["impossible"] > 0)


def limit_of(methods: int) -> float:
    """The p-value below which a test of a run on `methods` methods fails (Bonferroni correction)."""
    return FALSE_ALARM / (methods * (len(TESTS) - 1))
