"""`Peer`: a method that another engine computes: it converts and loads its model, and requests its texts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark.engines.engineProcess import FOLDER, EngineProcess, LoadRequest, PeerError, short_reason
from decoding.record import Record
from experiments.speed import Written
from inputs.devices import available_memory
from inputs.files import gigabytes
from utils import Sampling

MODELS = FOLDER / "models"
DONE = "done"  # a file in the folder of a converted model that is complete
SPACE = 1.25  # memory and disk that a model takes, over the bytes of its weights
WORKING = 2  # bytes for each weight while a model is converted: engines keep what they write, but for 16-bit weights
COPY = 18 / 32  # bytes of a weight of a 4-bit copy: 32 weights share a scale of 2 bytes
BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 6}  # of precision: 2 ** -BITS is the unit roundoff

StartProcess = Callable[[str], EngineProcess]  # of the engine of that module


@dataclass(frozen=True)
class Row:
    """A method of an engine.

    module: of the engine, in this folder. precision: one of BITS, or "" for the run's dtype. stored: bytes of a stored
    weight. draft: the role of the model that drafts; "target" stands for the target's own copy in 4 bits, "lookup" for
    prompt lookup. batches: whether it decodes many texts at once.
    """

    module: str
    precision: str = ""
    stored: float = 2
    draft: str | None = None
    batches: bool = False

    @property
    def quantised(self) -> bool:
        """Whether its weights are not those of the target."""
        return self.precision == "int8"


ROWS = {  # {method of the catalogue: row}. llama.cpp has float16 everywhere, CTranslate2 no 16-bit type on CPUs.
    "openvino:plain": Row("openvinoGenai"),
    "openvino:draft": Row("openvinoGenai", draft="draft"),
    "openvino:int8": Row("openvinoGenai", "int8", 1),
    "llama.cpp:plain": Row("llamaCpp", "float16", batches=True),
    "llama.cpp:draft": Row("llamaCpp", "float16", draft="draft", batches=True),
    "llama.cpp:copy": Row("llamaCpp", "float16", draft="target", batches=True),
    "llama.cpp:int8": Row("llamaCpp", "int8", 1, batches=True),
    "ctranslate2:plain": Row("cTranslate", "float32", 4),
    "ctranslate2:int8": Row("cTranslate", "int8", 1),
    "vllm:plain": Row("vllmCpu", batches=True),
    "vllm:lookup": Row("vllmCpu", draft="lookup", batches=True),
}


@dataclass(frozen=True)
class Source:
    """A model to convert: its folder of safetensors, where converted models go, its size. slot: bytes of a token's keys
    and values."""

    folder: Path
    converted: Path
    parameters: int
    vocabulary: int
    slot: int = 0


class Peer:
    """A method of another engine. `failed` says why it is left out; None if it is timed.

    dtype: of the run. batch: the texts that it must be able to decode at once.
    """

    def __init__(self, row: Row, dtype: str, batch: int = 1) -> None:
        self.row, self.batch = row, batch
        short = "float32" if dtype == "float16" else dtype
        self.precision = row.precision or short
        self.stored = 4 if row.module == "vllmCpu" and short == "float32" else row.stored
        self.process: EngineProcess | None = None
        self.failed: str | None = None
        self.memory = 0.0  # bytes that it takes while it is loaded
        self.version: str | None = None
        self.settings: dict[str, Any] = {}  # the settings given to the engine

    @property
    def unit_roundoff(self) -> float:
        return 2.0 ** -BITS[self.precision]

    def load(
        self,
        sources: Mapping[str, Source],
        gamma: int,
        context: int,
        free: float,
        start_process: StartProcess,
        alpha: float | None = None,
    ) -> None:
        """Convert and load what the row needs, into at most `free` bytes of memory. alpha: of synthetic acceptance."""
        row = self.row
        if self.batch > 1 and not row.batches:
            raise PeerError("it decodes one text at a time here")
        if alpha is not None and row.draft and row.module != "llamaCpp":
            raise PeerError("it cannot accept guesses by a coin")
        models = {"target": (sources["target"], self.stored)}
        if row.draft and row.draft != "lookup":
            models["draft"] = sources[row.draft], COPY if row.draft == "target" else self.stored
        folders = {role: str(convert(row.module, *model, start_process)) for role, model in models.items()}
        needed = SPACE * sum(source.parameters * stored for source, stored in models.values())
        needed += sources["target"].slot * context * self.batch
        check_free("loading", needed, min(free, available_memory("cpu")), "of memory")
        request = LoadRequest(
            folders["target"],
            folders.get("draft"),
            self.precision,
            torch.get_num_threads(),
            gamma,
            context,
            alpha if row.draft else None,
            row.draft == "lookup",
            self.batch,
        )
        self.process = start_process(row.module)
        answer = self.process.ask("load", module=row.module, **asdict(request))
        self.version, self.settings = answer["version"], answer.get("settings", {})
        self.memory = needed

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        """`count` new tokens after each prompt, `batch` texts at once: the next prompt starts when a text ends. Each
        text has its own seed. Raises PeerError if a text has another length, or the engine fails."""
        assert self.process is not None
        fields = {"count": count, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if len(prompts) == 1:
            texts = [self.process.ask("generate", prompt=prompts[0], seed=seeds[0], **fields)]
        else:
            answer = self.process.ask("batch", prompts=list(prompts), seeds=list(seeds), batch=batch, **fields)
            texts = answer["texts"]
        if len(texts) != len(prompts):
            raise PeerError(f"it wrote {len(texts)} texts, and {len(prompts)} were requested")
        return [text["tokens"] for text in texts], [record_of(text, count) for text in texts]

    def fail(self, error: Exception) -> None:
        """Leave the row out."""
        self.failed = short_reason(str(error))
        self.close()

    def close(self) -> None:
        """End the process of the engine."""
        if self.process is not None:
            self.process.close()
        self.process, self.memory = None, 0.0


def record_of(text: Mapping[str, Any], count: int) -> Record:
    """The record of a text that an engine has written. Raises PeerError if it has another length."""
    record = Record()
    for seconds, new in text["times"]:
        if new:
            record.add(seconds, new, 0, 0)
    if not len(text["tokens"]) == record.tokens == count:
        raise PeerError(f"it wrote {len(text['tokens'])} tokens, and {count} were requested")
    return record


def check_free(what: str, needed: float, free: float, where: str) -> None:
    """Raise PeerError if `what` needs more bytes than are free."""
    if needed > free:
        raise PeerError(f"{what} needs about {gigabytes(needed)} {where}, and {gigabytes(free)} are free")


def convert(module: str, source: Source, stored: float, start_process: StartProcess) -> Path:
    """The folder of a model as the engine `module` stores it, with `stored` bytes a weight, written now or in an
    earlier run. Rows that store it alike share it. Raises PeerError if there is too little memory or disk."""
    bits = int(8 * stored)  # 4 of a copy, without its scales
    folder = source.converted / f"{module}-{bits}"
    if not (folder / DONE).exists():
        check_free("converting", SPACE * WORKING * source.parameters, available_memory("cpu"), "of memory")
        with closing(start_process(module)) as process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            check_free("converting", SPACE * stored * source.parameters, shutil.disk_usage(folder).free, "on the disk")
            words = {"module": module, "source": str(source.folder), "folder": str(folder)}
            process.ask("convert", **words, vocabulary=source.vocabulary, bits=bits)
        (folder / DONE).touch()
    return folder
