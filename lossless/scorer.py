"""Reads texts that are already written once more: `TextScorer` computes the target's distributions and the `Evidence`,
and `guesses_along` lets a method guess along them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.drafter import Guesses
from decoding.model import Model
from decoding.rows import EndOfText, Rows
from decoding.tree import Tree
from decoding.verification import VerificationRule
from experiments.schema import GreedyFigures
from lossless.evidence import TILTS, Evidence, too_many
from utils import Sampling, excluded, not_finite, probabilities, seen_after, upload

ELEMENTS = 1 << 24  # Probabilities computed at a time: 64 MB a tensor.
PLACES = 8  # Places in a round, or siblings, that are told apart; those beyond count with the last.

Texts = Sequence[Sequence[int]]  # token ids


class Batch:
    """Texts to score together, each after its prompt.

    tokens: int64 `[B, n]`, prompts and texts; shorter rows are padded on the right.
    at: int64 `[B, m, 1]`, the places whose logits predict the texts' tokens x, int64 `[B, m, 1]`.
    written: bool `[B, m]`, False for the padding of texts shorter than the longest.
    """

    def __init__(self, prompts: Texts, texts: Texts, device: torch.device) -> None:
        rows = [torch.tensor([*prompt, *text[:-1]]) for prompt, text in zip(prompts, texts)]
        self.tokens = pad_sequence(rows, batch_first=True).to(device)
        self.x = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)[..., None]
        starts, lengths = (torch.tensor([[len(row)] for row in some], device=device) for some in (prompts, texts))
        step = torch.arange(self.x.shape[1], device=device)
        self.written = step < lengths
        self.at = (starts - 1 + step.minimum(lengths - 1))[..., None]

    def before_x(self, tensor: Tensor) -> Tensor:
        """`tensor[B, n, V]` at the places before each of x, `[B, m, V]`."""
        return tensor.gather(1, self.at.expand(-1, -1, tensor.shape[-1]))

    def seen(self, sampling: Sampling, vocabulary: int) -> Tensor | None:
        """The tokens before each of x, bool `[B, m, V]`, if the sampling has a repetition penalty."""
        if sampling.repetition_penalty == 1:
            return None
        none = torch.zeros(len(self.tokens), vocabulary, dtype=torch.bool, device=self.tokens.device)
        return self.before_x(cast(Tensor, seen_after(none, self.tokens)))


def distributions(model: Any, logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """`utils.probabilities` of logits of `model`. Raises UserError if these are not finite: nan is in no test."""
    p = probabilities(logits, sampling, seen)
    if p.isnan().any():
        raise not_finite(model.name, model.dtype)
    return p


def log_mgf(p: Tensor, entropy: Tensor) -> Tensor:
    """`Evidence.log_mgf` of the distributions `p[..., V]`, `[..., TILTS]`: from the sums of p^(1 - s)."""
    half = p.sqrt()
    quarter = half.sqrt()
    eighth = quarter.sqrt()
    powers = p * p, p * half, p * quarter, p * eighth, half * quarter * eighth, half * quarter, half, p > 0
    return torch.stack([power.sum(-1).log() - s * entropy for power, s in zip(powers, TILTS)], -1)


@dataclass(frozen=True)
class TextScorer:
    """Scores texts with teacher forcing, in pure PyTorch.

    target: its `score` uses no KV cache, so a stale slot in the sampler's cache shows.
    order: the model whose distributions are q in the order of the vocabulary (evidence.py). If None, the most probable
        tokens come first.
    unit: the unit roundoff of the arithmetic that wrote the texts, if it is not that of the target's dtype.
    """

    target: Any
    order: Any
    sampling: Sampling
    seed: int = 0
    unit: float | None = None

    @torch.inference_mode()
    def evidence(
        self,
        prompts: Texts,
        texts: Texts,
        first: int = 0,
        guesses: np.ndarray | None = None,
        logits: Sequence[Tensor] | None = None,
    ) -> Evidence:
        """`Evidence` of the `texts` that a sampler wrote after `prompts`.

        first: the number of the first text. With the seed it decides the random numbers v, whichever process scored the
        texts before. guesses: those of `guesses_along`; None: no guesses are known. logits: the target's `[n, V]` of
        each text; None: they are computed.
        """
        random = np.random.default_rng((self.seed, first))
        length = max(map(len, prompts)) + max(map(len, texts))
        rows = max(1, ELEMENTS // (length * self.target.vocabulary))
        parts = []
        for part in (slice(i, i + rows) for i in range(0, len(texts), rows)):
            batch = Batch(prompts[part], texts[part], self.target.device)
            x, seen = batch.x, batch.seen(self.sampling, self.target.vocabulary)
            if logits is None:
                scores = batch.before_x(self.target.score(batch.tokens))
            else:
                scores = pad_sequence(list(logits[part]), batch_first=True).float()
            p = distributions(self.target, scores, self.sampling, seen)
            order = 1 / p
            if self.order is not None:
                by_order = batch.before_x(self.order.score(batch.tokens))
                order = distributions(self.order, by_order, self.sampling, seen) / p
            p_x, order_x = p.gather(-1, x), order.gather(-1, x)
            # Nothing is sorted: F(x-) is the sum of what comes before x. Among equals, smaller token ids come first.
            before = order < order_x
            before |= (order == order_x) & (torch.arange(p.shape[-1], device=p.device) < x)
            u = (p * before).sum(-1)
            v = torch.from_numpy(random.random(int(batch.written.sum()))).to(p)
            u += torch.zeros_like(u).masked_scatter(batch.written, v) * p_x[..., 0]
            log = p.clamp(min=torch.finfo(p.dtype).tiny).log()
            entropy = -(p * log).sum(-1)
            variance = (p * (log + entropy[..., None]) ** 2).sum(-1)
            lost = (p_x[..., 0] == 0) & batch.written
            impossible = torch.zeros_like(lost)
            if lost.any():
                impossible[lost] = ~self.cut_by_rounding(scores[lost], x[lost], None if seen is None else seen[lost])
            u, edge = u.clamp(0, 1 - 1e-7).masked_fill(lost, torch.nan), self.at_edge(scores, p, seen)
            surprise = -log.gather(-1, x)[..., 0]
            fields = [u, surprise, entropy, variance, log_mgf(p, entropy), impossible.float(), edge]
            if guesses is not None:
                guess = torch.from_numpy(guesses[part, : x.shape[1]]).to(x.device)
                none, chances = (guess < 0) | lost[..., None], p.gather(-1, guess.clamp(min=0))
                fields += [field.masked_fill(none, torch.nan) for field in ((guess == x).float(), chances)]
            arrays = [field.cpu().double().numpy() for field in fields]
            for array in arrays:
                array[~batch.written.cpu().numpy()] = np.nan
            parts.append(Evidence(*arrays))
        return sum(parts[1:], parts[0])

    def cut_by_rounding(self, logits: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
        """Whether top-k and top-p would keep x if rounding favoured it: `logits[N, V]`, `x[N, 1]` -> bool `[N]`."""
        most = self.rounding(logits)[1]
        raised = logits.scatter_add(-1, x, most)
        results = []
        for i in range(len(x)):
            wider = self.wider(float(most[i]))
            results.append(probabilities(raised[i], wider, None if seen is None else seen[i])[x[i, 0]] > 0)
        return torch.stack(results)

    def wider(self, d: float) -> Sampling:
        """The sampling with the top-p that may apply, if the logits of all tokens above the cut are too low by d."""
        odds = math.exp(min(700.0, d / (self.sampling.temperature or 1)))
        return replace(self.sampling, top_p=min(1.0, odds / (odds + 1 / self.sampling.top_p - 1)))

    def at_edge(self, logits: Tensor, p: Tensor, seen: Tensor | None) -> Tensor:
        """The probability, at most, that an exact sampler with rounded logits draws a token whose p is 0:
        `logits[B, m, V]`, `p[B, m, V]` -> `[B, m]`.

        A token is kept if the error of its logit exceeds its distance from the least one that is kept, or if both are
        rounded to one number. The tails of the error are taken as those of Laplace's distribution: they are heavier
        than a normal one's. Top-p may also move, one way or the other.
        """
        if self.sampling.top_p == 1 and not 0 < self.sampling.top_k < p.shape[-1]:
            return torch.zeros_like(p[..., 0])
        deviation = self.rounding(logits)[0]
        free = probabilities(logits, replace(self.sampling, top_p=1.0, top_k=0), seen)
        kept = probabilities(logits, self.wider(float(deviation.max())), seen) > 0
        least = free.masked_fill(~kept, 1.0).amin(-1, keepdim=True)
        distance = (least.log() - free.log()).clamp(min=0) * self.sampling.temperature / deviation
        chance = (-distance).exp() * torch.where(kept, 0.5, 1.0)
        return (free * chance).masked_fill(p > 0, 0).sum(-1) / free.masked_fill(p == 0, 0).sum(-1)

    def rounding(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """How much the difference of two logits changes if it is computed another way, `[..., V]` -> two `[..., 1]`:
        its standard deviation, and the most that is put down to rounding.

        The residual stream of a model with L layers is a sum of 2 L parts. Each part is rounded by the unit roundoff of
        the dtype. Each is computed from sums of d products in float32, whose error grows as sqrt(d). Independent errors
        add as their squares do. Such a relative error is taken of the standard deviation of the logits over the
        vocabulary. The most is 8 times that. The measured standard deviation is 0.04 to 0.93 of this estimate, but a
        few large numbers make its tails heavy: the largest error was 6.6 of it.

        Then the logits are rounded themselves, those near the largest by at most its size and twice the standard
        deviation, times the unit roundoff. A repetition penalty multiplies the errors.
        """
        config = self.target.model.config.get_text_config()
        unit, accumulated = self.unit or torch.finfo(self.target.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
        relative = (2 * config.num_hidden_layers) ** 0.5 * (unit + config.hidden_size**0.5 * accumulated)
        factor = max(self.sampling.repetition_penalty, 1 / self.sampling.repetition_penalty)
        out = excluded(logits)  # They would widen the spread without bound.
        kept, numbers = (~out).sum(-1, keepdim=True), logits.masked_fill(out, 0)
        numbers = torch.where(out, numbers.sum(-1, keepdim=True) / kept, logits)
        spread = numbers.std(-1, keepdim=True) * ((logits.shape[-1] - 1) / (kept - 1).clamp(min=1)) ** 0.5
        inside, last = relative * spread, unit * (logits.amax(-1, keepdim=True).abs() + 2 * spread)
        return factor * (inside + last), factor * (8 * inside + 2 * last)

    @torch.inference_mode()
    def logit_gaps(self, prompts: Texts, texts: Texts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """How far each token is from the target's argmax, four tensors with a number for each token of all texts.

        The first: the largest logit minus the token's, 0 for the argmax and its equals. The second: how much of that
        rounding can explain. The third, bool: the token is the argmax. The fourth: the probability, at most, that it is
        not, of an exact sampler with rounded logits (as in `at_edge`).
        """
        penalty, results = Sampling(1.0, 0, 1.0, self.sampling.repetition_penalty), []
        for prompt, text in zip(prompts, texts):
            batch = Batch([prompt], [text], self.target.device)
            logits = batch.before_x(self.target.score(batch.tokens))
            # Logits after the penalty, minus a constant; a gap is at most that to the least float.
            p = distributions(self.target, logits, penalty, batch.seen(penalty, self.target.vocabulary))[0]
            scores = p.clamp(min=torch.finfo(p.dtype).tiny).log()
            gap = scores.amax(-1) - scores.gather(-1, batch.x[0])[:, 0]
            deviation, most = (part[0] for part in self.rounding(logits))
            others = ((scores - scores.amax(-1, keepdim=True)) / deviation).exp().sum(-1) - 1
            is_argmax = scores.argmax(-1) == batch.x[0, :, 0]
            results.append((gap, most[:, 0], is_argmax, (others / 2).clamp(0, 1)))
        gaps, allowed, is_argmax, chance = (torch.cat(parts).cpu() for parts in zip(*results))
        return gaps, allowed, is_argmax, chance


def wrong_tokens(gap: Tensor, allowed: Tensor, is_argmax: Tensor, chance: Tensor) -> Tensor:
    """Which tokens of greedy texts rounding does not explain: each by itself, or all but the argmax if these are too
    many; bool. The arguments are the four results of `TextScorer.logit_gaps`."""
    near_ties = ~is_argmax & (gap <= allowed)
    return ~is_argmax if too_many(near_ties.double().numpy(), chance.double().numpy()) else gap > allowed


def gap_figures(texts: Texts, gap: Tensor, allowed: Tensor, is_argmax: Tensor, chance: Tensor) -> dict[str, Any]:
    """The figures of greedy texts, of the four results of `TextScorer.logit_gaps`. near_ties: tokens that are not the
    argmax of the text read as a whole, but within rounding of it; expected: how many of these rounding explains.
    beyond: tokens beyond rounding."""
    beyond = wrong_tokens(gap, allowed, is_argmax, chance)
    return {
        "texts": len(texts),
        "tokens": gap.numel(),
        "near_ties": int((~is_argmax & ~beyond).sum()),
        "beyond": int(beyond.sum()),
        "largest_gap": float(gap.max()),
        "allowed": float(allowed.max()),
        "expected": float(chance.sum()),
    }


def greedy_figures(texts: Texts, plain: Texts, prompts: Texts, scorer: TextScorer) -> GreedyFigures:
    """`gap_figures` of greedy texts. plain: the texts of plain decoding. differing: texts that differ from them. Where
    two texts first differ, their context is the same, so there plain decoding's token is tested too."""
    figures = gap_figures(texts, *scorer.logit_gaps(prompts, texts)) | {"differing": 0}
    for prompt, text, plain_text in zip(prompts, texts, plain):
        if text != plain_text:
            fork = next(i for i, (a, b) in enumerate(zip(text, plain_text)) if a != b)
            gap, allowed, *_ = scorer.logit_gaps([prompt], [plain_text[: fork + 1]])
            figures["differing"] += 1
            figures["beyond"] += int(gap[-1] > allowed[-1])
    return cast(GreedyFigures, figures)


