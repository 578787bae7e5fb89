"""`start_peers`: the rows of other engines, ready to be timed: converted, loaded and checked. What fails is a row that
says why."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Generator
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmark.contenders import ALPHAS, SAMPLING, Generated
from benchmark.engines.engineProcess import (
    BATCHING,
    ENGINES,
    FOLDER,
    EngineProcess,
    LoadRequest,
    PeerError,
    short_reason,
    start_engine,
)
from benchmark.engines.textCheck import Figures, Float32Model, TextChecker
from benchmark.options import Options
from benchmark.records import PeerLine
from decoding.record import Record
from engine.cachedModel import CachedModel
from engine.kvCache import cache_bytes
from inputs.auditTexts import write_texts
from inputs.devices import available_memory
from inputs.files import gigabytes
from inputs.models import find_model, model_version
from inputs.progress import followed
from lossless.evidence import limit_of

MODELS = FOLDER / "models"
DONE = "done"  # a file in the folder of a converted model that is complete
SPACE = 1.25  # memory and disk that a model takes, over the bytes of its weights
WORKING = 2  # bytes for each weight while a model is converted: engines keep what they write, but for 16-bit weights
COPY = 18 / 32  # bytes of a weight of a 4-bit copy: 32 weights share a scale of 2 bytes
BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 6}  # of precision: 2 ** -BITS is the unit roundoff

CHECKED_BATCH = 8  # texts at once while the texts of a batch are checked

StartProcess = Callable[[str], EngineProcess]  # of the engine of that module


@dataclass(frozen=True)
class Row:
    """A row: an engine with weights of some precision, with or without a draft model.

    engine: one of ENGINES. precision: in which it computes: one of BITS. stored: bytes of a stored weight, which tell
    how much memory the row needs. draft: the role of the model that drafts; "target" stands for the target's own copy
    in 4 bits, "lookup" for the text so far. alpha: of synthetic acceptance, for models with random weights.
    """

    engine: str
    precision: str
    stored: float
    draft: str | None = None
    alpha: float | None = None

    @property
    def name(self) -> str:
        """As it stands in the table. A row with quantised weights says so."""
        name = f"{self.engine}, {self.precision}" + (" (quantised)" if self.quantised else "")
        name += {"target": ", its 4-bit copy drafts", "lookup": ", prompt lookup"}.get(self.draft or "", "")
        if self.alpha:
            return f"{name}, synthetic {self.alpha}"
        return f"{name}, speculative" if self.draft == "draft" else name

    @property
    def module(self) -> str:
        """The engine's module in this folder."""
        return ENGINES[self.engine]

    @property
    def quantised(self) -> bool:
        """Whether its weights are not those of the target."""
        return self.precision == "int8"

    @property
    def batches(self) -> bool:
        """Whether it decodes many texts at once."""
        return self.engine in BATCHING

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff of its precision."""
        return 2.0 ** -BITS[self.precision]


def engine_rows(dtype: str, alpha: float | None = None) -> list[Row]:
    """All rows, in the order of the table. dtype: of the benchmark's own rows. OpenVINO and vLLM compute in it;
    llama.cpp has float16 everywhere, CTranslate2 has no 16-bit type on CPUs.

    alpha: accept guesses by a coin. Only llama.cpp can; the rows of others with a draft are left out.
    """
    short = "float32" if dtype == "float16" else dtype
    size = {"bfloat16": 2, "float32": 4}[short]
    rows = [
        Row("OpenVINO", short, 2),
        Row("OpenVINO", short, 2, "draft"),
        Row("OpenVINO", "int8", 1),
        Row("llama.cpp", "float16", 2),
        Row("llama.cpp", "float16", 2, "draft", alpha),
        Row("llama.cpp", "float16", 2, "target", alpha),
        Row("llama.cpp", "int8", 1),
        Row("CTranslate2", "float32", 4),
        Row("CTranslate2", "int8", 1),
        Row("vLLM", short, size),
        Row("vLLM", short, size, "lookup"),
    ]
    return [row for row in rows if alpha is None or row.alpha or not row.draft]


@dataclass(frozen=True)
class Source:
    """A model to convert: its folder of safetensors, where converted models go, its size.

    folder: a function, because the weights of a model that exists only in memory are written when they are needed.
    slot: bytes of a token's keys and values.
    """

    folder: Callable[[], Path]
    converted: Path
    parameters: int
    vocabulary: int
    slot: int = 0


@dataclass(frozen=True)
class BatchRun:
    """What a batch took. records: of each text, with the seconds since the call. seconds: until the last text ended."""

    texts: list[list[int]]
    records: list[Record]
    seconds: float

    @property
    def tokens(self) -> int:
        """The new tokens of all texts."""
        return sum(record.tokens for record in self.records)


class Peer:
    """A row of another engine. `failed` says why it is left out; None if it is timed. batch: the texts that it can
    decode at once."""

    def __init__(self, row: Row, max_len: int, batch: int = 1) -> None:
        self.row, self.max_len, self.batch = row, max_len, batch
        self.process: EngineProcess | None = None
        self.failed: str | None = None
        self.memory = 0.0  # bytes that it takes while it is loaded
        self.version: str | None = None
        self.settings: dict[str, Any] = {}  # what the engine was told
        self.greedy: Figures | None = None
        self.lossless: Figures | None = None

    def load(
        self, sources: Mapping[str, Source], gamma: int, context: int, free: float, start_process: StartProcess
    ) -> None:
        """Convert and load what the row needs, into at most `free` bytes of memory."""
        row = self.row
        models = {"target": (sources["target"], row.stored)}
        if row.draft and row.draft != "lookup":
            models["draft"] = sources[row.draft], COPY if row.draft == "target" else row.stored
        folders = {role: str(convert(row.module, *model, start_process)) for role, model in models.items()}
        needed = SPACE * sum(source.parameters * stored for source, stored in models.values())
        needed += sources["target"].slot * context * self.batch
        check_free("loading", needed, min(free, available_memory("cpu")), "of memory")
        request = LoadRequest(
            folders["target"],
            folders.get("draft"),
            row.precision,
            torch.get_num_threads(),
            gamma,
            context,
            row.alpha,
            row.draft == "lookup",
            self.batch,
        )
        self.process = start_process(row.module)
        answer = self.process.ask("load", module=row.module, **asdict(request))
        self.version, self.settings = answer["version"], answer.get("settings", {})
        self.memory = needed

    def ask(self, prompt: list[int], count: int, temperature: float, seed: int) -> Generated:
        """The text after a prompt, and its record. Raises PeerError if it does not come or has another length."""
        assert self.process is not None
        answer = self.process.ask(
            "generate", prompt=prompt, count=count, temperature=temperature, top_p=SAMPLING.top_p, seed=seed
        )
        return [answer["tokens"]], [record_of(answer, count)]

    def run(
        self, prompts: Sequence[list[int]], batch: int, count: int, seed: int, temperature: float = SAMPLING.temperature
    ) -> BatchRun:
        """`count` new tokens after each prompt, `batch` texts at once: the next prompt starts when a text ends. seed:
        of the first text; the next text has the next. Raises PeerError if a text has another length, or the engine
        fails."""
        return self.ask_batch(prompts, batch, count, [seed + number for number in range(len(prompts))], temperature)

    def ask_batch(
        self, prompts: Sequence[list[int]], batch: int, count: int, seeds: Sequence[int], temperature: float
    ) -> BatchRun:
        """The texts after prompts, each with its own seed."""
        assert self.process is not None
        sampling = {"temperature": temperature, "top_p": SAMPLING.top_p}
        answer = self.process.ask(
            "batch", prompts=list(prompts), count=count, **sampling, seeds=list(seeds), batch=batch
        )
        texts = answer["texts"]
        if len(texts) != len(prompts):
            raise PeerError(f"it wrote {len(texts)} texts, and {len(prompts)} were asked for")
        return BatchRun(
            [text["tokens"] for text in texts], [record_of(text, count) for text in texts], answer["seconds"]
        )

    def write(
        self, prompts: Sequence[list[int]], count: int, temperature: float, seeds: Sequence[int]
    ) -> list[list[int]]:
        """The texts after prompts, as they are checked: in a batch, if the row decodes many texts at once."""
        if self.batch > 1:
            return self.ask_batch(prompts, min(CHECKED_BATCH, self.batch), count, seeds, temperature).texts
        return [self.ask(prompt, count, temperature, seed)[0][0] for prompt, seed in zip(prompts, seeds)]

    def sampler(self, prompt: list[int], generator: Generator, first: int | None = None) -> Generated:
        """The function that is timed. If the engine fails, the time is nan, and the row is left out from then on."""
        if self.failed is None:
            try:
                return self.ask(prompt, first or self.max_len, SAMPLING.temperature, generator.initial_seed())
            except PeerError as error:
                self.fail(error)
        return [[0]], [Record([float("nan")], [1], [0], [0])]

    def fail(self, error: Exception) -> None:
        """Leave the row out."""
        self.failed = short_reason(str(error))
        self.close()

    def close(self) -> None:
        """End the process of the engine."""
        if self.process is not None:
            self.process.close()
        self.process, self.memory = None, 0.0

    def line(self) -> PeerLine:
        """What the record says of the row."""
        row = self.row
        kind = {"module": row.module, "method": row.name, "speculative": bool(row.draft), "quantised": row.quantised}
        figures = {"failed": self.failed, "greedy": self.greedy, "lossless": self.lossless}
        settings = {"version": self.version, "settings": self.settings}
        return cast(PeerLine, asdict(row) | kind | settings | figures)


def record_of(text: Mapping[str, Any], count: int) -> Record:
    """The record of a text that an engine has written. Raises PeerError if it has another length."""
    record = Record()
    for seconds, new in text["times"]:
        if new:
            record.add(seconds, new, 0, 0)
    if not len(text["tokens"]) == record.tokens == count:
        raise PeerError(f"it wrote {len(text['tokens'])} tokens, and {count} were asked for")
    return record


def check_free(what: str, needed: float, free: float, where: str) -> None:
    """Raise PeerError if `what` needs more bytes than are free."""
    if needed > free:
        raise PeerError(f"{what} needs about {gigabytes(needed)} {where}, and {gigabytes(free)} are free")


def write_once(folder: Path, write: Callable[[Path], object], what: str, disk: float, memory: float = 0.0) -> Path:
    """A folder that `write` has filled, now or in an earlier run. Raises PeerError if there is too little memory or
    disk for `what`."""
    if not (folder / DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        check_free(what, memory, available_memory("cpu"), "of memory")
        check_free(what, disk, shutil.disk_usage(folder).free, "on the disk")
        write(folder)
        (folder / DONE).touch()
    return folder


def convert(module: str, source: Source, stored: float, start_process: StartProcess) -> Path:
    """The folder of a model as the engine `module` stores it, with `stored` bytes a weight. Rows that store it alike
    share it."""
    bits = int(8 * stored)  # 4 of a copy, without its scales

    def write(folder: Path) -> None:
        with closing(start_process(module)) as process:
            process.ask(
                "convert",
                module=module,
                source=str(source.folder()),
                folder=str(folder),
                vocabulary=source.vocabulary,
                bits=bits,
            )

    disk, memory = SPACE * stored * source.parameters, SPACE * WORKING * source.parameters
    return write_once(source.converted / f"{module}-{bits}", write, "converting", disk, memory)


def source_of(options: Options, role: str, model: CachedModel, library: PreTrainedModel) -> Source:
    """A model of this run, as the engines convert it."""
    name, size = options.names[role], model.parameters
    slot = cache_bytes(model.model.config.get_text_config(), 1, model.dtype)
    if not options.shapes:
        folder = find_model(name)
        converted = MODELS / f"{folder.name}-{model_version(name).replace(':', '-')}"
        return Source(lambda: folder, converted, size, model.vocabulary, slot)
    converted = MODELS / f"{name}-random-{str(model.dtype).removeprefix('torch.')}-{options.seed}"
    disk = SPACE * size * model.dtype.itemsize
    save = partial(write_once, converted / "source", library.save_pretrained, "writing the weights", disk)
    return Source(save, converted, size, model.vocabulary, slot)


def reference(options: Options, role: str, model: CachedModel, library: PreTrainedModel) -> Float32Model:
    """A model of this run with the weights that the engines convert: `library` may have rounded them to its dtype."""
    if not options.shapes:
        stored = AutoModelForCausalLM.from_pretrained(find_model(options.names[role]), dtype="auto")
        library = stored.eval().to(model.device)
    return Float32Model(library, model.vocabulary)


def text_checker(
    options: Options,
    models: Mapping[str, CachedModel],
    library: Mapping[str, PreTrainedModel],
    rows: int,
    one_tokenizer: bool = True,
) -> TextChecker:
    """What checks the texts of that many rows. The draft helps to find mistakes of speculative text, if it has the
    target's tokenizer. Models with random weights agree by accident, so nothing is learnt from their speculative
    text."""
    roles = ["target", *(["draft"] if one_tokenizer and not options.shapes else [])]
    references = {role: reference(options, role, models[role], library[role]) for role in roles}
    return TextChecker(references["target"], references.get("draft"), limit_of(rows), options.seed, not options.shapes)


def peer_rows(options: Options, dtype: str, one_tokenizer: bool = True) -> list[Row]:
    """The rows of the engines in `options.peers`. A draft model needs the target's tokenizer; a copy has it."""
    alpha = ALPHAS[1] if options.shapes else None
    rows = [row for row in engine_rows(dtype, alpha) if row.engine in options.peers]
    return [row for row in rows if one_tokenizer or row.draft != "draft"]


