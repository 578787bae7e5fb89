"""Chance taken apart: every outcome of a random computation, each in a row of one batch, with its exact probability.

Chance decides in two ways: a token is drawn, and a uniform number is compared with a threshold. Here each row of the
batch brings its decisions along as digits (a token is a digit of base V, a comparison one of base 2), and the row's
weight is multiplied by the probability of what was decided. The functions under test are the real ones; their output
distribution is a sum of weights, without sampling noise.
"""

import copy

import helpers
import mistakes
import pytest
import torch
from hypothesis import strategies as st

from decoding import model, verification
from decoding.rows import Rows
from decoding.verification import token_rule
from lossless import mistakes as planted
from specSampling import specSampling
from utils import Sampling

FREE = Sampling(1.0, 0, 1.0)


class Outcomes:
    """digits: int64 `[rows, n]`, the first n decisions of each row; all later ones are 0. weight: float64 `[rows]`.
    known: the weight after these n decisions. choices: among how many each decision was made so far."""

    def __init__(self, digits):
        self.digits, self.choices = digits, []
        self.weight = self.known = torch.ones(len(digits), dtype=torch.float64)

    def choose(self, choices):
        """The next decision of each row, int64 `[rows]`."""
        self.choices.append(choices)
        at = len(self.choices) - 1
        if at < self.digits.shape[1]:
            return self.digits[:, at].clamp(max=choices - 1)
        if at == self.digits.shape[1]:
            self.known = self.weight
        return self.digits.new_zeros(len(self.digits))

    def draw(self, probs, *chance):
        """In the place of `utils.pick`, for `probs[rows, V]`."""
        token, probs = self.choose(probs.shape[-1]), probs.double()
        # A row that cannot come about may have nothing to draw from; a row that can must not: its weight would be lost.
        self.weight = self.weight * probs.gather(-1, token[:, None])[:, 0] / probs.sum(-1).clamp(min=1e-300)
        return token

    def rand(self, *shape, **how):
        """In the place of `torch.rand`: `[rows, gamma + 1]` for verification, `[rows, n]` for what is drawn."""
        return Uniform(self, shape)


class Uniform:
    """Numbers drawn uniformly from [0, scale). All that can be asked is whether they are below others, each once. Those
    that are handed on to `pick` are not asked: there a token is chosen."""

    def __init__(self, outcomes, shape, scale=1.0):
        self.outcomes, self.shape, self.scale = outcomes, shape, scale

    def __len__(self):
        return self.shape[0]

    def to(self, device):
        return self

    def __getitem__(self, at):
        if isinstance(at, slice):
            return Uniform(self.outcomes, (len(range(*at.indices(self.shape[0]))), *self.shape[1:]), self.scale)
        return self

    @property
    def T(self):
        return Uniform(self.outcomes, self.shape[::-1], self.scale)

    def __mul__(self, scale):
        return Uniform(self.outcomes, self.shape, self.scale * scale.double())

    def __lt__(self, bound):
        bound = bound.double()
        chance = torch.where(self.scale > bound, bound / self.scale, (bound > 0).double())
        # 0 rejects: what is not decided yet makes a loop take as many rounds as it can.
        below = torch.zeros_like(chance, dtype=torch.bool)
        for decided, p in zip(below.view(len(below), -1).unbind(1), chance.view(len(below), -1).unbind(1)):
            decided.copy_(self.outcomes.choose(2).bool())
            self.outcomes.weight = self.outcomes.weight * torch.where(decided, p, 1 - p)
        return below


BATCH = 1 << 11  # Outcomes are split by further decisions until there are so many.


