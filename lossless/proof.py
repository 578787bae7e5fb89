"""`Proof`: the experiment of `test.py --lossless`, with models that are loaded.

It tests texts drawn by every method, texts of samplers with a planted mistake, and greedy texts (evidence.py and
scorer.py). Each line of results is passed on as it comes.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import cast

import torch

from experiments.lines import Append, GreedyFigures, GreedyLine, MistakeFigures, TrialConditions
from experiments.prepare import LoadedModels, Prepared
from inputs.devices import pick_dtype
from inputs.progress import followed
from lossless.evidence import Evidence, limit_of, seen_by
from lossless.plantedMistakes import MISTAKES, TREE_MISTAKES
from lossless.scorer import TextScorer, greedy_figures
from methods.catalogue import METHODS, build, repeatable
from methods.samplers import Models, Sampler, guesser
from regrSampling import regrSampling
from utils import Sampling

FIRST = 2  # Texts of a planted mistake in the first test; each later test has twice as many.
SHOWN, SHOWN_TOKENS = "replace from p", 6400  # The mistake in the figure, and the tokens its histogram needs.
GREEDY_TOKENS = 50  # Tokens of a greedy text at most.


def other_dtype(dtype: str, device: str) -> str:
    """The dtype in which greedy texts are compared in addition to `dtype`: a 16-bit one, or float32 if that is one."""
    short = pick_dtype(device)
    return "float32" if dtype != "float32" else "bfloat16" if short == "float32" else short


class Proof:
    """Tests whether methods are lossless, as the settings of a run ask for.

    models: in `dtype`. append: takes each line of results.
    """

    def __init__(self, prepared: Prepared, models: LoadedModels, dtype: str, append: Append) -> None:
        settings = prepared.settings
        self.names, self.decoding = settings.measuring.groups["lossless"], settings.decoding
        self.sampling, self.max_len = settings.sampling.of("lossless"), settings.sampling.max_len_of("lossless")
        self.rows, self.seed = settings.rows, settings.measuring.seed
        self.batches = math.ceil(settings.tokens / (self.rows * self.max_len))  # of texts by each method
        self.prompts = sum(prepared.prompts.values(), [])  # token ids, used in turn
        self.processes, self.device = prepared.processes, prepared.device
        self.loaded, self.models = models, cast(Models, dict(models))
        self.dtype, self.append = dtype, append
        self.limit = limit_of(len(self.names))
        self.shown: TrialConditions = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "maxLen": self.max_len,
            "dtype": dtype,
            "limit": self.limit,
        }

    def choose(self, first: int, count: int) -> list[list[int]]:
        """The prompts of the texts numbered first, ..., first + count - 1."""
        return [self.prompts[i % len(self.prompts)] for i in range(first, first + count)]

    def write(self, sampler: Sampler, scorer: TextScorer, first: int, count: int) -> Evidence:
        """`Evidence` of `count` new texts, numbered from `first`. The numbers decide prompts and seed.

        No text ends early: u is uniform over all tokens only if the tokens do not decide how many there are.
        """
        prompts = self.choose(first, count)
        generator = torch.Generator(self.device).manual_seed(self.seed + 1_000_003 * first)
        texts, _ = sampler(prompts, max_len=self.max_len, sampling=scorer.sampling, generator=generator)
        return scorer.evidence(prompts, texts, first)

    def scorer(self, sampling: Sampling, order: str = "draft") -> TextScorer:
        """The `TextScorer` that orders the vocabulary by the model of role `order`, if that has the target's tokens."""
        other_tokens = order == "draft" and self.decoding.translation is not None
        order_model = None if other_tokens else self.loaded.get(order)
        return TextScorer(self.loaded["target"], order_model, sampling, self.seed)

    def test_methods(self) -> None:
        """Test texts drawn by each method, at least `tokens` tokens."""
        samplers = build(self.names, self.models, self.decoding)
        scorers = {name: self.scorer(self.sampling, METHODS[name].guesser) for name in samplers}

        def write(batch: tuple[str, int]) -> tuple[Evidence, float]:
            """One batch of texts by a method, and the seconds it took."""
            (name, number), start = batch, time.perf_counter()
            evidence = self.write(samplers[name], scorers[name], number * self.rows, self.rows)
            return evidence, time.perf_counter() - start

        batches = [(name, number) for name in samplers for number in range(self.batches)]
        done = followed(self.processes.mapped(write, batches), "lossless", len(batches))
        for name, group in itertools.groupby(zip(done, batches), lambda pair: pair[1][0]):
            parts, seconds = zip(*(result for result, _ in group))
            evidence: Evidence = sum(parts[1:], parts[0])
            self.append(
                {
                    "kind": "lossless",
                    "method": name,
                    **self.shown,
                    "seconds": math.fsum(seconds),
                    "repeatable": repeatable(name, self.decoding),
                    **evidence.figures(),
                }
            )

    def find_mistakes(self) -> None:
        """Test samplers with a planted mistake."""
        drafter = guesser(self.models, self.decoding)
        names = [name for name, mistake in MISTAKES.items() if isinstance(drafter, mistake.drafters)]
        if any(METHODS[name].guesses_tree(self.decoding) for name in self.names):
            names += TREE_MISTAKES
        done = self.processes.mapped(self.find_mistake, names)
        for line in followed(done, "planted mistakes", len(names)):
            self.append({"kind": "power", **self.shown, **line})

    def find_mistake(self, name: str) -> MistakeFigures:
        """The figures of a sampler with a planted mistake, tested on twice as many texts each time until a test
        fails."""
        mistake, most = (MISTAKES | TREE_MISTAKES)[name], self.batches * self.rows  # texts
        tested, drafter = mistake.tested(self.sampling), guesser(self.models, self.decoding)
        gamma, threshold = self.decoding.gamma_of("fixed"), self.decoding.draft_threshold
        sampler = mistake.sampler(self.loaded["target"], drafter, gamma, tested, threshold)
        scorer = self.scorer(tested)
        evidence = self.write(sampler, scorer, 0, min(FIRST, most))
        while not (tests := seen_by(evidence.figures(), self.limit)) and len(evidence.u) < most:
            written = len(evidence.u)
            evidence += self.write(sampler, scorer, written, min(written, self.rows, most - written))
        figures, shown = evidence.figures(), name == SHOWN
        missing = min(math.ceil(SHOWN_TOKENS / self.max_len), most) - len(evidence.u)
        if shown and missing > 0:
            evidence += self.write(sampler, scorer, len(evidence.u), missing)
            figures["counts"] = evidence.figures()["counts"]
        return {
            **figures,
            "mistake": name,
            "what": mistake.what,
            "seen_in": mistake.seen_in,
            "seen_by": tests,
            "shown": shown,
        }

    def compare_greedy(self) -> None:
        """Compare greedy texts of each method with those of plain decoding, in the dtype of the models."""
        sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        prompts, count = self.choose(0, self.rows), min(self.max_len, GREEDY_TOKENS)
        plain, _ = regrSampling(prompts, self.loaded["target"], count, sampling)
        scorer = self.scorer(sampling)
        names = ["target", *(name for name in self.names if name != "target")]
        samplers = build(names[1:], self.models, self.decoding)

        def compare(name: str) -> GreedyFigures:
            """The figures of a method's texts."""
            texts = plain if name == "target" else samplers[name](prompts, max_len=count, sampling=sampling)[0]
            return greedy_figures(texts, plain, prompts, scorer)

        done = followed(self.processes.mapped(compare, names), "greedy", len(names))
        for figures, name in zip(done, names):
            line: GreedyLine = {"kind": "greedy", "method": name, "dtype": self.dtype, **figures}
            if name != "target":
                line["repeatable"] = repeatable(name, self.decoding)
            self.append(line)


def prove(prepared: Prepared, models: LoadedModels, append: Append) -> bool:
    """Test drawn texts, planted mistakes and greedy texts of the methods to be proved. Returns whether texts were
    drawn."""
    proof = Proof(prepared, models, prepared.text_dtype, append)
    drawn = bool(proof.sampling.temperature)
    if drawn:
        proof.test_methods()
        proof.find_mistakes()
    proof.compare_greedy()
    return drawn


def prove_greedy(prepared: Prepared, append: Append) -> None:
    """Test greedy texts in another dtype than `prove`. Loads the models."""
    dtype = other_dtype(prepared.text_dtype, prepared.device)
    Proof(prepared, prepared.load(dtype), dtype, append).compare_greedy()