def start_peers(
    options: Options,
    models: Mapping[str, CachedModel],
    library: Mapping[str, PreTrainedModel],
    prompts: Sequence[list[int]],
    rows: Sequence[Row],
    checker: TextChecker,
    start_process: StartProcess = start_engine,
    batch: int = 1,
) -> list[Peer]:
    """The rows of other engines, ready or failed. batch: the texts that a row must be able to decode at once, if its
    engine can; its texts are then checked in a batch too."""
    sources = {role: source_of(options, role, models[role], library[role]) for role in models}
    return prepare_peers(
        rows, sources, checker, prompts, options.max_len, options.gamma, start_process, options.texts, batch
    )


def prepare_peers(
    rows: Sequence[Row],
    sources: Mapping[str, Source],
    checker: TextChecker,
    prompts: Sequence[list[int]],
    max_len: int,
    gamma: int,
    start_process: StartProcess,
    texts: Path | None = None,
    batch: int = 1,
) -> list[Peer]:
    """The rows, each converted, loaded and checked, or failed. texts: the folder for the texts that are audited, in
    files for `test.py --audit`. batch: as in `start_peers`."""
    peers: list[Peer] = []
    memory = available_memory("cpu")
    context = max(map(len, prompts)) + max(max_len, checker.tokens) + 2 * gamma + 8
    for row in followed(rows, "other engines", len(rows)):
        peer = Peer(row, max_len, batch if row.batches else 1)
        peers.append(peer)
        try:
            # What an engine maps from a file counts as available, and must stay in memory all the same.
            free = memory - sum(other.memory for other in peers)
            peer.load(sources, gamma, context, free, start_process)
            # Synthetic acceptance writes tokens that are not the target's.
            if not row.alpha:
                peer.greedy = checker.greedy(peer.write, prompts, row.unit_roundoff)
                peer.lossless = checker.sampled(peer.write, prompts, row.unit_roundoff)
                if texts is not None and checker.drawn:
                    name = re.sub("[^a-z0-9.]+", "-", row.name.lower()).strip("-")
                    write_texts(texts / f"{name}.jsonl", checker.drawn)
        except (PeerError, ValueError, OSError) as error:
            peer.fail(error)
    return peers