class FollowingTarget:
    """A target that reads as `target` does, and writes `texts`.

    guesses: int64 `[texts, tokens of the longest, PLACES]`, what was guessed for each token, -1 where nothing was. A
    guess of a chain stands at its place in the round, one of a tree at its place among its siblings.
    """

    def __init__(self, target: Model, texts: Texts) -> None:
        self.target, self.texts, self.cache_of = target, texts, target.cache_of or target
        self.guesses = np.full((len(texts), max(map(len, texts)), PLACES), -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def ends(self) -> EndOfText:
        """The `end_of_text` that ends each text at its last token."""
        counts = [itertools.count(1) for _ in self.texts]
        return lambda number, token: next(counts[number]) == len(self.texts[number])

    def first_token(self, rows: Rows, sampling: Sampling) -> None:
        self.rows = rows
        self.target.prefill(rows)
        rows.commit_first(upload([self.texts[rows.numbers[row]][0] for row in rows.fresh], rows.device))

    def score_and_verify(
        self, rows: Rows, guesses: Guesses, u: Tensor, sampling: Sampling, verify: VerificationRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        p, _, _ = self.target.score_and_verify(rows, guesses, u, sampling, verify)
        path, token = self.follow(guesses.drafts, guesses.of_drafts(), None)
        return p, (path > 0).sum(1), token

    def score_tree(
        self, tree: Tree, block: Tensor, places: Any, q: Tensor, *args: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p = self.target.score_tree(tree, block, places, q, *args)[0]
        drafts = block[:, 1:]
        path, token = self.follow(drafts, q.gather(-1, drafts[..., None])[..., 0], tree)
        return p, (path > 0).sum(1), path[:, : tree.depth], token

    def follow(self, drafts: Tensor, q_x: Tensor, tree: Tree | None) -> tuple[Tensor, Tensor]:
        """Note the guesses `drafts[B, n]` on the way of each text, and return the nodes that the text goes through,
        int64 `[B, n]` with 0 after the last, and the token after them, `[B]`. tree: None: a chain."""
        paths, tokens = [], []
        for number, guessed, is_guess in zip(self.rows.numbers, drafts.tolist(), (q_x > 0).tolist()):
            text, start, node = self.texts[number], len(self.rows.tokens[number]), 0
            path: list[int] = []
            for at in range(start, len(text)):
                below = tree.children[node] if tree else range(node + 1, min(node + 1, len(guessed)) + 1)
                children = [child for child in below if is_guess[child - 1]]
                for child in children:
                    place = tree.ranks[child - 1] if tree else child - 1
                    self.guesses[number, at, min(place, PLACES - 1)] = guessed[child - 1]
                node = next((child for child in children if guessed[child - 1] == text[at]), 0)
                if not node:
                    break
                path.append(node)
            paths.append(path + [0] * (drafts.shape[1] - len(path)))
            tokens.append(([*text[start:], 0])[len(path)])
        return upload(paths, drafts.device).long().reshape(drafts.shape), upload(tokens, drafts.device)


def guesses_along(sampler: Any, prompts: Texts, texts: Texts, sampling: Sampling, **options: Any) -> np.ndarray:
    """The guesses of a method along `texts`, which follow `prompts`: `FollowingTarget.guesses`.

    The guess that helped to draw a token depends on it: an accepted one is the token. So the method runs once more,
    with random numbers of its own, on a target that writes these texts whatever the guesses. Each guess is then drawn
    as the drafter really draws it after that text, and independently of the token that stands there.

    sampler: a partial function of `specSampling` or `treeSampling`, that wrote none of the texts: otherwise where it
    guesses could depend on them. options: its other arguments.
    """
    guesses = np.full((len(texts), max(map(len, texts)), PLACES), -1)
    context = min(model.context for model in (sampler.keywords["target"], *sampler.keywords["drafter"].models))
    # Tokens beyond the context have no guesses.
    room = [min(len(text), context - len(prompt)) for prompt, text in zip(prompts, texts)]
    waiting = [number for number in range(len(texts)) if room[number] > 0]
    while waiting:
        # In a call, each prompt needs room for the longest text. Texts whose prompts are too long for that wait.
        most = max(room[number] for number in waiting)
        group = [number for number in waiting if len(prompts[number]) + most <= context]
        waiting = [number for number in waiting if number not in group]
        target = FollowingTarget(sampler.keywords["target"], [texts[number][: room[number]] for number in group])
        rows = [prompts[number] for number in group]
        sampler(rows, target=target, max_len=most, sampling=sampling, end_of_text=target.ends(), **options)
        guesses[group, :most] = target.guesses
    return guesses
