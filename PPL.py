"""Perplexity of the draft, the target, and the speculative sampler itself.

There are two protocols. *Per text* (the course report's): each text has its own perplexity, and the mean is reported.
*Corpus*: the whole text is read in overlapping windows and has one perplexity, per token, per word and per byte. The
last two compare models with different tokenizers. Distributions are the models' own (temperature 1, no filters), in
float32 from log-softmax. The speculative sampler's is formed from them by the functions that accept and replace guesses
(decoding/verification.py), in float64: a wrong acceptance or residual changes its perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from decoding.model import Model
from decoding.rows import check_vocabularies
from decoding.verification import emitted
from utils import UserError, not_finite

Window = tuple[int, int, int]
MapFunction = Callable[..., Iterable[Any]]  # map(function, items), as the builtin
ROWS = 16  # Positions whose distributions are computed at a time: with more, they leave the processor's cache.


def speculative_log_probs(log_p: Tensor, log_q: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability that the speculative sampler emits each of `tokens[n]`: float32 `[n]`.

    log_p, log_q: the log-probabilities of the target and the draft, `[n, V]`. The distribution is that of
    `decoding.verification.emitted`: it comes from the functions that accept and replace guesses. If they are right, the
    result is log p up to rounding. In float64: float32's exp underflows below about -103, float64's below about -745.
    """
    if log_p.device.type == "mps":  # It has no float64.
        log_p, log_q, tokens = log_p.cpu(), log_q.cpu(), tokens.cpu()
    p, q = (log_probs.double().softmax(-1) for log_probs in (log_p, log_q))
    return emitted(p, q).gather(-1, tokens[:, None])[:, 0].log().float()


def token_log_probs(tokens: Tensor, target: Model, draft: Model | None = None, first: int = 1) -> dict[str, Tensor]:
    """The log-probability of each of `tokens[first:]` given the tokens before it, from one forward of each model.

    Returns float32 `[n - first]` on the host for "target" and, with a draft, for "draft" and "speculative" (the sampler
    of both). Raises UserError for a model whose logits are not finite.
    """
    tokens = tokens.to(target.device)
    models = {"target": target} if draft is None else {"target": target, "draft": draft}
    logits = [model.score(tokens[None])[0, first - 1 : -1].split(ROWS) for model in models.values()]
    pieces: dict[str, list[Tensor]] = {role: [] for role in models}
    for following, *rows in zip(tokens[first:].split(ROWS), *logits):
        log_probs = [row.log_softmax(-1) for row in rows]
        for role, distribution in zip(models, log_probs):
            pieces[role].append(distribution.gather(-1, following[:, None])[:, 0])
        if draft is not None:
            log_p, log_q = log_probs
            pieces.setdefault("speculative", []).append(speculative_log_probs(log_p, log_q, following))
    token_values = {role: torch.cat(parts).cpu() for role, parts in pieces.items()}
    for role, model in models.items():
        if token_values[role].isnan().any():
            raise not_finite(model.name, model.dtype)
    return token_values


def calculate_ppl_regr(tokens: Sequence[int] | Tensor, target: Model) -> float:
    """The perplexity of one text (two token ids or more) under one model: exp of the mean of -log p(x_i | x_<i)."""
    return perplexities(tokens, target)["target"]


def calculate_ppl_spec(tokens: Sequence[int] | Tensor, target: Model, draft: Model) -> float:
    """The perplexity of one text under the speculative sampler made of `target` and `draft`."""
    return perplexities(tokens, target, draft)["speculative"]


def perplexities(tokens: Sequence[int] | Tensor, target: Model, draft: Model | None = None) -> dict[str, float]:
    """The perplexity of one text for each role of `token_log_probs`."""
    tokens = torch.as_tensor(tokens)
    check_text(tokens, "text", len(tokens), target, draft)
    log_probs = token_log_probs(tokens, target, draft)
    return {role: exp(-values.double().mean().item()) for role, values in log_probs.items()}


