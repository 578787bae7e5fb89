"""Contrastive decoding: prefer tokens that the large model (expert) finds likelier than the small one (amateur) (Li et
al., arXiv 2210.15097), and its speculative form (Yuan et al., arXiv 2311.08981), in which the amateur guesses too.

To every sampler, `Contrast` is a model like any other, whose logits are the contrastive scores. Plain contrastive
decoding is autoregressive sampling from it. The speculative form is speculative sampling with it as the target.
"""

import math

from torch import Tensor

from decoding.model import Model
from decoding.rows import Rows
from decoding.tree import Places
from decoding.verification import Rule
from utils import Sampling, UserError


class Contrast(Model):
    """Expert against amateur, as one model.

    plausibility: alpha of the paper's equation 2; tokens with p < plausibility * max p are dropped.
    temperature: the amateur's (the paper's tau); above 1 its distribution is flatter and weighs less.
    """

    def __init__(self, expert: Model, amateur: Model, plausibility: float = 0.1, temperature: float = 1.0) -> None:
        if not 0 <= plausibility <= 1:
            raise UserError(f"plausibility must lie in [0, 1], not {plausibility}")
        if not 1e-4 <= temperature < math.inf:
            raise UserError(f"the amateur's temperature must be at least 0.0001, not {temperature}")
        if expert is not amateur and set(expert.keepers) & set(amateur.keepers):
            raise UserError(f"{amateur.name} shares the KV cache of {expert.name}: give an amateur with its own")
        self.expert, self.amateur = expert, amateur
        self.plausibility, self.temperature = plausibility, temperature
        self.vocabulary = min(expert.vocabulary, amateur.vocabulary)
        self.name, self.device, self.dtype = f"{expert.name} against {amateur.name}", expert.device, expert.dtype
        self.context = min(expert.context, amateur.context)

    @property
    def keepers(self) -> list[Model]:
        return [*self.expert.keepers, *self.amateur.keepers]

    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """Both models read the block into their caches. An amateur that also guesses has read most of it before, and
        writes the same values again."""
        if places is not None:
            raise UserError(f"{self.name} does not read trees of guesses; guess chains")
        device = self.amateur.device
        amateur = self.amateur.forward(tokens.to(device), positions.to(device))
        return self.scores(self.expert.forward(tokens, positions), amateur)

    def prefill(self, rows: Rows) -> Tensor:
        return self.scores(self.expert.prefill(rows), self.amateur.prefill(rows))

    def copy_row(self, source: int, row: int) -> None:
        self.expert.copy_row(source, row)
        self.amateur.copy_row(source, row)

    def rows_computed(self, rows: int) -> int:
        return max(self.expert.rows_computed(rows), self.amateur.rows_computed(rows))

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return self.expert.probabilities(logits, sampling, seen)

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return self.expert.pick(probs, u)

    def rule(self, verify: Rule) -> Rule:
        return self.expert.rule(verify)

    def score(self, tokens: Tensor) -> Tensor:
        return self.scores(self.expert.score(tokens), self.amateur.score(tokens))

    def scores(self, expert: Tensor, amateur: Tensor) -> Tensor:
        """The paper's equations 2 and 3 for logits `[..., V]`: log p - log q, and -inf for tokens that are dropped."""
        log_p = expert[..., : self.vocabulary].log_softmax(-1)
        log_q = (amateur[..., : self.vocabulary].to(log_p.device) / self.temperature).log_softmax(-1)
        least = log_p.amax(-1, keepdim=True) + math.log(self.plausibility or 1e-300)
        return (log_p - log_q).masked_fill(log_p < least, -math.inf)
