"""Contrastive decoding: prefer what the large model (expert) says and the small one (amateur) does not (Li et al.,
arXiv 2210.15097), and its speculative form (Yuan et al., arXiv 2311.08981), in which the amateur guesses too.

To every sampler, `Contrast` is a model like any other, whose logits are the contrastive scores. Plain contrastive
decoding is autoregressive sampling from it. The speculative form is speculative sampling with it as the target.
"""

import math

from torch import Tensor

from decoding.interfaces import Model
from decoding.rounds import forward, prefill
from decoding.rows import Rows
from utils import UserError, check_share


class Contrast:
    """Expert against amateur, as one model (`decoding.interfaces.Model`).

    plausibility: alpha of the paper's equation 2; tokens with p < plausibility * max p are dropped.
    temperature: the amateur's (the paper's tau); above 1 its distribution is flatter and weighs less.
    """

    graphs = None  # The two models have graphs of their own.
    cache = None

    def __init__(self, expert: Model, amateur: Model, plausibility: float = 0.1, temperature: float = 1.0) -> None:
        if not 1e-4 <= temperature < math.inf:  # Logits divided by less would overflow.
            raise UserError(f"the amateur's temperature must be at least 0.0001, not {temperature}")
        self.expert, self.amateur = expert, amateur
        self.plausibility, self.temperature = check_share("plausibility", plausibility), temperature
        self.vocabulary = min(expert.vocabulary, amateur.vocabulary)
        self.name, self.device, self.dtype = f"{expert.name} against {amateur.name}", expert.device, expert.dtype
        self.context = min(expert.context, amateur.context)
        self.operators = expert.operators

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Both models read `tokens[B, n]` into their caches; scores `[B, n, vocabulary]`.

        If the amateur also guesses, it has read most of the block before and writes the same values again. This one
        forward also gives the score after the last guess, so the bonus token is no special case.
        """
        there = tokens.to(self.amateur.device), positions.to(self.amateur.device)
        return self.scores(forward(self.expert, tokens, positions), forward(self.amateur, *there))

    def reserve(self, rows: int, capacity: int) -> None:
        """As `CachedModel.reserve`, of both models."""
        self.expert.reserve(rows, capacity)
        self.amateur.reserve(rows, capacity)

    def read_prompt(self, rows: Rows) -> Tensor:
        """As `CachedModel.read_prompt`: scores `[B, vocabulary]` after each row's prompt."""
        return self.scores(prefill(self.expert, rows), prefill(self.amateur, rows))

    def score(self, tokens: Tensor) -> Tensor:
        """As `CachedModel.score`: scores `[B, n, vocabulary]` without the caches."""
        return self.scores(self.expert.score(tokens), self.amateur.score(tokens))

    def scores(self, expert: Tensor, amateur: Tensor) -> Tensor:
        """The paper's equations 2 and 3 for logits `[..., V]`: log p - log q, and -inf for tokens that are dropped."""
        log_p = expert[..., : self.vocabulary].log_softmax(-1)
        log_q = (amateur[..., : self.vocabulary].to(log_p.device) / self.temperature).log_softmax(-1)
        least = log_p.amax(-1, keepdim=True) + math.log(self.plausibility or 1e-300)
        return (log_p - log_q).masked_fill(log_p < least, -math.inf)