def every_outcome(run):
    """`run(outcomes)`, where the batch has one row for each outcome, and the probability of each row's, float64
    `[rows]`.

    Decisions are added in several runs. After each run, rows whose probability is 0 are left out."""
    digits, choices = torch.zeros(1, 0, dtype=torch.long), []
    for _ in range(100):
        outcomes = Outcomes(digits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", outcomes.rand)
            patch.setattr(Rows, "close_ranks", lambda rows: None)  # A row is an outcome: all of them stay.
            for module in (model, verification, mistakes, planted):
                patch.setattr(module, "pick", outcomes.draw)
            result = run(outcomes)
        if outcomes.choices == choices:
            return result, outcomes.weight
        # How many decisions there are depends on the rows of the batch. Up to `same` they are those of the run before.
        same = next((i for i, pair in enumerate(zip(choices, outcomes.choices)) if pair[0] != pair[1]), len(choices))
        if same == len(choices):
            digits = digits[outcomes.known != 0]
        else:
            digits = digits[:, :same].unique(dim=0) if same else digits[:1, :0]
        choices = outcomes.choices[:same]
        for base in outcomes.choices[same:]:
            digits = torch.cat([digits.repeat_interleave(base, 0), torch.arange(base).repeat(len(digits))[:, None]], 1)
            choices = [*choices, base]
            if len(digits) >= BATCH:
                break
        assert len(digits) < 1 << 19, "too many outcomes for the memory"
    raise AssertionError("the number of decisions does not settle")


def number(texts, vocabulary):
    """`texts[B, n]` as numbers to base V, `[B]`."""
    return (texts * vocabulary ** torch.arange(texts.shape[1] - 1, -1, -1)).sum(1)


def small(count, vocabulary=3):
    """That many unlike models of so few tokens that all texts of a few rounds can be counted: the target first."""
    return [helpers.tiny(seed=i, vocabulary=vocabulary, layers=1, sharpness=2.0) for i in range(count)]


def largest_error(sample, target, length=4, sampling=FREE, prefixes=((1, 2, 0, 1, 2), (1,))):
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


def speculative_error(
    drafter, gamma=2, verify=token_rule, vocabulary=3, length=3, sampling=FREE, target=None, smaller=2, **where
):
    """`largest_error` of speculative sampling from a small target. drafter: f(target, `smaller` models) -> what
    guesses. gamma: a number or a rule. target: f(target) -> the model that scores, if it is another."""
    models = small(1 + smaller, vocabulary)
    guesser, scored_by = drafter(*models), (target or (lambda right: right))(models[0])

    def sample(prefixes):
        rule = copy.deepcopy(gamma)  # It learns.
        return specSampling(prefixes, scored_by, guesser, length, rule, sampling, verify=verify)[0]

    return largest_error(sample, models[0], length, sampling, **where)


def at(tree, texts):
    """The distributions `[B, V]` after `texts[B, n]`, of a tree whose level n is `[V ** n, V]`."""
    level = tree[texts.shape[1]]
    return level[number(texts, level.shape[1])]


def joint(tree, first=None):
    """The distribution of a text that begins as `first[V ** n]` says (None: of nothing) and goes on as the tree does,
    float64 `[V ** len(tree)]`."""
    first = torch.ones(1, dtype=torch.float64) if first is None else first
    vocabulary = tree[0].shape[1]
    for level in tree:
        if len(level) * vocabulary > len(first):
            level = level.double()
            first = (first[:, None] * level / level.sum(1, keepdim=True)).flatten()
    return first


def softmaxes(vocabulary=4, gamma=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(vocabulary**n, vocabulary, generator=generator).mul(1.5).softmax(-1) for n in range(levels)]
        for levels in (gamma + 1, gamma)
    ]


WEIGHTS = st.sampled_from([0, 0, 1, 1, 2, 3, 10, 1000, 10**7])


@st.composite
def pairs(draw, vocabularies=(2, 6), gammas=(1, 3)):
    """Trees p and q over so many tokens, so many guesses deep, of distributions with zeros and of very unequal ones. At
    each node q is a distribution of its own, p, nearly p, what p excludes, or nothing: no further guess in that row."""
    vocabulary, gamma = draw(st.integers(*vocabularies)), draw(st.integers(*gammas))
    rows = st.lists(WEIGHTS, min_size=vocabulary, max_size=vocabulary).filter(any)
    pool = torch.tensor(draw(st.lists(rows, min_size=1, max_size=5)), dtype=torch.float32)
    pool = pool / pool.sum(1, keepdim=True)
    kinds = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    near, generator = draw(st.sampled_from([1e-7, 1e-6, 1e-3])), torch.Generator().manual_seed(draw(st.integers(0, 99)))
    p, q, guessed = [], [], torch.ones(1, dtype=torch.bool)
    for n in range(gamma + 1):
        pick = torch.randint(len(pool), (2, vocabulary**n), generator=generator)
        p.append(pool[pick[0]])
        noise = 1 + near * torch.randn(p[n].shape, generator=generator).clamp(-2, 2)
        choices = torch.stack([pool[pick[1]], p[n], p[n] * noise, (p[n] == 0).float(), torch.zeros_like(p[n])])
        chosen = choices[
            kinds[torch.randint(len(kinds), (vocabulary**n,), generator=generator)], torch.arange(len(p[n]))
        ]
        chosen = chosen / chosen.sum(1, keepdim=True).clamp(min=1e-30) * guessed[:, None]
        guessed = (chosen.sum(1) > 0).repeat_interleave(vocabulary)
        q.append(chosen)
    return p, q[:gamma]
