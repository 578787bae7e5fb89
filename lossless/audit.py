"""The audit of texts of any origin: are they the target's, under these sampling settings?

Drawn texts are tested with the statistics of evidence.py, greedy ones token by token. `test.py --audit` and the rows of
other engines in the benchmark are judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from typing import Any, cast

import numpy as np
import torch
from scipy.stats import chi2, kstest, kstwo, norm
from torch import Tensor

from experiments.loading import Inputs, LoadedModels
from experiments.processes import SINGLE, Processes
from experiments.schema import Append, AuditFigures, EvidenceFigures, GreedyAuditFigures, Line, Power, TokenPlace
from experiments.speed import digest
from inputs.models import DTYPES
from inputs.progress import followed
from inputs.texts import decoded
from lossless.evidence import CONFIDENCE, LISTED, RETOKENISED, SEEN, Evidence, limit_of, seen_by
from lossless.scorer import Texts, TextScorer, gap_figures, guesses_along, wrong_tokens
from methods.catalogue import build
from utils import Sampling

ROWS = 64  # texts of a piece of work
LEAST, FITTED = 400, 6400  # tokens at least and at most that are tested for other settings


@dataclass(frozen=True)
class Auditor:
    """Judges texts.

    target, order: as in `TextScorer`. unit: the unit roundoff of the arithmetic that wrote the texts. limit: the
    p-value below which a test rejects them: each rejects an exact sampler's text with at most that probability.
    guessing: the method that guesses along the texts, a partial function as in `guesses_along`; None: no guesses are
    known. batch: along how many texts it guesses at a time. encoded: whether each text came without token ids, so that
    a few impossible tokens in it are no reason to reject; empty: all had them.
    """

    target: Any
    order: Any
    unit: float
    seed: int = 0
    limit: float = limit_of(1)
    processes: Processes = SINGLE
    guessing: Any = None
    batch: int = ROWS
    encoded: Sequence[bool] = ()

    def drawn(self, prompts: Texts, texts: Texts, sampling: Sampling, lines: Sequence[int] = ()) -> AuditFigures:
        """The figures of texts that are drawn with `sampling`, and the conclusions. lines: the name of each text, as in
        a file; none: from 1."""
        evidence = self.evidence(prompts, texts, sampling)
        figures = evidence.figures()
        tests, fits = self.rejecting(evidence, figures), []
        fitted = max(1, int(np.searchsorted(np.cumsum([len(text) for text in texts]), FITTED)))
        for other in others(sampling) if tests and figures["tokens"] >= LEAST else ():
            by_other = self.evidence(prompts[:fitted], texts[:fitted], other)
            if not self.rejecting(by_other, by_other.figures()):
                fits.append(asdict(other))
        findings = {
            "unit": self.unit,
            "limit": self.limit,
            "order": "p" if self.order is None else "q / p",
            "seen_by": tests,
            "places": places(np.argwhere(evidence.beyond_rounding), texts, lines),
            "alike": alike(evidence.u),
            "power": power_of(evidence, self.limit),
            "variation": variation_of(evidence),
            "fits": fits,
        }
        return cast(AuditFigures, figures | asdict(sampling) | findings)

    def rejecting(self, evidence: Evidence, figures: EvidenceFigures) -> list[str]:
        """The tests that reject the texts."""
        impossible, tokens = (array.sum(1) for array in (evidence.beyond_rounding, ~np.isnan(evidence.surprise)))
        encoded = np.array(self.encoded or [False] * len(tokens))[: len(tokens)]
        few = not impossible[~encoded].any() and impossible[encoded].sum() <= RETOKENISED * tokens[encoded].sum()
        return [test for test in seen_by(figures, self.limit) if test != "impossible" or not few]

    def greedy(self, prompts: Texts, texts: Texts, sampling: Sampling, lines: Sequence[int] = ()) -> GreedyAuditFigures:
        """The figures of greedy texts: how many tokens are not the argmax, and are beyond what rounding explains."""
        scorer = TextScorer(self.target, None, sampling, self.seed, self.unit)

        def gaps(part: slice) -> tuple[Tensor, ...]:
            return scorer.logit_gaps(prompts[part], texts[part])

        found = list(map(torch.cat, zip(*self.mapped(gaps, len(texts)))))
        index = [(row, position) for row, text in enumerate(texts) for position in range(len(text))]
        wrong = [index[i] for i in wrong_tokens(*found).nonzero()[:, 0].tolist()]
        findings = {"repetition_penalty": sampling.repetition_penalty, "unit": self.unit}
        figures = gap_figures(texts, *found) | findings | {"places": places(wrong, texts, lines)}
        return cast(GreedyAuditFigures, figures)

    def evidence(self, prompts: Texts, texts: Texts, sampling: Sampling) -> Evidence:
        """`Evidence` of the texts, whichever process scores them."""
        scorer = TextScorer(self.target, self.order, sampling, self.seed, self.unit)

        def score(part: slice) -> Evidence:
            rows, generator = (prompts[part], texts[part]), torch.Generator(self.target.device)
            generator.manual_seed(self.seed + part.start)
            options = {"generator": generator, "batch": self.batch}
            guesses = self.guessing and guesses_along(self.guessing, *rows, sampling, **options)
            return scorer.evidence(*rows, part.start, guesses)

        parts = list(self.mapped(score, len(texts)))
        return sum(parts[1:], parts[0])

    def mapped(self, work: Any, texts: int) -> Any:
        """`work` for ROWS texts at a time, as slices, distributed over the processes."""
        parts = [slice(first, first + ROWS) for first in range(0, texts, ROWS)]
        return followed(self.processes.mapped(work, parts), "audit", len(parts))


def places(tokens: Any, texts: Texts, lines: Sequence[int]) -> list[TokenPlace]:
    """The first of `tokens`, (text, position) each: the line of each text, the position in the text and the token's
    id, both from 1 but for the id."""
    return [
        {"line": lines[row] if lines else int(row) + 1, "position": int(at) + 1, "token": int(texts[row][at])}
        for row, at in tokens[:LISTED]
    ]


def alike(u: np.ndarray) -> float:
    """The p-value of "the numbers u at one position of the texts are independent". u: as in `Evidence`. Texts that were
    drawn with one seed share their random numbers: the mean of u at a position then varies too much."""
    counts = (~np.isnan(u)).sum(0)
    several = counts > 1
    if several.sum() < 2 or np.nanmin(u) == np.nanmax(u):  # Equal numbers have no variance to compare with.
        return 1.0
    # About their own mean, since that is 0.5 only if the texts are the target's.
    away = (np.nanmean(u[:, several], 0) - np.nanmean(u)) ** 2 / np.nanvar(u)
    return float(chi2.sf((counts[several] * away).sum(), several.sum() - 1))


def power_of(evidence: Evidence, limit: float) -> Power:
    """The deviations from the target that these texts would have shown with probability SEEN.

    surprise: of the mean of -log p(x) from the entropy, in nats a token: a normal number with this mean crosses the
    place where Chernoff's bound is the limit; nan where no token could vary. variation: of the distribution of u from
    the uniform one, at the place where it is largest. The share of tokens below that place is a binomial one, and its
    standard deviation is at most 1 / (2 sqrt(n)).
    """
    possible = ~np.isnan(evidence.u)
    n, margin = max(1, int(possible.sum())), norm.ppf(SEEN)
    deviation = evidence.variance[possible].sum() ** 0.5 or np.nan
    return {
        "surprise": float(((2 * np.log(2 / limit)) ** 0.5 + margin) * deviation / n),
        "variation": float(min(1, kstwo.isf(limit, n) + margin / (2 * n**0.5))),
    }


def variation_of(evidence: Evidence) -> list[float]:
    """How far the sampler is from p as the order of the vocabulary shows it: [least, most], with a confidence of
    CONFIDENCE.

    Let F be the distribution of u, averaged over the contexts of the tokens. The distance is the largest difference
    between F and the uniform distribution. The total variation distance of the sampler from p, averaged over contexts,
    is at least that. It can be more: differences of several contexts can cancel.

    The empirical distribution of u differs from F by a martingale, whose covariance is at most the Brownian bridge's.
    So for many tokens the error is at most Kolmogorov's, although tokens of a text depend on each other. A token with
    p(x) = 0 comes last in the order: its u is 1, also if rounding explains it.
    """
    u = np.where(evidence.lost, 1.0, evidence.u)
    u = u[~np.isnan(u)]
    distance = kstest(u, "uniform").statistic if len(u) else 0.0
    error = kstwo.isf(1 - CONFIDENCE, max(1, len(u)))
    return [max(0.0, float(distance - error)), min(1.0, float(distance + error))]


def others(sampling: Sampling) -> list[Sampling]:
    """Settings that an engine may have applied instead: one filter or several left out."""
    left_out = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    changes = [name for name, value in left_out.items() if getattr(sampling, name) != value]
    subsets = chain.from_iterable(combinations(changes, count) for count in range(1, len(changes) + 1))
    return [replace(sampling, **{name: cast(Any, left_out[name]) for name in names}) for names in subsets]


def audit(inputs: Inputs, models: LoadedModels, append: Append) -> None:
    """Judge the texts of `--audit`, and append the line of results."""
    settings, texts, written_in = inputs.settings, inputs.audited, inputs.settings.measuring.written_in
    sampling, order, guessing = settings.sampling.of("audit"), None, None
    if inputs.translation is None:  # A draft with a tokenizer of its own may have no room for the texts.
        order = models.get("draft")
        guessing = build([settings.guesses_along], dict(models), settings.decoding)[settings.guesses_along]
    auditor = Auditor(
        models["target"],
        order,
        unit=max(torch.finfo(DTYPES[dtype]).eps for dtype in (written_in, inputs.text_dtype)) / 2,  # of both readers
        seed=settings.measuring.seed,
        processes=inputs.processes,
        guessing=guessing,
        batch=settings.rows,
        encoded=[text.was_text for text in texts],
    )
    rows = [text.prompt for text in texts], [text.tokens for text in texts]
    judge = auditor.drawn if sampling.temperature else auditor.greedy
    figures = judge(*rows, sampling, [text.line for text in texts])
    named = {place["token"] for place in figures["places"]}
    source = {
        "kind": "lossless",
        "test": "audit" if sampling.temperature else "greedyAudit",
        "file": str(settings.measuring.audit),
        "sha256": digest(rows),
        "dtype": inputs.text_dtype,
        "written_in": written_in,
        "after_end": sum(bool(inputs.end_tokens & set(text.tokens[:-1])) for text in texts),
        "retokenised": sum(auditor.encoded),
        "pieces": {str(token): decoded([token], inputs.tokenizer) for token in named},
    }
    append(cast(Line, source | figures))
