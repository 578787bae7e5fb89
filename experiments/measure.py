"""What `test.py` measures with models that are loaded: speed, diversity and perplexity. Each line of results is passed
to `append` as it comes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

import PPL
from decoding.verification import RULES as VERIFICATIONS
from engine.progress import Bar, followed
from experiments import diversity, sweep
from experiments.acceptance import Overlaps, overlaps_of
from experiments.prepare import LoadedModels, Prepared
from experiments.speed import Timed, digest, measure
from inputs.commandLine import visible
from methods.catalogue import METHODS
from methods.makers import LOOKED_UP, Models, Sampler, Wrap, guesser
from methods.selection import build, repeatable
from utils import GREEDY, Sampling

Append = Callable[..., object]  # takes one line of results by keywords


def measure_speed(prepared: Prepared, models: LoadedModels, mode: str, append: Append) -> None:
    """Time the methods of one mode, for each length of prompt."""
    for length, prompts in prepared.prompts.items():

        def line(length: int = length, **figures: object) -> None:
            append(dtype=prepared.dtype, promptLen=length, **figures)

        time_group(prepared, models, mode, prompts, line)


def time_group(prepared: Prepared, models: LoadedModels, mode: str, prompts: list[list[int]], append: Append) -> None:
    """Time the methods of one mode on `prompts`; `--sweep` does so for each temperature."""
    settings, tokenizer, device = prepared.settings, prepared.tokenizer, prepared.device
    measuring, decoding = settings.measuring, settings.decoding
    max_len, repeats = settings.sampling.max_len_of(mode), measuring.repeats_of(mode)
    usual = LOOKED_UP if decoding.lookup else 4
    gamma = (
        usual if mode == "speed" and decoding.draft_length == "fixed" else None
    )  # Elsewhere each method has its own.
    for temperature in settings.sampling.temperatures or [None] if mode == "sweep" else [None]:
        sampling = settings.sampling.of(mode, temperature)
        roles: Models = dict(models)
        samplers = build(measuring.groups[mode], roles, decoding)
        shown = {
            "mode": mode,
            "maxLen": max_len,
            "gamma": decoding.gamma or gamma,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if mode == "sweep":
            drafter, verify = guesser(roles, decoding), VERIFICATIONS[decoding.verification]
            samplers |= sweep.samplers(models["target"], drafter, verify)
            costs = sweep.costs(
                prompts,
                models["target"],
                drafter,
                sampling,
                verify,
                max_len,
                measuring.seed,
                device,
                prepared.processes.mapped,
            )
            append(kind="costs", **shown, **costs)

        if mode == "compare":
            for name, found in overlaps(prepared, roles, prompts, sampling):
                counts = {"rounds": found.rounds, "accepted": found.accepted}
                append(kind="overlap", **shown, method=name, overlap_by_position=found.positions, **counts)

        def timed(sampler: Sampler) -> Timed:
            return lambda prompt, generator: sampler([prompt], max_len, sampling, tokenizer.eos_token_id, generator)  # noqa: B023

        works = {name: timed(sampler) for name, sampler in samplers.items()}
        with Bar(mode, len(works) * len(prompts) * repeats) as bar:
            own = prepared.processes.share(prompts)
            lines = measure(works, prompts, repeats, measuring.seed, device, numbers=own)
            for line in prepared.processes.merged(lines):
                append(kind="speed", repeatable=repeatable(line["method"], decoding), **shown, **line)
                bar.update()


def overlaps(
    prepared: Prepared, models: Models, prompts: list[list[int]], sampling: Sampling
) -> Iterator[tuple[str, Overlaps]]:
    """The methods of --compare that guess, and the overlaps of p and q at each depth of a round."""
    settings = prepared.settings
    names = [name for name in settings.measuring.groups["compare"] if METHODS[name].lossless and name != "target"]
    for name in followed(names, "overlap of p and q", len(names)):

        def make(wrap: Wrap, name: str = name) -> Sampler:
            return METHODS[name].make(models, settings.decoding, wrap)

        max_len, ends = settings.sampling.max_len_of("compare"), prepared.tokenizer.eos_token_id
        given = models["target"], sampling, max_len, ends, settings.measuring.seed, prepared.processes.mapped
        yield name, overlaps_of(make, prompts, *given)


def measure_diversity(prepared: Prepared, models: LoadedModels, append: Append) -> None:
    """Texts of each method and how varied they are: several of each prompt if the method draws, else one."""
    settings, tokenizer, prompts = prepared.settings, prepared.tokenizer, prepared.article
    sampling, max_len = settings.sampling.of("diversity"), settings.sampling.max_len_of("diversity")
    samplers = build(settings.measuring.groups["diversity"], dict(models), settings.decoding)
    runs = {"naive": (samplers.pop("target"), sampling)} | {name: (s, sampling) for name, s in samplers.items()}
    runs["greedy"] = runs["naive"][0], GREEDY
    heats = {"greedy": 0.0, "naive": sampling.temperature, "speculative": sampling.temperature}
    repeats = {
        name: settings.measuring.repeats_of("diversity")
        if heats.get(name, settings.decoding.contrastive_temperature)
        else 1
        for name in runs
    }

    def write(batch: tuple[str, int]) -> tuple[list[list[int]], list[dict[str, float]]]:
        """One text of each prompt by a method, and the figures of each."""
        name, repeat = batch
        sampler, how = runs[name]
        generator = torch.Generator(prepared.device).manual_seed(settings.measuring.seed + repeat)
        texts, _ = sampler(prompts, max_len, how, tokenizer.eos_token_id, generator)
        return texts, [diversity.figures(p, t, tokenizer, models["target"]) for p, t in zip(prompts, texts)]

    batches = [(name, repeat) for name in runs for repeat in range(repeats[name])]
    done = prepared.processes.mapped(write, batches)
    with Bar("diversity", len(batches) * len(prompts)) as bar:
        for name, group in itertools.groupby(zip(done, batches), lambda pair: pair[1][0]):
            each, written, sampling = [], [], runs[name][1]
            for (texts, figures), _ in group:
                written += texts
                each += figures
                bar.update(len(prompts))
            append(
                kind="diversity",
                dtype=prepared.text_dtype,
                method=name,
                repeatable=repeatable(name, settings.decoding),
                input=digest(prompts),
                sha256=digest(written),
                prompts=len(prompts),
                texts=len(each),
                maxLen=max_len,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                each=each,
            )


ROLES = "draft", "target", "speculative"


def measure_perplexity(prepared: Prepared, models: LoadedModels, append: Append) -> None:
    """Perplexity of each corpus: per text, and of the whole corpus."""
    for corpus, passages in prepared.texts:
        shown = visible(corpus.name, "")
        if passages:
            scored = prepared.processes.mapped(
                lambda ids: PPL.perplexities(ids, models["target"], models["draft"]), passages
            )
            title = f"perplexity per text, {shown}"
            each = list(followed(scored, title, len(passages)))
            append(
                kind="ppl_text",
                dtype=prepared.text_dtype,
                sentenceLimit=prepared.settings.texts.sentence_limit,
                corpus=corpus.name,
                texts=len(each),
                tokens=sum(map(len, passages)),
                input=digest(passages),
                each=each,
                ppl={role: math.fsum(e[role] for e in each) / len(each) for role in ROLES},
            )
        tokenizer = prepared.tokenizer
        documents = [text for text in corpus.documents if len(tokenizer(text, verbose=False)["input_ids"]) > 1]
        if documents:
            measure_corpus(prepared, models, corpus.name, documents, append)


def measure_corpus(prepared: Prepared, models: LoadedModels, name: str, documents: list[str], append: Append) -> None:
    """Perplexity of a whole corpus, read in windows."""
    window, stride = prepared.window, prepared.stride
    with Bar(f"corpus perplexity, {visible(name, '')}", None, " tokens") as bar:
        parts = [
            PPL.calculate_ppl_corpus(
                text,
                prepared.tokenizer,
                models["target"],
                models["draft"],
                window,
                stride,
                bar.update,
                prepared.processes.mapped,
            )
            for text in documents
        ]
    totals = {role: sum((part[role] for part in parts), PPL.CorpusPerplexity()) for role in ROLES}
    append(
        kind="ppl_corpus",
        dtype=prepared.text_dtype,
        sentenceLimit=prepared.settings.texts.sentence_limit,
        corpus=name,
        tokens=totals["target"].tokens,
        documents=len(documents),
        input=digest(documents),
        window=window,
        stride=stride,
        ppl={role: {"token": t.token_ppl, "word": t.word_ppl, "byte": t.byte_ppl} for role, t in totals.items()},
    )
