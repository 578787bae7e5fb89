"""`Proof`: the experiment of `test.py --lossless`, with models that are loaded.

It tests texts drawn by every method, texts of samplers with a planted mistake, and greedy texts (evidence.py and
scorer.py). Each line of results is passed on as it comes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.progress import followed
from experiments.measure import Append
from experiments.prepare import LoadedModels, Prepared
from experiments.processes import ALONE, Processes
from inputs.devices import pick_dtype
from lossless.evidence import Evidence, limit_of, seen_by
from lossless.plantedMistakes import MISTAKES, Mistake
from lossless.plantedTrees import TREE_MISTAKES, TreeMistake
from lossless.scorer import Scorer, greedy_figures
from methods.catalogue import METHODS
from methods.makers import Decoding, Models, Sampler, guesser
from methods.selection import build, repeatable
from regrSampling import regrSampling
from utils import Sampling

FIRST = 2  # Texts of a planted mistake in the first test; each later test has twice as many.
SHOWN, SHOWN_TOKENS = "replace from p", 6400  # The mistake in the figure, and the tokens its histogram needs.
GREEDY_TOKENS = 50  # Tokens of a greedy text at most.


def other_dtype(dtype: str, device: str) -> str:
    """The dtype in which greedy texts are compared in addition to `dtype`: a 16-bit one, or float32 if that is one."""
    short = pick_dtype(device)
    return "float32" if dtype != "float32" else "bfloat16" if short == "float32" else short


@dataclass(frozen=True)
class Trial:
    """What is proved: which methods, how they decode and sample, and on how much text.

    names: of methods. max_len: tokens of each text. rows: texts in a batch. tokens: the least number of tokens to test
        of each method.
    """

    names: Sequence[str]
    decoding: Decoding
    sampling: Sampling
    max_len: int
    rows: int
    tokens: int
    seed: int

    @property
    def batches(self) -> int:
        """Batches of texts by each method."""
        return -(-self.tokens // (self.rows * self.max_len))


class Proof:
    """Tests whether methods are lossless.

    models: in `dtype`. prompts: token ids, used in turn. append: takes each line of results by keywords. processes:
        those that share the work.
    """

    def __init__(
        self,
        trial: Trial,
        models: LoadedModels,
        prompts: Sequence[list[int]],
        device: str,
        dtype: str,
        append: Append,
        processes: Processes = ALONE,
    ) -> None:
        self.trial, self.loaded, self.prompts, self.processes = trial, models, prompts, processes
        self.models: Models = dict(models)
        self.device, self.dtype, self.append = device, dtype, append
        self.limit = limit_of(len(trial.names))
        self.shown = {
            "temperature": trial.sampling.temperature,
            "top_p": trial.sampling.top_p,
            "maxLen": trial.max_len,
            "dtype": dtype,
            "limit": self.limit,
        }

    def choose(self, first: int, count: int) -> list[list[int]]:
        """The prompts of the texts numbered first, ..., first + count - 1."""
        return [self.prompts[i % len(self.prompts)] for i in range(first, first + count)]

    def write(self, sampler: Sampler, scorer: Scorer, first: int, count: int) -> Evidence:
        """`Evidence` of `count` new texts, numbered from `first`. The numbers decide prompts and seed.

        No text ends early: u is uniform over all tokens only if the tokens do not decide how many there are.
        """
        chosen = self.choose(first, count)
        generator = torch.Generator(self.device).manual_seed(self.trial.seed + 1_000_003 * first)
        texts, _ = sampler(chosen, self.trial.max_len, scorer.sampling, None, generator)
        return scorer.evidence(chosen, texts, first)

    def scorer(self, sampling: Sampling, order: str = "draft") -> Scorer:
        """The `Scorer` that orders the vocabulary by the model of role `order`, if that has the target's tokens."""
        other = order == "draft" and self.trial.decoding.translation is not None
        return Scorer(self.loaded["target"], None if other else self.loaded.get(order), sampling, self.trial.seed)

    def test_methods(self) -> None:
        """Test texts drawn by each method, at least `tokens` tokens."""
        trial = self.trial
        samplers = build(trial.names, self.models, trial.decoding)
        scorers = {name: self.scorer(trial.sampling, METHODS[name].guesser) for name in samplers}

        def write(batch: tuple[str, int]) -> tuple[Evidence, float]:
            """One batch of texts by a method, and the seconds it took."""
            (name, number), start = batch, time.perf_counter()
            found = self.write(samplers[name], scorers[name], number * trial.rows, trial.rows)
            return found, time.perf_counter() - start

        batches = [(name, number) for name in samplers for number in range(trial.batches)]
        done = followed(self.processes.mapped(write, batches), "lossless", len(batches))
        for name, group in itertools.groupby(zip(done, batches), lambda pair: pair[1][0]):
            parts, seconds = zip(*(result for result, _ in group))
            self.append(
                kind="lossless",
                method=name,
                **self.shown,
                seconds=math.fsum(seconds),
                repeatable=repeatable(name, trial.decoding),
                **sum(parts[1:], parts[0]).figures(),
            )

    def find_mistakes(self) -> None:
        """Test samplers with a planted mistake."""
        # Guesses from the text so far have q = 1: none is ever dropped.
        names = [name for name in MISTAKES if name != "dropped guess" or "draft" in self.models]
        if any(METHODS[name].guesses_tree(self.trial.decoding) for name in self.trial.names):
            names += TREE_MISTAKES
        found = self.processes.mapped(self.find_mistake, names)
        for line in followed(found, "planted mistakes", len(names)):
            self.append(kind="power", **self.shown, **line)

    def find_mistake(self, name: str) -> dict[str, Any]:
        """The figures of a sampler with a planted mistake, tested on twice as many texts each time until a test
        fails."""
        trial = self.trial
        mistake: Mistake | TreeMistake = MISTAKES[name] if name in MISTAKES else TREE_MISTAKES[name]
        most = trial.batches * trial.rows  # texts
        tested, drafter = mistake.tested(trial.sampling), guesser(self.models, trial.decoding)
        gamma, threshold = trial.decoding.gamma or 4, trial.decoding.draft_threshold
        sampler = mistake.sampler(self.loaded["target"], drafter, gamma, tested, threshold)
        scorer = self.scorer(tested)
        found = self.write(sampler, scorer, 0, min(FIRST, most))
        while not (seen := seen_by(found.figures(), self.limit)) and len(found.u) < most:
            done = len(found.u)
            found += self.write(sampler, scorer, done, min(done, trial.rows, most - done))
        line = found.figures() | {"mistake": name, "what": mistake.what, "seen_by": seen, "shown": name == SHOWN}
        missing = min(-(-SHOWN_TOKENS // trial.max_len), most) - len(found.u)
        if name == SHOWN and missing > 0:
            found += self.write(sampler, scorer, len(found.u), missing)
            line["counts"] = found.figures()["counts"]
        return line

    def compare_greedy(self) -> None:
        """Compare greedy texts of each method with those of plain decoding, in the dtype of the models."""
        sampling = replace(self.trial.sampling, temperature=0.0, top_p=1.0, top_k=0)
        chosen, target = self.choose(0, self.trial.rows), self.loaded["target"]
        count = min(self.trial.max_len, GREEDY_TOKENS)
        plain, _ = regrSampling(chosen, target, count, sampling)
        scorer = self.scorer(sampling)
        names = ["target", *(name for name in self.trial.names if name != "target")]
        samplers = build(names[1:], self.models, self.trial.decoding)

        def compare(name: str) -> dict[str, Any]:
            """The figures of a method's texts."""
            texts = plain if name == "target" else samplers[name](chosen, count, sampling)[0]
            return greedy_figures(texts, plain, chosen, scorer)

        found = followed(self.processes.mapped(compare, names), "greedy", len(names))
        for figures, name in zip(found, names):
            clocked = {} if name == "target" else {"repeatable": repeatable(name, self.trial.decoding)}
            self.append(kind="greedy", method=name, dtype=self.dtype, **clocked, **figures)


def proof_of(prepared: Prepared, models: LoadedModels, dtype: str, append: Append) -> Proof:
    """The `Proof` that the settings ask for, with models in `dtype`."""
    settings = prepared.settings
    trial = Trial(
        settings.measuring.groups["lossless"],
        settings.decoding,
        settings.sampling.of("lossless"),
        settings.sampling.max_len_of("lossless"),
        settings.rows,
        settings.tokens,
        settings.measuring.seed,
    )
    prompts = sum(prepared.prompts.values(), [])
    return Proof(trial, models, prompts, prepared.device, dtype, append, prepared.processes)


def prove(prepared: Prepared, models: LoadedModels, append: Append) -> bool:
    """Test drawn texts, planted mistakes and greedy texts of the methods to be proved. Returns whether texts were
    drawn."""
    proof = proof_of(prepared, models, prepared.text_dtype, append)
    drawn = bool(proof.trial.sampling.temperature)
    if drawn:
        proof.test_methods()
        proof.find_mistakes()
    proof.compare_greedy()
    return drawn


def prove_greedy(prepared: Prepared, append: Append) -> None:
    """Test greedy texts in another dtype than `prove`. Loads the models."""
    dtype = other_dtype(prepared.text_dtype, prepared.device)
    proof_of(prepared, prepared.load(dtype), dtype, append).compare_greedy()