def check_text(tokens: Tensor, what: str, length: int, target: Model, draft: Model | None) -> None:
    """Raise UserError unless the models can read a text as a whole, or window by window. what: "text" or "window", of
    which each has at most `length` tokens. A tokenizer may have tokens that the models lack, such as an image's."""
    models = [target] if draft is None else [target, draft]
    check_vocabularies(*models)
    if len(tokens) < 2:
        raise UserError("a text of fewer than two tokens has no perplexity")
    if tokens.is_floating_point():
        raise UserError("a text is a list of token ids, not of fractions")
    context, outside = min(model.context for model in models), tokens[(tokens < 0) | (tokens >= target.vocabulary)]
    if length > context:
        raise UserError(f"the {what} of {length} tokens exceeds the models' context of {context}")
    if len(outside):
        known = f"outside the models' vocabulary of {target.vocabulary}"
        raise UserError(f"the text contains token {outside.max()}, {known}; remove it")


def exp(nats: float) -> float:
    """exp; infinite if the result is too large for a float."""
    return math.inf if nats > 709 else math.exp(nats)


@dataclass
class CorpusPerplexity:
    """The likelihood of texts, from which their perplexity follows. Texts are added with `+`.

    nll: the sum of the negative log-likelihoods, in nats. tokens: how many tokens were scored. words, bytes: the
    size of the texts.
    """

    nll: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0

    def __add__(self, other: CorpusPerplexity) -> CorpusPerplexity:
        return CorpusPerplexity(*map(sum, zip(astuple(self), astuple(other))))

    @property
    def token_ppl(self) -> float:
        return exp(self.nll / self.tokens)

    @property
    def word_ppl(self) -> float:
        """Perplexity per word. Words are separated by white space."""
        return exp(self.nll / max(self.words, 1))

    @property
    def byte_ppl(self) -> float:
        """Perplexity per byte of UTF-8."""
        return exp(self.nll / self.bytes)


def calculate_ppl_corpus(
    text: str,
    tokenizer: Callable[..., Any],
    target: Model,
    draft: Model | None = None,
    window: int = 1024,
    stride: int = 512,
    progress: Callable[[int], object] | None = None,
    spread: MapFunction = map,
) -> dict[str, CorpusPerplexity]:
    """The `CorpusPerplexity` of one text for each role of `token_log_probs`.

    The text is read in windows of `window` tokens, each `stride` tokens after the one before. Every token but the first
    is scored once, with at least `window - stride` tokens before it (fewer only at the start of the text).
    progress: called with the number of tokens that each window scored. spread: applies a function to each window, in
        order; several processes can share that (experiments/processes.py).
    """
    if not 1 <= stride < window:
        raise UserError(f"the stride ({stride}) must be at least 1 and less than the window ({window})")
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    check_text(tokens, "window", window, target, draft)
    size = {"words": len(text.split()), "bytes": len(text.encode())}
    pieces = windows(len(tokens), window, stride)

    def score(piece: Window) -> dict[str, float]:
        """The negative log-likelihood of the tokens that are new in a window, in nats, for each role."""
        start, first_new, end = piece
        log_probs = token_log_probs(tokens[start:end], target, draft, first_new - start)
        return {role: -values.double().sum().item() for role, values in log_probs.items()}

    nll: dict[str, float] = {}
    for nats, (_, first_new, end) in zip(spread(score, pieces), pieces):
        nll = {role: nll.get(role, 0.0) + nats[role] for role in nats}
        if progress:
            progress(end - first_new)
    return {role: CorpusPerplexity(nats, len(tokens) - 1, **size) for role, nats in nll.items()}


def windows(tokens: int, window: int, stride: int) -> list[Window]:
    """The windows of a text of `tokens` tokens: [(start, the first token that is new, end), ...]."""
    starts = range(0, max(tokens - window, 0) + stride, stride)
    ends = [min(start + window, tokens) for start in starts]
    return list(zip(starts, [1, *ends], ends))
