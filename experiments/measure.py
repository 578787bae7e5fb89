"""What `test.py` measures: speed, diversity and perplexity. Each line of results is passed to `append` as it comes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Generator
from transformers import PreTrainedTokenizerBase

import PPL
from engine.cachedModel import CachedModel
from engine.cpuModel import CpuModel
from experiments import sweep
from experiments.loading import Inputs, LoadedModels
from experiments.schema import FIGURES, Append, BatchCostsLine, Conditions, CostsLine, OverlapLine
from experiments.settings import BATCHES
from experiments.speed import Timed, digest, ends_after, time_texts
from experiments.theory import overlaps_of
from inputs.commandLine import visible
from inputs.progress import Bar, followed
from methods.catalogue import METHODS, build, repeatable
from methods.samplers import Sampler, guesser, rule_of
from utils import Sampling

ROLES = "draft", "target", "speculative"
TEXTS, FEWEST = 2, 4  # of a queue of --sweep batch: TEXTS for each row of its batch, FEWEST at least
# (inputs, models, names, prompts, sampling, max_len, append) -> {name: method} of those that other programs compute
OtherMethods = Callable[..., AbstractContextManager[Mapping[str, Timed]]]


def measure_speed(inputs: Inputs, models: LoadedModels, mode: str, append: Append, other_methods: OtherMethods) -> None:
    """Time the methods of one mode, for each length of prompt and, in a sweep, each temperature."""
    choice, measuring, decoding = inputs.settings.sampling, inputs.settings.measuring, inputs.settings.decoding
    names, seed, spread = measuring.groups[mode], measuring.seed, inputs.processes.mapped
    temperatures = choice.temperatures if mode == "sweep" and choice.temperatures else [None]
    for (length, prompts), temperature in [(item, t) for item in inputs.prompts.items() for t in temperatures]:
        sampling = choice.of(mode, temperature)
        conditions = inputs.conditions_of(mode, length, sampling)
        max_len = conditions["maxLen"]
        if mode == "sweep":
            target, verify = models["target"], rule_of(models, decoding)
            drafter, in_batches = guesser(models, decoding), measuring.sweep == "batch"
            samplers = sweep.samplers(target, drafter, verify, in_batches)
            if in_batches:
                methods = {name: as_timed(sampler, max_len, sampling) for name, sampler in samplers.items()}
                for batch in BATCHES:
                    costs = sweep.step_costs(prompts[0], target, drafter, sampling, max(sweep.BATCH_GAMMAS), batch)
                    costs |= {"kind": "costs", "of": "batch", **conditions, "batch": batch}
                    append(cast(BatchCostsLine, costs))
                    texts = list(itertools.islice(itertools.cycle(prompts), max(FEWEST, TEXTS * batch)))
                    time_group(inputs, methods, texts, conditions, append, batch)
                continue
            # The costs from which theory predicts speed.
            costs = sweep.sweep_costs(inputs, prompts, target, drafter, verify, sampling, max_len)
            append(cast(CostsLine, {"kind": "costs", "of": "sweep", **conditions, **costs}))
        else:
            samplers = build(names, models, decoding)
        if mode == "compare" and decoding.acceptance is None:
            # The overlaps of p and q at each depth of a round, of methods that learn nothing for the timed texts.
            guessing = [name for name in names if METHODS[name].lossless and METHODS[name].guesses]
            untimed = build(guessing, models, decoding).items()
            for name, sampler in followed(untimed, "overlap of p and q", len(untimed)):
                figures = overlaps_of(sampler, prompts, inputs.device, sampling, max_len, seed, spread)
                append(cast(OverlapLine, {"kind": "costs", "of": "overlap", **conditions, "method": name, **figures}))
        programs = [name for name in names if METHODS[name].engine]
        with other_methods(inputs, models, programs, prompts, sampling, max_len, append) as others:
            methods = {name: as_timed(sampler, max_len, sampling) for name, sampler in samplers.items()}
            queues = measuring.batch if measuring.batch != 1 else None
            time_group(inputs, methods | dict(others), prompts, conditions, append, queues)


def time_group(
    inputs: Inputs,
    methods: Mapping[str, Timed],
    prompts: list[list[int]],
    conditions: Conditions,
    append: Append,
    batch: int | None,
) -> None:
    """Time methods under the same conditions. batch: of queues; of those of a sweep the texts have no lines."""
    measuring, processes, mode = inputs.settings.measuring, inputs.processes, conditions["mode"]
    repeats = measuring.repeats_of(mode)
    options = methods, prompts, repeats, measuring.seed, inputs.device
    if batch:
        measured = time_texts(*options, batch, warm_up=1)
    else:
        measured = processes.merged(time_texts(*options, numbers=processes.share(prompts)))
    of_scores = inputs.settings.decoding.sampling_of_scores
    of_contrasts: Any = {**conditions, "temperature": of_scores.temperature, "top_p": of_scores.top_p}

    def used(name: str) -> Conditions:
        """The conditions of a method's texts: contrastive decoding takes no flags of sampling."""
        return of_contrasts if name in METHODS and METHODS[name].contrasts else conditions

    with Bar(mode, len(methods) * len(prompts) * repeats) as bar:
        for texts, queue in measured:
            for text in texts:
                bar.update()
                if text["seconds"] == text["seconds"] and not (batch and mode == "sweep"):  # nan: a program has failed.
                    if inputs.questions:
                        question, _ = inputs.turns[text["prompt"]]
                        text["category"], text["question"] = question.category, inputs.questions.index(question)
                    if processes.count > 1:
                        text["rank"] = text["prompt"] % processes.count  # `Processes.share`
                    known = repeatable(text["method"], inputs.settings.decoding)
                    append({"kind": "speed", "repeatable": known, **used(text["method"]), **text})
            if queue and queue["seconds"] == queue["seconds"]:
                append({"kind": "queue", **used(queue["method"]), **queue})


