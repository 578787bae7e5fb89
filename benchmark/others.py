"""`other_methods`: methods of other programs, checked and ready to be timed beside this project's methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Generator

from benchmark.engines.engineProcess import PeerError, start_engine
from benchmark.engines.peers import MODELS, ROWS, Peer, Source, StartProcess
from benchmark.engines.textCheck import CHECKED_BATCH, GREEDY_TOKENS, TEXT_TOKENS, TextChecker, stored_model
from benchmark.generation import LibraryMethod
from decoding.record import Record
from engine.kvCache import cache_bytes
from experiments.loading import Inputs, LoadedModels
from experiments.schema import Append, EngineLine
from experiments.speed import Timed, Written
from inputs.auditTexts import write_texts
from inputs.devices import available_memory
from inputs.models import model_version
from inputs.progress import followed
from lossless.evidence import limit_of
from methods.catalogue import METHODS
from utils import Sampling

Other = Peer | LibraryMethod
DRAFTING = "target", "draft"  # roles of models that other programs use


@contextmanager
def other_methods(
    inputs: Inputs,
    models: LoadedModels,
    names: Sequence[str],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    max_len: int,
    append: Append,
    start_process: StartProcess = start_engine,
) -> Iterator[dict[str, Timed]]:
    """{method: the function that `speed.measure` times} of those among `names` that other programs compute. A line of
    results describes each, with the reason if it is left out. They run until the context ends."""
    settings = inputs.settings
    rows: dict[str, Other] = {}
    batch = settings.measuring.batch or 1
    for name in names:
        engine, _, kind = name.partition(":")
        if engine == "generate":
            gamma = settings.decoding.gamma_of("fixed")
            rows[name] = LibraryMethod(kind, inputs.library, models["target"].vocabulary, gamma)
        else:
            rows[name] = Peer(ROWS[name], inputs.dtype, batch)
    try:
        if rows:
            ready(inputs, models, rows, prompts, sampling, max_len, append, start_process)
        yield {name: timed(row, max_len, sampling) for name, row in rows.items() if not row.failed}
        for name, row in rows.items():
            if row.failed:  # also of those that failed while they were timed
                print(f"{name} is left out: {row.failed}")
    finally:
        for row in rows.values():
            row.close()


def timed(row: Other, max_len: int, sampling: Sampling) -> Timed:
    """A method of another program as `speed.measure` calls it. If it fails, its times are nan from then on."""

    def method(
        prompts: Sequence[list[int]], generators: Sequence[Generator], batch: int, first: int | None = None
    ) -> Written:
        if row.failed is None:
            seeds = [generator.initial_seed() for generator in generators]
            try:
                return row.write(prompts, min(first or max_len, max_len), sampling, seeds, batch)
            except PeerError as error:
                row.fail(error)
        return [[0]] * len(prompts), [Record([float("nan")], [1], [0], [0]) for _ in prompts]

    return method


def ready(
    inputs: Inputs,
    models: LoadedModels,
    rows: dict[str, Other],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    max_len: int,
    append: Append,
    start_process: StartProcess,
) -> None:
    """Load and check the rows. With synthetic acceptance, texts are not the target's and are not checked."""
    alpha, seed = inputs.settings.decoding.acceptance, inputs.settings.measuring.seed
    sources = {role: source_of(inputs, models, role) for role in inputs.folders if role in DRAFTING}
    references = {
        role: stored_model(source.folder, models["target"].vocabulary, inputs.device)
        for role, source in sources.items()
    }
    checker = TextChecker(references["target"], references.get("draft"), sampling, limit_of(len(rows)), seed)
    gamma, memory = inputs.settings.decoding.gamma_of("fixed"), available_memory("cpu")
    context = max(map(len, prompts)) + max(max_len, GREEDY_TOKENS, TEXT_TOKENS) + 2 * gamma + 8
    for name, row in followed(list(rows.items()), "other programs", len(rows)):
        greedy = drawn = None

        def write(
            prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], row: Other = row
        ) -> Any:
            batch = min(CHECKED_BATCH, row.batch) if isinstance(row, Peer) else 1
            return row.write(prompts, count, sampling, seeds, batch)[0]

        try:
            if isinstance(row, Peer):
                # What an engine maps from a file counts as available, and must stay in memory all the same.
                free = memory - sum(other.memory for other in rows.values() if isinstance(other, Peer))
                row.load(sources, gamma, context, free, start_process, alpha)
            elif alpha is not None and METHODS[name].guesses:
                raise PeerError("it cannot accept guesses by a coin")
            if alpha is None or not METHODS[name].guesses:
                greedy = checker.greedy(write, prompts, row.unit_roundoff)
                if sampling.temperature:  # Greedy text says nothing of sampling.
                    drawn = checker.sampled(write, prompts, row.unit_roundoff)
                    if folder := inputs.settings.output.texts:
                        write_texts(folder / f"{name.replace(':', '-')}.jsonl", checker.drawn)
        except (PeerError, ValueError, OSError) as error:
            row.fail(error)
        line: EngineLine = {
            "kind": "lossless",
            "test": "engine",
            "method": name,
            "precision": row.precision,
            "quantised": isinstance(row, Peer) and row.row.quantised,
            "version": row.version,
            "settings": dict(row.settings),
            "failed": row.failed,
            "greedy": greedy,
            "drawn": drawn,
        }
        append(line)


def source_of(inputs: Inputs, models: LoadedModels, role: str) -> Source:
    """A model of this run, as engines convert it."""
    model, folder = models[role], inputs.folders[role]
    slot = cache_bytes(model.model.config.get_text_config(), 1, model.dtype)
    converted = MODELS / f"{folder.name}-{model_version(folder).replace(':', '-')}"
    return Source(folder, converted, model.parameters, model.vocabulary, slot)
