"""Contrastive decoding: prefer what the large model (expert) says and the small one (amateur) does not (Li et al.,
arXiv 2210.15097), and its speculative form (Yuan et al., arXiv 2311.08981), in which the amateur guesses too.

`Contrast` is to every sampler a model like any other, whose logits are the contrastive scores. Plain contrastive
decoding is autoregressive sampling from it; the speculative form is speculative sampling with it as the target.
"""

import math

from decoding.verification import token_rule
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, UserError, check_share


class Contrast:
    """Expert against amateur, with what samplers use of a `CachedModel`.

    plausibility: alpha of the paper's equation 2; tokens with p < plausibility * max p are dropped.
    temperature: of the amateur (the paper's tau): above 1 it is made less sure of itself, and weighs less.
    """

    def __init__(self, expert, amateur, plausibility=0.1, temperature=1.0):
        if not 1e-4 <= temperature < math.inf:  # below, logits divided by it overflow
            raise UserError(f"the amateur's temperature must be at least 0.0001, not {temperature}")
        self.expert, self.amateur = expert, amateur
        self.plausibility, self.temperature = check_share("plausibility", plausibility), temperature
        self.vocabulary = min(expert.vocabulary, amateur.vocabulary)
        self.name, self.device, self.dtype = f"{expert.name} against {amateur.name}", expert.device, expert.dtype
        self.context = min(expert.context, amateur.context)

    def forward(self, tokens, positions):
        """Both models read `tokens[B, n]` into their caches; scores `[B, n, vocabulary]`.

        Where the amateur also guesses it has read most of the block before, and writes the same again: with that one
        forward the score after the last guess is there too, so that the bonus token needs no other distribution."""
        return self.scores(self.expert.forward(tokens, positions), self.amateur.forward(tokens, positions))

    def run_at_once(self, tokens, positions, u, sampling):
        """As `CachedModel.run_at_once`: it has no graph."""

    def round_at_once(self, draft, tokens, positions, sampling, generator=None):
        """As `CachedModel.round_at_once`: it has no graph."""

    def judge_at_once(self, block, positions, q, u, sampling, verify):
        """As `CachedModel.judge_at_once`: it has no graph."""

    def read_prompt(self, rows):
        """As `CachedModel.read_prompt`: scores `[B, vocabulary]` after each row's prompt."""
        return self.scores(self.expert.read_prompt(rows), self.amateur.read_prompt(rows))

    def score(self, tokens):
        """As `CachedModel.score`: scores `[B, n, vocabulary]` without the caches."""
        return self.scores(self.expert.score(tokens), self.amateur.score(tokens))

    def scores(self, expert, amateur):
        """The paper's equations 2 and 3 for logits `[..., V]`: log p - log q, and -inf for tokens that are dropped."""
        log_p = expert[..., : self.vocabulary].log_softmax(-1)
        log_q = (amateur[..., : self.vocabulary] / self.temperature).log_softmax(-1)
        least = log_p.amax(-1, keepdim=True) + math.log(self.plausibility or 1e-300)
        return (log_p - log_q).masked_fill(log_p < least, -math.inf)


def contrastiveSampling(
    prefixes,
    expert,
    amateur,
    max_len=200,
    sampling=GREEDY,
    end_of_text=None,
    generator=None,
    callback=None,
    plausibility=0.1,
    temperature=1.0,
):
    """Continue each of `prefixes`, always with the token of the highest score (`sampling` greedy, as in the paper), or
    drawing from the softmax of the scores over `sampling.temperature`. The rest as for `regrSampling`."""
    return regrSampling(
        prefixes,
        Contrast(expert, amateur, plausibility, temperature),
        max_len,
        sampling,
        end_of_text,
        generator,
        callback,
    )


def specContrastiveSampling(
    prefixes,
    expert,
    amateur,
    max_len=200,
    gamma=4,
    sampling=GREEDY,
    end_of_text=None,
    generator=None,
    callback=None,
    plausibility=0.1,
    temperature=1.0,
    verify=token_rule,
):
    """The same text (in distribution), faster: the amateur's guesses are verified against the contrastive distribution.
    Arguments as for `specSampling`."""
    return specSampling(
        prefixes,
        Contrast(expert, amateur, plausibility, temperature),
        ModelDrafter(amateur),
        max_len,
        gamma,
        sampling,
        end_of_text,
        generator,
        callback,
        verify,
    )
