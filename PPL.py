"""Perplexity of the draft, the target, and the speculative sampler itself.

Two protocols. *Per text* (the report's): each text has its own perplexity, and their mean is reported. *Corpus*: the
whole text in overlapping windows, one perplexity for all of it, by token, by word and by byte; the latter two compare
models whose tokenizers differ. Always the models' own distributions (temperature 1, no filters) in float32, from
log-softmax.
"""

import math
from dataclasses import dataclass

import torch

from utils import UserError, not_finite

ROWS = 256  # positions whose whole distributions are handled at once: bounds memory at large vocabularies


def speculative_log_probs(log_p, log_q, tokens):
    """log-probability that the speculative sampler emits `tokens[n]`: float32 `[n]`.

    log_p, log_q: the target's and the draft's log-probabilities `[n, V]`. The sampler emits x either as an accepted
    guess, min(p, q)(x), or after a rejection, (1 - beta) p'(x) with beta = sum min(p, q) and p' = norm(max(0, p - q))
    (arXiv 2211.17192, Appendix A.1). With m = min(1, q/p)(x) and Z = sum max(0, p - q) the two parts are p m and
    (1 - beta) p (1 - m) / Z; the factor p is left in logarithms, where it cannot underflow.
    """
    p, q = log_p.exp(), log_q.exp()
    beta, left = torch.minimum(p, q).sum(-1), (p - q).clamp_(min=0).sum(-1)
    log_px, log_qx = (d.gather(-1, tokens[:, None])[:, 0] for d in (log_p, log_q))
    m = (log_qx - log_px).clamp_(max=0).exp()
    after_rejection = torch.where(left > 0, (1 - m) / left, torch.ones_like(m))
    return log_px + (m + (1 - beta) * after_rejection).log()


def token_log_probs(tokens, target, draft=None):
    """log-probability of each of `tokens[1:]` given those before it, from one forward of each model: float32 `[n - 1]`
    on the host for "target" and, with a draft, for "draft" and "speculative" (the sampler made of both). Raises
    UserError for a model whose logits are not finite."""
    scores = [model.score(tokens[None].to(model.device))[0, :-1] for model in (target, draft) if model is not None]
    parts = {role: [] for role in (("target",) if draft is None else ("target", "draft", "speculative"))}
    for start in range(0, len(tokens) - 1, ROWS):
        log_probs = [s[start : start + ROWS].log_softmax(-1) for s in scores]
        following = tokens[start + 1 : start + 1 + len(log_probs[0])].to(log_probs[0].device)
        for role, distribution in zip(("target", "draft"), log_probs):
            parts[role].append(distribution.gather(-1, following[:, None])[:, 0])
        if draft is not None:
            parts["speculative"].append(speculative_log_probs(*log_probs, following))
    log_probs = {role: torch.cat(pieces).cpu() for role, pieces in parts.items()}
    for role, model in ("target", target), ("draft", draft):
        if model is not None and log_probs[role].isnan().any():
            raise not_finite(model)
    return log_probs


def calculate_ppl_regr(tokens, target):
    """Perplexity of one text (token ids, two or more) under one model: exp of the mean of -log p(x_i | x_<i)."""
    return perplexities(tokens, target)["target"]


def calculate_ppl_spec(tokens, target, draft):
    """Perplexity of one text under the speculative sampler made of `target` and `draft`."""
    return perplexities(tokens, target, draft)["speculative"]


def perplexities(tokens, target, draft=None):
    """Perplexity of one text for each role of `token_log_probs`."""
    if len(tokens) < 2:
        raise UserError("a text of fewer than two tokens has no perplexity")
    log_probs = token_log_probs(torch.as_tensor(tokens), target, draft)
    return {role: exp(-values.double().mean().item()) for role, values in log_probs.items()}


def exp(nats):
    """exp, infinite where a float cannot hold it."""
    return math.inf if nats > 709 else math.exp(nats)


@dataclass
class CorpusPerplexity:
    """nll: summed negative log-likelihood in nats over `tokens` scored tokens of texts of `words` and `bytes`."""

    nll: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0

    def __add__(self, other):
        return CorpusPerplexity(
            self.nll + other.nll, self.tokens + other.tokens, self.words + other.words, self.bytes + other.bytes
        )

    @property
    def token_ppl(self):
        return exp(self.nll / self.tokens)

    @property
    def word_ppl(self):
        """Per word; white space parts words."""
        return exp(self.nll / max(self.words, 1))

    @property
    def byte_ppl(self):
        return exp(self.nll / self.bytes)


def calculate_ppl_corpus(text, tokenizer, target, draft=None, window=1024, stride=512, progress=None):
    """`CorpusPerplexity` of one text for each role of `token_log_probs`, read in windows of `window` tokens, each
    `stride` after the one before.

    Every token but the text's first is scored once, with at least `window - stride` tokens before it (as many as there
    are, at the start). `progress(n)` is called with the tokens each window scored.
    """
    if not 1 <= stride < window:
        raise UserError(f"the stride ({stride}) must be at least 1 and less than the window ({window})")
    context = min(model.context for model in (target, draft) if model is not None)
    if window > context:
        raise UserError(f"the window of {window} tokens exceeds the models' context of {context}")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(tokens) < 2:
        raise UserError("a text of fewer than two tokens has no perplexity")
    size = {"words": len(text.split()), "bytes": len(text.encode())}
    nll, scored = {}, 1
    for start in range(0, len(tokens), stride):
        end = min(start + window, len(tokens))
        for role, log_probs in token_log_probs(tokens[start:end], target, draft).items():
            nll[role] = nll.get(role, 0.0) - log_probs[scored - end :].double().sum().item()
        if progress:
            progress(end - scored)
        scored = end
        if end == len(tokens):
            return {role: CorpusPerplexity(nats, end - 1, **size) for role, nats in nll.items()}
