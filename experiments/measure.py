"""What `test.py` measures with models that are loaded: speed, diversity and perplexity. Each line of results is passed
to `append` as it comes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Generator

import PPL
from decoding.rows import EndOfText
from experiments import batchSweep, diversity, sweep
from experiments.acceptance import overlaps_of
from experiments.lines import Append, Conditions, OverlapLine
from experiments.loading import LoadedModels, Prepared
from experiments.speed import Timed, Written, digest, ends_after, measure
from inputs.commandLine import visible
from inputs.progress import Bar, followed
from inputs.texts import Corpus
from methods.catalogue import METHODS, build, repeatable
from methods.samplers import Models, Sampler, guesser, rule_of
from utils import GREEDY, Sampling

# (prepared, models, names, prompts, sampling, max_len, append) -> {name: method} of those that other programs compute
OtherMethods = Callable[..., AbstractContextManager[Mapping[str, Timed]]]


def conditions_of(prepared: Prepared, mode: str, length: int, sampling: Sampling) -> Conditions:
    """The conditions of the lines of a mode. length: of the prompts."""
    return {
        "dtype": prepared.place.dtype,
        "promptLen": length,
        "mode": mode,
        "maxLen": prepared.settings.sampling.max_len_of(mode),
        "gamma": prepared.settings.gamma_of(mode),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }


def measure_speed(
    prepared: Prepared, models: LoadedModels, mode: str, append: Append, other_methods: OtherMethods
) -> None:
    """Time the methods of one mode, for each length of prompt and, in a sweep, each temperature."""
    choice, measuring = prepared.settings.sampling, prepared.settings.measuring
    temperatures = choice.temperatures if mode == "sweep" and choice.temperatures else [None]
    for length, prompts in prepared.inputs.prompts.items():
        for temperature in temperatures:
            sampling = choice.of(mode, temperature)
            conditions = conditions_of(prepared, mode, length, sampling)
            if mode == "sweep" and measuring.sweep == "batch":
                sweep_batches(prepared, models, prompts, conditions, sampling, append)
                continue
            samplers = build(measuring.groups[mode], dict(models), prepared.settings.decoding)
            if mode == "sweep":
                samplers |= start_sweep(prepared, models, prompts, conditions, sampling, append)
            if mode == "compare" and prepared.settings.decoding.acceptance is None:
                append_overlaps(prepared, dict(models), prompts, conditions, sampling, append)
            names = [name for name in measuring.groups[mode] if METHODS[name].engine]
            with other_methods(prepared, models, names, prompts, sampling, conditions["maxLen"], append) as others:
                time_group(prepared, samplers, others, prompts, conditions, sampling, append)


def time_group(
    prepared: Prepared,
    samplers: Mapping[str, Sampler],
    others: Mapping[str, Timed],
    prompts: list[list[int]],
    conditions: Conditions,
    sampling: Sampling,
    append: Append,
) -> None:
    """Time methods under the same conditions. Other programs write texts of full length, and then all methods do."""
    measuring, decoding, processes = prepared.settings.measuring, prepared.settings.decoding, prepared.processes
    repeats, batch = measuring.repeats_of(conditions["mode"]), measuring.batch or 1
    ends, max_len = None if others else prepared.ends, conditions["maxLen"]
    methods = {name: timed(sampler, max_len, sampling, ends) for name, sampler in samplers.items()} | dict(others)
    options = prompts, repeats, measuring.seed, prepared.place.device
    if batch > 1:
        measured = measure(methods, *options, batch, warm_up=1)
    else:
        measured = processes.merged(measure(methods, *options, numbers=processes.share(prompts)))
    with Bar(conditions["mode"], len(methods) * len(prompts) * repeats) as bar:
        for texts, queue in measured:
            for text in texts:
                bar.update()
                if text["seconds"] == text["seconds"]:  # nan: another program has failed.
                    text |= prepared.inputs.label_of(text["prompt"])
                    known = repeatable(text["method"], decoding)
                    append({"kind": "speed", "repeatable": known, **conditions, **text})
            if queue and queue["seconds"] == queue["seconds"]:
                append({"kind": "queue", **conditions, **queue})


def start_sweep(
    prepared: Prepared,
    models: LoadedModels,
    prompts: list[list[int]],
    conditions: Conditions,
    sampling: Sampling,
    append: Append,
) -> dict[str, Sampler]:
    """Append the costs from which theory predicts speed, and return the methods of a sweep over gamma."""
    decoding, target = prepared.settings.decoding, models["target"]
    drafter, verify = guesser(dict(models), decoding), rule_of(dict(models), decoding)
    seed, device, mapped = prepared.settings.measuring.seed, prepared.place.device, prepared.processes.mapped
    costs = sweep.costs(prompts, target, drafter, sampling, verify, conditions["maxLen"], seed, device, mapped)
    append({"kind": "costs", "of": "sweep", **conditions, **costs})
    return sweep.samplers(target, drafter, verify)


def sweep_batches(
    prepared: Prepared,
    models: LoadedModels,
    prompts: list[list[int]],
    conditions: Conditions,
    sampling: Sampling,
    append: Append,
) -> None:
    """Measure the map of batch and gamma."""
    settings, target = prepared.settings, models["target"]
    drafter = guesser(dict(models), settings.decoding)
    cells = batchSweep.samplers(target, drafter, rule_of(dict(models), settings.decoding))
    methods = {name: timed(sampler, conditions["maxLen"], sampling, None) for name, sampler in cells.items()}
    repeats, seed = settings.measuring.repeats_of("sweep"), settings.measuring.seed
    options = sampling, conditions, repeats, seed, prepared.place.device
    batchSweep.measure_batches(prompts, methods, target, drafter, *options, append)


def timed(sampler: Sampler, max_len: int, sampling: Sampling, end_of_text: EndOfText) -> Timed:
    """A sampler as `speed.measure` calls it."""

    def method(
        prompts: Sequence[list[int]], generators: Sequence[Generator], batch: int, first: int | None = None
    ) -> Written:
        ends = end_of_text if first is None else ends_after(first, batch)
        options: dict[str, Any] = {"max_len": max_len, "sampling": sampling, "batch": batch}
        return sampler(prompts, end_of_text=ends, generator=list(generators), **options)

    return method


def append_overlaps(
    prepared: Prepared,
    models: Models,
    prompts: list[list[int]],
    conditions: Conditions,
    sampling: Sampling,
    append: Append,
) -> None:
    """The overlaps of p and q at each depth of a round, of the methods of --compare that guess."""
    settings, mapped = prepared.settings, prepared.processes.mapped
    seed, max_len, device = settings.measuring.seed, conditions["maxLen"], prepared.place.device
    names = [name for name in settings.measuring.groups["compare"] if METHODS[name].lossless and METHODS[name].guesses]
    samplers = build(names, models, settings.decoding)
    for name in followed(names, "overlap of p and q", len(names)):
        counts = overlaps_of(samplers[name], prompts, device, sampling, max_len, prepared.ends, seed, mapped)
        figures = {"overlap_by_position": counts.positions, "rounds": counts.rounds, "accepted": counts.accepted}
        append(cast(OverlapLine, {"kind": "costs", "of": "overlap", **conditions, "method": name, **figures}))


def measure_diversity(prepared: Prepared, models: LoadedModels, append: Append) -> None:
    """Texts of each method and their diversity: several of each prompt if the method draws, else one."""
    settings, tokenizer, prompts = prepared.settings, prepared.tokenizer, prepared.inputs.article
    sampling, max_len = settings.sampling.of("diversity"), settings.sampling.max_len_of("diversity")
    samplers = build(settings.measuring.groups["diversity"], dict(models), settings.decoding)
    target = samplers.pop("target")
    runs = {"naive": (target, sampling)} | {name: (s, sampling) for name, s in samplers.items()}
    runs["greedy"] = target, GREEDY
    temperatures = dict.fromkeys(runs, settings.decoding.contrastive_temperature)
    temperatures |= {"greedy": 0.0, "naive": sampling.temperature, "speculative": sampling.temperature}
    batches = [
        (name, repeat)
        for name in runs
        for repeat in range(settings.measuring.repeats_of("diversity") if temperatures[name] else 1)
    ]

    def write(batch: tuple[str, int]) -> tuple[list[list[int]], list[dict[str, float]]]:
        """One text of each prompt by a method, and the figures of each."""
        name, repeat = batch
        sampler, sampling = runs[name]
        generator = torch.Generator(prepared.place.device).manual_seed(settings.measuring.seed + repeat)
        texts, _ = sampler(prompts, max_len=max_len, sampling=sampling, end_of_text=prepared.ends, generator=generator)
        return texts, [diversity.figures(p, t, tokenizer, models["target"]) for p, t in zip(prompts, texts)]

    results = prepared.processes.mapped(write, batches)
    with Bar("diversity", len(batches) * len(prompts)) as bar:
        for name, group in itertools.groupby(zip(results, batches), lambda pair: pair[1][0]):
            texts: list[list[int]] = []
            figures: list[dict[str, float]] = []
            for (batch_texts, batch_figures), _ in group:
                texts += batch_texts
                figures += batch_figures
                bar.update(len(prompts))
            append(
                {
                    "kind": "diversity",
                    "dtype": prepared.place.text_dtype,
                    "method": name,
                    "repeatable": repeatable(name, settings.decoding),
                    "input": digest(prompts),
                    "sha256": digest(texts),
                    "prompts": len(prompts),
                    "texts": len(figures),
                    "maxLen": max_len,
                    "temperature": runs[name][1].temperature,
                    "top_p": runs[name][1].top_p,
                    "each": figures,
                }
            )


ROLES = "draft", "target", "speculative"


def measure_perplexity(prepared: Prepared, models: LoadedModels, append: Append) -> None:
    """Perplexity of each corpus: per text, and of the whole corpus."""
    for corpus, passages in prepared.inputs.texts:
        if passages:
            measure_texts(prepared, models, corpus.name, passages, append)
        measure_corpus(prepared, models, corpus, append)


def measure_texts(
    prepared: Prepared, models: LoadedModels, name: str, passages: list[list[int]], append: Append
) -> None:
    """Perplexity of each of some texts, and its mean."""
    scores = prepared.processes.mapped(lambda ids: PPL.perplexities(ids, models["target"], models["draft"]), passages)
    perplexities = list(followed(scores, f"perplexity per text, {visible(name, '')}", len(passages)))
    append(
        {
            "kind": "ppl",
            "of": "text",
            "dtype": prepared.place.text_dtype,
            "sentenceLimit": prepared.settings.texts.sentence_limit,
            "corpus": name,
            "texts": len(perplexities),
            "tokens": sum(map(len, passages)),
            "input": digest(passages),
            "each": perplexities,
            "ppl": {role: math.fsum(ppl[role] for ppl in perplexities) / len(perplexities) for role in ROLES},
        }
    )


def measure_corpus(prepared: Prepared, models: LoadedModels, corpus: Corpus, append: Append) -> None:
    """Perplexity of a whole corpus, read in windows. A document of one token has none."""
    tokenizer, window, stride = prepared.tokenizer, prepared.inputs.window, prepared.inputs.stride
    documents = [text for text in corpus.documents if len(tokenizer(text, verbose=False)["input_ids"]) > 1]
    if not documents:
        return
    target, draft, mapped = models["target"], models["draft"], prepared.processes.mapped
    with Bar(f"corpus perplexity, {visible(corpus.name, '')}", None, " tokens") as bar:
        parts = [
            PPL.calculate_ppl_corpus(text, tokenizer, target, draft, window, stride, bar.update, mapped)
            for text in documents
        ]
    totals = {role: sum((part[role] for part in parts), PPL.CorpusPerplexity()) for role in ROLES}
    append(
        {
            "kind": "ppl",
            "of": "corpus",
            "dtype": prepared.place.text_dtype,
            "sentenceLimit": prepared.settings.texts.sentence_limit,
            "corpus": corpus.name,
            "tokens": totals["target"].tokens,
            "documents": len(documents),
            "input": digest(documents),
            "window": window,
            "stride": stride,
            "ppl": {role: {"token": t.token_ppl, "word": t.word_ppl, "byte": t.byte_ppl} for role, t in totals.items()},
        }
    )
