"""`TextScorer`: computes the target's distributions for texts already written, and their `Evidence`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.cachedModel import CachedModel
from experiments.lines import GreedyFigures
from lossless.evidence import Evidence
from utils import Sampling, probabilities, seen_after

ELEMENTS = 1 << 24  # Probabilities computed at a time: 64 MB a tensor.

Texts = Sequence[Sequence[int]]  # token ids


@dataclass
class Batch:
    """Texts to score, each after its prompt.

    tokens: int64 `[B, n]`, prompts and texts; shorter rows are padded on the right.
    at: int64 `[B, m, 1]`, the places whose logits predict the texts' tokens x, int64 `[B, m, 1]`.
    written: bool `[B, m]`, False for the padding of texts shorter than the longest.
    seen: bool `[B, m, V]`, the tokens before each of x, if the sampling has a repetition penalty.
    guesses: int64 `[B, m, places]`, guesses that are independent of x, -1 where there is no guess; None: no guesses.
    """

    tokens: Tensor
    at: Tensor
    x: Tensor
    written: Tensor
    seen: Tensor | None
    guesses: Tensor | None


class TextScorer:
    """Scores texts with teacher forcing, in pure PyTorch.

    target: its `score` uses no KV cache, so a stale slot in the sampler's cache shows.
    order: the model whose distributions are q in the order of the vocabulary (evidence.py). If None, the most probable
        tokens come first.
    unit: the unit roundoff of the arithmetic that wrote the texts, if it is not that of the target's dtype.
    """

    def __init__(
        self,
        target: CachedModel,
        order: CachedModel | None,
        sampling: Sampling,
        seed: int = 0,
        unit: float | None = None,
    ) -> None:
        self.target, self.order, self.sampling, self.seed, self.unit = target, order, sampling, seed, unit
        self.random = np.random.default_rng(seed)

    @torch.inference_mode()
    def evidence(
        self, prompts: Texts, texts: Texts, first: int | None = None, guesses: np.ndarray | None = None
    ) -> Evidence:
        """`Evidence` of the `texts` that a sampler wrote after `prompts`. guesses: those of `replay.guesses_along`.

        first: the number of the first text. It decides the random numbers v, whichever process scored the texts before.
        None: v follow those of the texts that this scorer scored before.
        """
        if first is not None:
            self.random = np.random.default_rng((self.seed, first))
        length = max(map(len, prompts)) + max(map(len, texts))
        rows = max(1, ELEMENTS // (length * self.target.vocabulary))
        parts = [
            self.evidence_of_batch(self.batch(prompts[part], texts[part], None if guesses is None else guesses[part]))
            for part in (slice(i, i + rows) for i in range(0, len(texts), rows))
        ]
        return sum(parts[1:], parts[0])

    def evidence_of_batch(self, batch: Batch) -> Evidence:
        """`Evidence` of texts that are scored together."""
        x, seen = batch.x, batch.seen
        logits = logits_of(self.target, batch)
        p = probabilities(logits, self.sampling, seen)
        q = 1.0 if self.order is None else probabilities(logits_of(self.order, batch), self.sampling, seen)
        order = q / p
        p_x, order_x = p.gather(-1, x), order.gather(-1, x)
        # Nothing is sorted: F(x-) is the sum of what comes before x. Among equals, the smaller token id comes first.
        before = order < order_x
        before |= (order == order_x) & (torch.arange(p.shape[-1], device=p.device) < x)
        u = (p * before).sum(-1)
        v = torch.as_tensor(self.random.random(int(batch.written.sum())), dtype=p.dtype).to(p.device)
        u += torch.zeros_like(u).masked_scatter(batch.written, v) * p_x[..., 0]
        log = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        entropy = -(p * log).sum(-1)
        variance = (p * (log + entropy[..., None]) ** 2).sum(-1)
        lost = (p_x[..., 0] == 0) & batch.written
        impossible = torch.zeros_like(lost)
        if lost.any():
            impossible[lost] = ~self.cut_by_rounding(logits[lost], x[lost], None if seen is None else seen[lost])
        u = u.clamp(0, 1 - 1e-7).masked_fill(lost, torch.nan)
        fields = [u, -log.gather(-1, x)[..., 0], entropy, variance, impossible.float()]
        if batch.guesses is not None:
            none, chances = (batch.guesses < 0) | lost[..., None], p.gather(-1, batch.guesses.clamp(min=0))
            fields += [field.masked_fill(none, torch.nan) for field in ((batch.guesses == x).float(), chances)]
        arrays = [field.cpu().double().numpy() for field in fields]
        for array in arrays:
            array[~batch.written.cpu().numpy()] = np.nan
        return Evidence(*arrays)

    def batch(self, prompts: Texts, texts: Texts, guesses: np.ndarray | None = None) -> Batch:
        """The `Batch` of these texts."""
        device = self.target.device
        tokens = padded([[*prompt, *text] for prompt, text in zip(prompts, texts)]).to(device)[:, :-1]
        lengths = torch.tensor([[len(text)] for text in texts], device=device)
        step = torch.arange(int(lengths.max()), device=device)
        at = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
        at = (at + step.minimum(lengths - 1))[..., None]
        seen = None
        if self.sampling.repetition_penalty != 1:
            none = torch.zeros(len(tokens), self.target.vocabulary, dtype=torch.bool, device=device)
            after = seen_after(none, tokens)
            assert after is not None
            seen = at_places(after, at)
        x, written = padded(texts).to(device)[..., None], step < lengths
        known = None if guesses is None else torch.from_numpy(guesses[:, : len(step)]).to(device)
        return Batch(tokens, at, x, written, seen, known)

    def cut_by_rounding(self, logits: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
        """Whether top-k and top-p would have kept x, had rounding favoured it: `logits[N, V]`, `x[N, 1]` -> bool `[N]`.

        If a logit changes by d, the share s of the tokens above the cut changes by at most s (1 - s) d.
        """
        d = rounding(self.target, logits, self.unit)
        raised = logits.scatter_add(-1, x, d)
        top_p, temperature = self.sampling.top_p, self.sampling.temperature or 1
        results = []
        for i in range(len(x)):
            wider = replace(self.sampling, top_p=min(1.0, top_p + top_p * (1 - top_p) * float(d[i]) / temperature))
            results.append(probabilities(raised[i], wider, None if seen is None else seen[i])[x[i, 0]] > 0)
        return torch.stack(results)

    @torch.inference_mode()
    def logit_gaps(self, prompts: Texts, texts: Texts) -> tuple[Tensor, Tensor, Tensor]:
        """How far each token is from the target's argmax, three tensors with a number for each token of all texts.

        The first: the largest logit minus the token's, 0 for the argmax and its equals. The second: how much of that
        rounding can explain. The third, bool: the token is the argmax.
        """
        gaps, limits, argmaxes = [], [], []
        for prompt, text in zip(prompts, texts):
            batch = self.batch([prompt], [text])
            logits = logits_of(self.target, batch)
            penalty = Sampling(1.0, 0, 1.0, self.sampling.repetition_penalty)
            scores = probabilities(logits, penalty, batch.seen).log()  # Logits after the penalty, minus a constant.
            gaps.append((scores.amax(-1) - scores.gather(-1, batch.x)[..., 0])[0])
            limits.append(rounding(self.target, logits, self.unit)[0, :, 0])
            argmaxes.append((scores.argmax(-1) == batch.x[..., 0])[0])
        return torch.cat(gaps).cpu(), torch.cat(limits).cpu(), torch.cat(argmaxes).cpu()


def padded(rows: Texts) -> Tensor:
    """int64 `[rows, tokens of the longest]`; shorter rows are padded with their last token."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])


