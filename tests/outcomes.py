"""Chance taken apart: every outcome of a random computation, each in a row of one batch, with its exact probability.

Chance decides in two ways: a token is drawn, and a uniform number is compared with a threshold. Here
both are decided by the number of the row, read as digits (a token is a digit of base V, a comparison one of base 2),
and the row's weight is multiplied by the probability of what was decided. The functions under test are the real ones;
their output distribution is a sum of weights, without sampling noise.
"""

import helpers
import mistakes
import pytest
import torch

from decoding import rounds, verification
from lossless import plantedMistakes
from utils import Sampling


class Outcomes:
    """rows: the size of the batch; weight: float64 `[rows]`; count: how many outcomes there are so far."""

    def __init__(self, rows):
        self.index, self.weight, self.count = torch.arange(rows), torch.ones(rows, dtype=torch.float64), 1

    def choose(self, choices):
        """The next digit of each row, int64 `[rows]`."""
        chosen = self.index // self.count % choices
        self.count *= choices
        return chosen

    def draw(self, probs, *chance):
        """In the place of `utils.draw` and `utils.pick`, for `probs[rows, V]`."""
        token, probs = self.choose(probs.shape[-1]), probs.double()
        # A row that cannot come about may have nothing to draw from; a row that can must not: its weight would be lost.
        self.weight *= probs.gather(-1, token[:, None])[:, 0] / probs.sum(-1).clamp(min=1e-300)
        return token

    def rand(self, *shape, **how):
        """In the place of `torch.rand`: for rounds, `[rows, gamma + 1]`, and for runs, `[n, rows]`."""
        return Uniform(self, shape)


class Uniform:
    """Numbers drawn uniformly from [0, scale). All that can be asked is whether they are below others, `[rows, n]`: all
    but the last of a round. Any other is handed on to `pick`, which asks for none: there a token is chosen."""

    def __init__(self, outcomes, shape, scale=1.0):
        self.outcomes, self.shape, self.scale = outcomes, shape, scale

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, at):
        if at == (slice(None), slice(None, -1)):
            return Uniform(self.outcomes, (self.shape[0], self.shape[1] - 1), self.scale)
        if isinstance(at, slice):
            return Uniform(self.outcomes, (len(range(*at.indices(self.shape[0]))), *self.shape[1:]), self.scale)
        return None

    def __mul__(self, scale):
        return Uniform(self.outcomes, self.shape, self.scale * scale.double())

    def __lt__(self, bound):
        bound = bound.double()
        chance = torch.where(self.scale > bound, bound / self.scale, (bound > 0).double())
        # The first row rejects everything: with it a loop takes as many rounds as it can.
        below = [self.outcomes.choose(2) for _ in range(self.shape[1])]
        below = torch.stack(below, 1).bool() if below else torch.zeros_like(chance, dtype=torch.bool)
        self.outcomes.weight *= torch.where(below, chance, 1 - chance).prod(1)
        return below


def every_outcome(run):
    """`run(outcomes)`, where the batch has as many rows as there are outcomes, and the probability of each row's,
    float64 `[rows]`."""
    rows = 1
    while True:
        outcomes = Outcomes(rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", outcomes.rand)
            for module in (rounds, verification, mistakes, plantedMistakes):
                patch.setattr(module, "pick", outcomes.draw)
            result = run(outcomes)
        if outcomes.count <= rows:
            return result, outcomes.weight * (outcomes.index < outcomes.count)
        rows = outcomes.count
        assert rows < 1 << 19, "too many outcomes for the memory"


def number(texts, vocabulary):
    """`texts[B, n]` as numbers to base V, `[B]`."""
    return (texts * vocabulary ** torch.arange(texts.shape[1] - 1, -1, -1)).sum(1)


def small(count, vocabulary=3):
    """That many unlike models of so few tokens that all texts of a few rounds can be counted: the target first."""
    return [helpers.tiny(seed=i, vocabulary=vocabulary, layers=1, sharpness=2.0) for i in range(count)]


def largest_error(sample, target, length=4, sampling=Sampling(1.0, 0, 1.0), prefixes=((1, 2, 0, 1, 2), (1,))):
    """The largest difference, over all texts of `length` tokens, between the probability of `sample(prefixes)` (the new
    tokens of each prefix) and that of plain sampling from `target` without a cache. The prefixes are rows of one batch.

    The loop takes a round more for each guess it rejects: `length` 4 has rounds of two, one and no guesses."""
    prefixes = [[token % target.vocabulary for token in prefix] for prefix in prefixes]

    def run(outcomes):
        which = outcomes.choose(len(prefixes))
        return which, torch.tensor(sample([prefixes[i] for i in which.tolist()]))

    (which, texts), weight = every_outcome(run)
    texts, largest = number(texts, target.vocabulary), 0.0
    for i, prefix in enumerate(prefixes):
        wanted = helpers.joint_distribution(target, prefix, length, sampling).flatten()
        emitted = torch.zeros_like(wanted).index_add_(0, texts[which == i], weight[which == i])
        largest = max(largest, (emitted - wanted).abs().max().item())
    return largest