def as_timed(sampler: Sampler, max_len: int, sampling: Sampling) -> Timed:
    """A sampler as `speed.time_texts` calls it. No token ends a text: all have `max_len`, so that methods are compared
    on texts of one length."""
    return lambda prompts, generators, batch, first=None: sampler(
        prompts,
        max_len=max_len,
        sampling=sampling,
        end_of_text=None if first is None else ends_after(first, batch),
        generator=generators,
        batch=batch,
    )


def ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    """How often each n-gram of words occurs in `text`. Words are separated by white space."""
    tokens = text.split()
    return Counter(zip(*(tokens[i:] for i in range(n))))


def entropy(text: str, n: int) -> float:
    """The entropy of the n-grams of a text, in bits; 0 if it has none."""
    counts = ngrams(text, n)
    total = counts.total()
    return math.fsum(c / total * math.log2(total / c) for c in counts.values())


def distinct(text: str, n: int) -> float:
    """The number of different n-grams over the number of all n-grams; 0 if there are none."""
    counts = ngrams(text, n)
    return len(counts) / counts.total() if counts else 0.0


def repetition(text: str, n: int = 4) -> float:
    """The share of n-grams that occurred before in the text; 0 if there are none."""
    return 1 - distinct(text, n) if ngrams(text, n) else 0.0


def diversity_figures(
    prompt: list[int], tokens: list[int], tokenizer: PreTrainedTokenizerBase, target: CachedModel
) -> dict[str, float]:
    """All FIGURES of one continuation (`prompt`, `tokens`: token ids). N-grams are counted over prompt and continuation
    together, as in the article. perplexity: of the continuation under `target`, at temperature 1 without filters."""
    text = tokenizer.decode(prompt + tokens, skip_special_tokens=True)
    log_probs = PPL.token_log_probs(torch.tensor(prompt + tokens), target, first=len(prompt))["target"]
    values = (
        *(entropy(text, n) for n in (1, 2, 3)),
        *(distinct(text, n) for n in (1, 2)),
        repetition(text),
        PPL.exp(-log_probs.double().mean().item()),
    )
    return dict(zip(FIGURES, values))


