"""`Trial`: the experiment of `test.py --lossless`, with models that are loaded.

It tests texts drawn by every method, texts of samplers with a planted mistake, and greedy texts (evidence.py and
scorer.py).

In float32, p is computed from the whole text at once, without the KV cache, so that a mistake in the cache shows. In a
16-bit dtype that would round otherwise than the sampler did. There the same model reads the text again as it wrote it.

Rules that choose by measured times (`CostAware`) use all their shapes in turn here. Times would choose plain decoding
where guesses do not pay, and then nothing but plain decoding would be tested.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from decoding.lengthRules import CostAware, Search
from decoding.rows import Rows
from decoding.tree import Tree
from engine.cachedModel import CachedModel
from experiments.loading import Inputs, LoadedModels
from experiments.schema import Append, GreedyFigures, GreedyLine, Line, TrialConditions
from inputs.devices import pick_dtype
from inputs.progress import followed
from lossless.evidence import BINS, Evidence, limit_of, seen_by
from lossless.mistakes import MISTAKES
from lossless.scorer import Texts, TextScorer, greedy_figures, guesses_along
from methods.catalogue import METHODS, build
from methods.samplers import Models, Sampler
from utils import Sampling, upload

FIRST = 2  # Texts of a planted mistake in the first test; each later test has twice as many, at most a batch more.
SHOWN_TOKENS = 6400  # Tokens of each method and of each planted mistake in the figure.
GREEDY_TOKENS = 50  # Tokens of a greedy text at most.


@torch.inference_mode()
def logits_as_written(
    model: CachedModel, width: int, prompts: Texts, texts: Texts, batch: int | None = None
) -> list[Tensor]:
    """The logits `[n, V]` of each of `texts`, computed as a sampler computes them: the prompts by prefill, then the
    texts in blocks of `width` tokens through the KV cache, with the graphs that a compiled model has for them. They are
    not rounded: the C++ decoder draws from logits in float32, whatever the dtype of its weights.

    The texts are of one length. They are read `batch` at a time, as they were written: graphs are for a number of rows.
    """
    results: list[Tensor] = []
    batch = batch or len(texts)
    for part in (slice(first, first + batch) for first in range(0, len(texts), batch)):
        rows = Rows(prompts[part], len(texts[0]), [model])
        at, logits = rows.lengths[:, None], [model.prefill(rows)[:, None]]
        read = upload(texts[part], model.device)[:, :-1]
        for block in read.split(width, 1) if read.shape[1] else ():
            logits.append(model.forward(block, at + torch.arange(block.shape[1], device=model.device)))
            at = at + block.shape[1]
        results += torch.cat(logits, 1).unbind()
    return results


class InTurn(Search):
    """A `Search` that reads no clock: each shape is used for a pair of rounds, first plain decoding, then from the
    largest down. So flags and seed fix the texts. first: the pair to begin with."""

    def __init__(self, shapes: Sequence[Tree], first: int) -> None:
        super().__init__(shapes)
        self.rounds = 2 * first

    def learn(self, tree: Tree, seconds: float) -> None:
        pass

    def next(self, rate: Callable[[Tree], float]) -> Tree:
        return self.shapes[-(self.rounds // 2) % len(self.shapes)]


class Trial:
    """Tests whether methods are lossless, with the settings of a run.

    models: in `dtype`. append: takes each line of results as it comes.
    """

    def __init__(self, inputs: Inputs, models: LoadedModels, dtype: str, append: Append) -> None:
        settings = inputs.settings
        self.inputs, self.models, self.dtype, self.append = inputs, cast(Models, models), dtype, append
        self.names, self.decoding = settings.measuring.groups["lossless"], settings.decoding
        self.sampling, self.max_len = settings.sampling.of("lossless"), settings.sampling.max_len_of("lossless")
        self.texts, self.seed = settings.texts_at_once, settings.measuring.seed  # texts of a call of a method
        self.rows, self.batch = settings.rows, settings.measuring.batch  # of these, decoded at a time; the flag
        self.batches = math.ceil(settings.tokens / (self.texts * self.max_len))  # of texts by each method
        self.mapped = inputs.processes.mapped
        self.limit = limit_of(len(self.names) * len({"float32", settings.models.dtype or "float32"}))
        self.in_figure = min(math.ceil(SHOWN_TOKENS / self.max_len), self.batches * self.texts)  # texts
        self.conditions: TrialConditions = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "maxLen": self.max_len,
            "dtype": dtype,
            "limit": self.limit,
        }
        if self.batch is not None:
            self.conditions["batch"] = self.rows

    def samplers(self, names: Sequence[str], first: int = 0) -> dict[str, Sampler]:
        """{name: sampler} of these methods. Shapes that a sampler would choose by measured times take turns, from
        the pair of rounds numbered `first` on."""
        samplers = build(names, self.models, self.decoding)
        for sampler in samplers.values():
            for rule in getattr(sampler, "keywords", {}).values():
                if isinstance(rule, CostAware):  # Its searches are for numbers of rows that are powers of two.
                    powers = range(self.rows.bit_length() + 1)
                    rule.searches = {1 << power: InTurn(rule.shapes, first) for power in powers}
        return samplers

    def choose(self, first: int, count: int) -> list[list[int]]:
        """The prompts of the texts numbered first, ..., first + count - 1."""
        prompts = self.inputs.rows
        return [prompts[i % len(prompts)] for i in range(first, first + count)]

    def write(self, sampler: Sampler, guessing: Any, scorer: TextScorer, first: int, count: int) -> Evidence:
        """`Evidence` of `count` new texts, numbered from `first`. The numbers decide prompts and seed.

        guessing: the same method once more, which guesses along the texts; None: it guesses nothing. No text ends
        early: u is uniform over all tokens only if the tokens do not decide how many there are.
        """
        prompts, guesses = self.choose(first, count), None
        generator = torch.Generator(self.inputs.device).manual_seed(self.seed + 1_000_003 * first)
        options: Any = {"sampling": scorer.sampling, "generator": generator, "batch": self.batch}
        texts, _ = sampler(prompts, max_len=self.max_len, **options)
        if guessing is not None:
            guesses = guesses_along(guessing, prompts, texts, **options)
        logits = None
        if self.dtype != "float32":
            width = self.decoding.gamma_of("fixed") + 1
            logits = logits_as_written(scorer.target, width, prompts, texts, self.batch)
        return scorer.evidence(prompts, texts, first, guesses, logits)

    def scorer(self, sampling: Sampling, order: str = "draft") -> TextScorer:
        """The `TextScorer` that orders the vocabulary by the model of role `order`, if that has the target's tokens."""
        other_tokens = order == "draft" and self.decoding.translation is not None
        order_by = None if other_tokens else self.models.get(order)
        return TextScorer(self.models["target"], order_by, sampling, self.seed)

    def shown_counts(self, evidence: Evidence) -> dict[str, Any]:
        """The histogram for the figure. A token whose p is 0 has an infinite q / p, so its u is 1."""
        u = np.where(evidence.lost, 1.0, evidence.u)[: self.in_figure]
        return {"counts_shown": np.histogram(u[~np.isnan(u)], BINS, (0, 1))[0].tolist(), "tokens_shown": u.size}

    def test_methods(self) -> None:
        """Test texts drawn by each method, at least `tokens` tokens."""
        scorers = {name: self.scorer(self.sampling, METHODS[name].guesser) for name in self.names}

        def write(batch: tuple[str, int]) -> tuple[Evidence, float]:
            (name, number), start = batch, time.perf_counter()
            # A sampler may learn from its texts. So each batch has another: what it learns is the same in any process.
            sampler, guessing = (self.samplers([name], number)[name] for _ in range(2))
            again = guessing if METHODS[name].guesses else None
            evidence = self.write(sampler, again, scorers[name], number * self.texts, self.texts)
            return evidence, time.perf_counter() - start

        batches = [(name, number) for name in self.names for number in range(self.batches)]
        done = followed(self.mapped(write, batches), "lossless", len(batches))
        for name in self.names:
            parts, seconds = zip(*itertools.islice(done, self.batches))
            evidence: Evidence = sum(parts[1:], parts[0])
            head = {"kind": "lossless", "test": "drawn", "method": name, **self.conditions}
            head["seconds"] = math.fsum(seconds)
            self.append(cast(Line, head | evidence.figures() | self.shown_counts(evidence)))

    def find_mistakes(self, order: str = "draft") -> None:
        """Test the methods with a planted mistake: each mistake in the first method that it fits, or in all. order: see
        `scorer`."""
        samplers, planted = self.samplers(self.names), list[tuple[str, str]]()
        for name, mistake in MISTAKES.items():
            fitting = [method for method, sampler in samplers.items() if mistake.fits(sampler)]
            if self.rows < self.texts or not mistake.queue:
                planted += [(method, name) for method in fitting[: None if mistake.everywhere else 1]]

        def find(pair: tuple[str, str]) -> dict[str, Any]:
            """The figures of (method, mistake), tested on twice as many texts each time, at most a batch more,
            until a test fails."""
            (method, name), most = pair, self.batches * self.texts
            mistake = MISTAKES[name]
            tested = mistake.tested(self.sampling)
            samplers = [self.samplers([method])[method] for _ in range(2)]
            flawed, guessing = (mistake.planted(sampler, tested) for sampler in samplers)
            parts = flawed, guessing, self.scorer(tested, order)
            evidence = self.write(*parts, 0, min(2 * self.rows if mistake.queue else FIRST, most))
            while not (tests := seen_by(evidence.figures(), self.limit)) and len(evidence.u) < most:
                written = len(evidence.u)
                evidence += self.write(*parts, written, min(written, self.texts, most - written))
            figures = evidence.figures()
            while (missing := self.in_figure - len(evidence.u)) > 0:
                evidence += self.write(*parts, len(evidence.u), min(missing, self.texts))
            names = {"mistake": name, "method": method, "what": mistake.what, "seen_in": mistake.seen_in}
            ordered = {"order": order if parts[2].order is not None else "p"}
            return {**figures, **self.shown_counts(evidence), **names, **ordered, "seen_by": tests}

        for line in followed(self.mapped(find, planted), "planted mistakes", len(planted)):
            self.append(cast(Line, {"kind": "lossless", "test": "mistake", **self.conditions, **line}))

    def compare_greedy(self) -> None:
        """Compare greedy texts of each method with those of plain decoding, in the dtype of the models."""
        sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        # The greedy text of a prompt is one text, however often it is written.
        prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, self.choose(0, self.texts)))]
        names, count = ["target", *(name for name in self.names if name != "target")], min(self.max_len, GREEDY_TOKENS)
        samplers, scorer = self.samplers(names), TextScorer(self.models["target"], None, sampling)
        plain: list[list[int]] = []  # without a queue
        for first in range(0, len(prompts), self.rows):
            plain += samplers["target"](prompts[first : first + self.rows], max_len=count, sampling=sampling)[0]

        def compare(name: str) -> GreedyFigures:
            texts, _ = samplers[name](prompts, max_len=count, sampling=sampling, batch=self.batch)
            return greedy_figures(texts, plain, prompts, scorer)

        done = followed(self.mapped(compare, names), "greedy", len(names))
        for figures, name in zip(done, names):
            line: GreedyLine = {"kind": "lossless", "test": "greedy", "method": name, "dtype": self.dtype, **figures}
            self.append(line)


def run_trials(inputs: Inputs, models: LoadedModels, append: Append) -> None:
    """Test the methods in float32 with `models`, and then in a second dtype, with models that are loaded when these are
    released. There texts are drawn too if --dtype names it; else only greedy texts are compared. Planted mistakes are
    tested in float32, or not at all if --lossless has the word `quick`."""
    settings = inputs.settings
    named, drawn = settings.models.dtype, bool(settings.sampling.of("lossless").temperature)
    trial = Trial(inputs, models, "float32", append)
    if drawn:
        trial.test_methods()
    trial.compare_greedy()
    del trial
    if drawn and settings.measuring.plants:
        if settings.models.compile:  # Mistakes are planted in models that run eagerly.
            models.clear()
            models = inputs.load("float32")
        Trial(inputs, models, "float32", append).find_mistakes()
    models.clear()
    # On a processor without bfloat16 that dtype is slow, and text in it is compared all the same.
    fast = pick_dtype(inputs.device).replace("float32", "bfloat16")
    dtype = fast if named in (None, "float32") else named
    models = (inputs.load_as_timed if dtype == named else inputs.load)(dtype)
    trial = Trial(inputs, models, dtype, append)
    if drawn and dtype == named:
        trial.test_methods()
    trial.compare_greedy()
