"""What `test.py` measures with models that are loaded: speed, diversity and perplexity. Each line of results is passed
to `append` as it comes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Generator

import PPL
from decoding.rows import EndOfText
from decoding.verification import RULES as VERIFICATIONS
from experiments import diversity, sweep
from experiments.acceptance import OverlapCounts, overlaps_of
from experiments.batchSweep import measure_batches
from experiments.lines import Append, Conditions, QueueFigures, TimedText
from experiments.loading import LoadedModels, Prepared
from experiments.speed import Timed, TimedQueue, Written, digest, ends_after, measure, measure_queues
from inputs.commandLine import visible
from inputs.progress import Bar, followed
from inputs.texts import Corpus
from methods.catalogue import METHODS, build, repeatable
from methods.samplers import Models, Sampler, guesser
from utils import GREEDY, Sampling


def measure_speed(prepared: Prepared, models: LoadedModels, mode: str, append: Append) -> None:
    """Time the methods of one mode, for each length of prompt and, in a sweep, each temperature."""
    choice = prepared.settings.sampling
    temperatures = choice.temperatures if mode == "sweep" and choice.temperatures else [None]
    for length in prepared.inputs.prompts:
        for temperature in temperatures:
            sampling = choice.of(mode, temperature)
            conditions: Conditions = {
                "dtype": prepared.place.dtype,
                "promptLen": length,
                "mode": mode,
                "maxLen": choice.max_len_of(mode),
                "gamma": prepared.settings.gamma_of(mode),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
            }
            time_group(prepared, models, conditions, sampling, append)


def time_group(
    prepared: Prepared, models: LoadedModels, conditions: Conditions, sampling: Sampling, append: Append
) -> None:
    """Time the methods of one mode under the same conditions, and measure what theory needs beside the times."""
    measuring, decoding = prepared.settings.measuring, prepared.settings.decoding
    mode, max_len, prompts = conditions["mode"], conditions["maxLen"], prepared.inputs.prompts[conditions["promptLen"]]
    roles: Models = dict(models)
    samplers = build(measuring.groups[mode], roles, decoding)
    if mode == "sweep" and measuring.sweep == "batch":
        target, verify = models["target"], VERIFICATIONS[decoding.verification]
        parts = prompts, target, guesser(roles, decoding), verify, sampling, conditions
        measure_batches(*parts, measuring.repeats_of(mode), measuring.seed, prepared.place.device, append)
        return
    if mode == "sweep":
        drafter, verify = guesser(roles, decoding), VERIFICATIONS[decoding.verification]
        samplers |= sweep.samplers(models["target"], drafter, verify)
        seed, device, mapped = measuring.seed, prepared.place.device, prepared.processes.mapped
        costs = sweep.costs(prompts, models["target"], drafter, sampling, verify, max_len, seed, device, mapped)
        append({"kind": "costs", **conditions, **costs})
    if mode == "compare":
        for name, overlaps in overlaps_by_method(prepared, roles, prompts, sampling):
            append(
                {
                    "kind": "overlap",
                    **conditions,
                    "method": name,
                    "overlap_by_position": overlaps.positions,
                    "rounds": overlaps.rounds,
                    "accepted": overlaps.accepted,
                }
            )

    repeats = measuring.repeats_of(mode)
    with Bar(mode, len(samplers) * len(prompts) * repeats) as bar:
        for texts, queues in timings(prepared, samplers, prompts, repeats, max_len, sampling):
            for text in texts:
                text |= prepared.inputs.label_of(text["prompt"])
                append({"kind": "speed", "repeatable": repeatable(text["method"], decoding), **conditions, **text})
                bar.update()
            for queue in queues:
                append({"kind": "queue", **conditions, **queue})


def timings(
    prepared: Prepared,
    samplers: Mapping[str, Sampler],
    prompts: list[list[int]],
    repeats: int,
    max_len: int,
    sampling: Sampling,
) -> Iterator[tuple[list[TimedText], list[QueueFigures]]]:
    """The figures of each timed text by itself; with --batch, those of the texts of each queue, and of the queue."""
    seed, batch, device = (
        prepared.settings.measuring.seed,
        prepared.settings.measuring.batch or 1,
        prepared.place.device,
    )

    def alone(sampler: Sampler) -> Timed:
        def method(prompt: list[int], generator: Generator, first: int | None = None) -> Written:
            end_of_text: EndOfText = prepared.ends if first is None else ends_after(first)
            return sampler([prompt], max_len=max_len, sampling=sampling, end_of_text=end_of_text, generator=generator)

        return method

    def in_batches(sampler: Sampler) -> TimedQueue:
        def method(
            prompts: Sequence[list[int]], generators: Sequence[Generator], batch: int, first: int | None = None
        ) -> Written:
            ends: EndOfText = prepared.ends if first is None else ends_after(first, batch)
            options: dict[str, Any] = {"max_len": max_len, "sampling": sampling, "batch": batch}
            return sampler(prompts, end_of_text=ends, generator=generators, **options)

        return method

    if batch > 1:
        queues = {name: in_batches(sampler) for name, sampler in samplers.items()}
        for texts, queue in measure_queues(queues, prompts, batch, repeats, seed, device):
            yield texts, [queue]
        return
    methods = {name: alone(sampler) for name, sampler in samplers.items()}
    numbers = prepared.processes.share(prompts)
    for text in prepared.processes.merged(measure(methods, prompts, repeats, seed, device, numbers=numbers)):
        yield [text], []


def overlaps_by_method(
    prepared: Prepared, models: Models, prompts: list[list[int]], sampling: Sampling
) -> Iterator[tuple[str, OverlapCounts]]:
    """The methods of --compare that guess, and the overlaps of p and q at each depth of a round."""
    settings, mapped = prepared.settings, prepared.processes.mapped
    max_len, end_of_text = settings.sampling.max_len_of("compare"), prepared.ends
    names = [name for name in settings.measuring.groups["compare"] if METHODS[name].lossless and METHODS[name].guesses]
    samplers, seed, device = build(names, models, settings.decoding), settings.measuring.seed, prepared.place.device
    for name in followed(names, "overlap of p and q", len(names)):
        yield name, overlaps_of(samplers[name], prompts, device, sampling, max_len, end_of_text, seed, mapped)


def measure_diversity(prepared: Prepared, models: LoadedModels, append: Append) -> None:
    """Texts of each method and how varied they are: several of each prompt if the method draws, else one."""
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
            "kind": "ppl_text",
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
            "kind": "ppl_corpus",
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