def measure_diversity(inputs: Inputs, models: LoadedModels, append: Append) -> None:
    """Texts of each method and their diversity: several of each prompt if the method draws, else one."""
    settings, tokenizer, prompts = inputs.settings, inputs.tokenizer, inputs.article
    sampling, max_len = settings.sampling.of("diversity"), settings.sampling.max_len_of("diversity")
    samplers = build(settings.measuring.groups["diversity"], models, settings.decoding)
    target, repeats = samplers.pop("target"), settings.measuring.repeats_of("diversity")
    runs = {"naive": (target, sampling)}
    of_scores = settings.decoding.sampling_of_scores
    runs |= {name: (s, of_scores if METHODS[name].contrasts else sampling) for name, s in samplers.items()}
    runs["greedy"] = target, replace(sampling, temperature=0.0)
    counts_of = {name: repeats if sampling.temperature else 1 for name, (_, sampling) in runs.items()}
    with Bar("diversity", sum(counts_of.values()) * len(prompts)) as bar:
        for name, (sampler, sampling) in runs.items():

            def write(repeat: int) -> tuple[list[list[int]], list[dict[str, float]]]:
                """One text of each prompt, and the figures of each."""
                generator = Generator(inputs.device).manual_seed(settings.measuring.seed + repeat)
                options = {"max_len": max_len, "sampling": sampling, "end_of_text": inputs.ends}
                texts, _ = sampler(prompts, generator=generator, **options)
                return texts, [diversity_figures(p, t, tokenizer, models["target"]) for p, t in zip(prompts, texts)]

            texts, figures = list[list[int]](), list[dict[str, float]]()
            for written, measured in inputs.processes.mapped(write, range(counts_of[name])):
                texts += written
                figures += measured
                bar.update(len(prompts))
            known = {"repeatable": repeatable(name, settings.decoding), "input": digest(prompts)}
            counts = {"prompts": len(prompts), "texts": len(figures), "maxLen": max_len}
            drawn_at = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            line: Any = {"kind": "diversity", "dtype": inputs.text_dtype, "method": name, "sha256": digest(texts)}
            append(line | known | counts | drawn_at | {"each": figures})


def measure_perplexity(inputs: Inputs, models: LoadedModels, append: Append) -> None:
    """Perplexity of each text of a corpus, and of the corpus read in windows. A document of one token has none."""
    spread = inputs.processes.mapped
    for corpus, passages in inputs.texts:
        target, draft = models["target"], models["draft"]
        limit = inputs.settings.texts.sentence_limit
        by_kernels = all(isinstance(model, CpuModel) for model in (target, draft))  # On a GPU texts are scored eagerly.
        shared = {"dtype": inputs.text_dtype, "compiled": by_kernels, "sentenceLimit": limit, "corpus": corpus.name}
        name = visible(corpus.name, "")
        if passages:
            scores = spread(lambda ids: PPL.perplexities(ids, target, draft), passages)
            each = list(followed(scores, f"perplexity per text, {name}", len(passages)))
            means = {role: math.fsum(ppl[role] for ppl in each) / len(each) for role in ROLES}
            counts = {"texts": len(each), "tokens": sum(map(len, passages)), "input": digest(passages)}
            line: Any = {"kind": "ppl", "of": "text", **shared, **counts, "each": each, "ppl": means}
            append(line)
        documents = [text for text in corpus.documents if len(inputs.tokenizer(text, verbose=False)["input_ids"]) > 1]
        if not documents:
            continue
        with Bar(f"corpus perplexity, {name}", None, " tokens") as bar:
            options = inputs.tokenizer, target, draft, inputs.window, inputs.stride, bar.update, spread
            parts = [PPL.calculate_ppl_corpus(text, *options) for text in documents]
        totals = {role: sum((part[role] for part in parts), PPL.CorpusPerplexity()) for role in ROLES}
        by_unit = {role: {"token": t.token_ppl, "word": t.word_ppl, "byte": t.byte_ppl} for role, t in totals.items()}
        counts = {"tokens": totals["target"].tokens, "documents": len(documents), "input": digest(documents)}
        windows = {"window": inputs.window, "stride": inputs.stride}
        line = {"kind": "ppl", "of": "corpus", **shared, **counts, **windows, "ppl": by_unit}
        append(line)