def logits_of(model: CachedModel, batch: Batch) -> Tensor:
    """The logits `[B, m, V]` that predict the tokens of a batch of texts."""
    return at_places(model.score(batch.tokens), batch.at)


def at_places(tensor: Tensor, at: Tensor) -> Tensor:
    """`tensor[B, n, V]` at the places `at[B, m, 1]`, `[B, m, V]`."""
    return tensor.gather(1, at.expand(-1, -1, tensor.shape[-1]))


def rounding(model: CachedModel, logits: Tensor, unit: float | None = None) -> Tensor:
    """How much the difference of two logits can change if it is computed another way in the model's dtype, `[..., 1]`.

    unit: the unit roundoff, if it is not that of the dtype.

    The residual stream of a model with L layers is a sum of 2 L parts. Each part is rounded by the dtype's unit
    roundoff. Each is computed from sums of d products in float32, whose error grows as sqrt(d). Independent errors add
    as their squares do. Such a relative error is taken of the standard deviation of the logits over the vocabulary.

    The result allows 8 standard deviations of the error. The measured standard deviation is 0.04 to 0.93 of this
    estimate, but a few large numbers make its tails heavy: the largest error was 6.6 of it.
    """
    config = model.model.config.get_text_config()
    rounded, accumulated = unit or torch.finfo(model.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    relative = (2 * config.num_hidden_layers) ** 0.5 * (rounded + config.hidden_size**0.5 * accumulated)
    return 8 * relative * logits.std(-1, keepdim=True)


def gap_figures(texts: Texts, gap: Tensor, allowed: Tensor, is_argmax: Tensor) -> dict[str, Any]:
    """The figures of greedy texts, of the three results of `TextScorer.logit_gaps`. near_ties: tokens that are not the
    argmax of the text read as a whole, but within rounding of it. beyond: tokens beyond rounding."""
    beyond = gap > allowed
    return {
        "texts": len(texts),
        "tokens": gap.numel(),
        "near_ties": int((~is_argmax & ~beyond).sum()),
        "beyond": int(beyond.sum()),
        "largest_gap": float(gap.max()),
        "allowed": float(allowed.max()),
    }


def greedy_figures(texts: Texts, plain: Texts, prompts: Texts, scorer: TextScorer) -> GreedyFigures:
    """`gap_figures` of greedy texts. plain: the texts of plain decoding. differing: texts that differ from them. Where
    two texts first differ, their context is the same, so there plain decoding's token is tested too."""
    figures = gap_figures(texts, *scorer.logit_gaps(prompts, texts)) | {"differing": 0}
    for prompt, text, plain_text in zip(prompts, texts, plain):
        if text != plain_text:
            fork = next(i for i, (a, b) in enumerate(zip(text, plain_text)) if a != b)
            gap, allowed, _ = scorer.logit_gaps([prompt], [plain_text[: fork + 1]])
            figures["differing"] += 1
            figures["beyond"] += int(gap[-1] > allowed[-1])
    return cast(GreedyFigures, figures)
