"""`Peer`: a method that another engine computes, in a process of its own. It converts and loads its model, and requests
its texts."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmark.engines.adapters import FOLDER, SERVER, SITE, VLLM
from decoding.rows import Record
from experiments.speed import Written
from inputs.devices import available_memory
from inputs.files import ROOT, gigabytes
from utils import Sampling

INSTALLED = {  # what `python -m benchmark.engines.install` leaves of each engine
    "openvinoGenai": SITE / "openvino_genai",
    "llamaCpp": SERVER,
    "cTranslate": SITE / "ctranslate2",
    "vllmCpu": VLLM / "bin" / "python",
}
MODELS = FOLDER / "models"
DONE = "done"  # a file in the folder of a converted model that is complete
WAIT = 1800.0  # seconds for an answer; converting a large model takes minutes
CODE = "from benchmark.engines import adapters; adapters.main()"
REASON = 200  # characters of a reason
SPACE = 1.25  # memory and disk that a model takes, over the bytes of its weights
WORKING = 2  # bytes for each weight while a model is converted: engines keep what they write, but for 16-bit weights
COPY = 18 / 32  # bytes of a weight of a 4-bit copy: 32 weights share a scale of 2 bytes
BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 6}  # of precision: 2 ** -BITS is the unit roundoff


@dataclass(frozen=True)
class Row:
    """A method of an engine.

    module: of the engine, one of INSTALLED. precision: one of BITS, or "" for the run's dtype. stored: bytes of a
    stored weight. draft: the role of the model that drafts; "target" stands for the target's own copy in 4 bits,
    "lookup" for prompt lookup. batches: whether it decodes many texts at once.
    """

    module: str
    precision: str = ""
    stored: float = 2
    draft: str | None = None
    batches: bool = False


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


class PeerError(Exception):
    """Another program failed. Its text is one line that says why."""


def short_reason(words: str) -> str:
    """The reason of a failure, shortened to one line."""
    line = " ".join(words.split())
    return line if len(line) <= REASON else line[: REASON - 4] + " ..."


def last_line(output: str) -> str:
    """The last line that a program printed, usually the reason why it ended."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no message")


class EngineProcess:
    """A child process that runs `adapters.main`, and makes itself a process group.

    Between two requests the whole group is stopped, so that no thread of an idle engine takes time from the row that is
    being measured. preload: the libraries that it loads first.
    """

    def __init__(self, command: Sequence[str] = (sys.executable, "-c", CODE), preload: Sequence[str] = ()) -> None:
        path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if preload:
            environment["LD_PRELOAD"] = ":".join(filter(None, [*preload, os.environ.get("LD_PRELOAD")]))
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the child
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            encoding="utf-8",
            env=environment | {"PYTHONPATH": path},
            cwd=ROOT,
        )

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The answer to a message. Raises PeerError if there is no answer within WAIT seconds, or if it is an error."""
        assert self.process.stdin and self.process.stdout
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps({"do": do} | fields) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], WAIT)[0]:
                raise PeerError(f"it did not answer within {WAIT:.0f} s")
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.errors.seek(0)
            words = f"its process ended with exit code {self.process.poll()}: {last_line(self.errors.read())}"
            raise PeerError(short_reason(words))
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(short_reason(answer["error"]))
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process and all that it started."""
        self.signal(signal.SIGKILL)
        with suppress(OSError), self.process:  # which closes the pipes, and waits
            self.process.kill()
        self.errors.close()


def start_engine(module: str) -> EngineProcess:
    """The process of an engine. It runs the Python of the engine's own environment, if there is one. Raises PeerError
    if the engine is not installed.

    vLLM's documentation wants an allocator and Intel's OpenMP loaded first, where they are installed.
    """
    if not INSTALLED[module].exists():
        raise PeerError("it is not installed: `make bench-peers` installs it")
    if module != "vllmCpu":
        return EngineProcess()
    preload = [find_library("tcmalloc_minimal"), *map(str, (VLLM / "lib").glob("libiomp5.so"))]
    return EngineProcess([str(INSTALLED[module]), "-c", CODE], list(filter(None, preload)))


@dataclass(frozen=True)
class Source:
    """A model to convert: its folder of safetensors, where converted models go, its size. slot: bytes of a token's keys
    and values."""

    folder: Path
    converted: Path
    parameters: int
    vocabulary: int
    slot: int = 0


class OtherMethod:
    """A method of another program. `failed` says why it is left out; None if it is timed.

    precision: that it computes in. version, settings: what is recorded of the program. batch: the texts that it must be
    able to decode at once. memory: bytes that it takes beside this process.
    write(prompts, count, sampling, seeds, batch=1): `count` new tokens after each prompt, `batch` texts at once: the
        next prompt starts when a text ends. Each text has its own seed. Raises PeerError if the program fails.
    """

    def __init__(self, precision: str, batch: int = 1) -> None:
        self.precision, self.batch, self.memory = precision, batch, 0.0
        self.failed: str | None = None
        self.version: str | None = None
        self.settings: Mapping[str, Any] = {}

    @property
    def unit_roundoff(self) -> float:
        return 2.0 ** -BITS[self.precision]

    write: Callable[..., Written]

    def fail(self, error: Exception) -> None:
        """Leave the method out from now on."""
        self.failed = short_reason(str(error))
        self.close()

    def close(self) -> None:
        """End what it started."""


class Peer(OtherMethod):
    """A method of another engine. dtype: of the run."""

    def __init__(self, row: Row, dtype: str, batch: int = 1) -> None:
        short = "float32" if dtype == "float16" else dtype
        super().__init__(row.precision or short, batch)
        self.row = row
        self.process: EngineProcess | None = None
        self.stored = 4 if row.module == "vllmCpu" and short == "float32" else row.stored

    def load(
        self, sources: Mapping[str, Source], gamma: int, context: int, free: float, alpha: float | None = None
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
        folders = {role: str(converted(row.module, *model)) for role, model in models.items()}
        needed = SPACE * sum(source.parameters * stored for source, stored in models.values())
        needed += sources["target"].slot * context * self.batch
        check_free("loading", needed, min(free, available_memory("cpu")), "of memory")
        # The fields of `adapters.LoadRequest`.
        fields: dict[str, Any] = {"target": folders["target"], "draft": folders.get("draft")}
        fields |= {"precision": self.precision, "threads": torch.get_num_threads(), "context": context}
        fields |= {"gamma": gamma, "alpha": alpha if row.draft else None, "lookup": row.draft == "lookup"}
        self.process = start_engine(row.module)
        answer = self.process.ask("load", module=row.module, batch=self.batch, **fields)
        self.version, self.settings = answer["version"], answer.get("settings", {})
        self.memory = needed

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        assert self.process is not None
        fields = {"count": count, "temperature": sampling.temperature, "top_p": sampling.top_p}
        seeds = [seed % (1 << 32) for seed in seeds]  # The engines take no longer ones.
        if batch == 1 or len(prompts) == 1:
            pairs = zip(prompts, seeds)
            texts = [self.process.ask("generate", prompt=prompt, seed=seed, **fields) for prompt, seed in pairs]
        else:
            texts = self.process.ask("batch", prompts=list(prompts), seeds=seeds, batch=batch, **fields)["texts"]
        if len(texts) != len(prompts):
            raise PeerError(f"it wrote {len(texts)} texts, and {len(prompts)} were requested")
        records = [Record() for _ in texts]
        for text, record in zip(texts, records):
            for seconds, new in text["times"]:
                if new:
                    record.add(seconds, new, 0, 0)
            if not len(text["tokens"]) == record.tokens == count:
                raise PeerError(f"it wrote {len(text['tokens'])} tokens, and {count} were requested")
        return [text["tokens"] for text in texts], records

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process, self.memory = None, 0.0


def check_free(what: str, needed: float, free: float, where: str) -> None:
    """Raise PeerError if `what` needs more bytes than are free."""
    if needed > free:
        raise PeerError(f"{what} needs about {gigabytes(needed)} {where}, and {gigabytes(free)} are free")


def converted(module: str, source: Source, stored: float) -> Path:
    """The folder of a model as the engine `module` stores it, with `stored` bytes a weight, written now or in an
    earlier run. Rows that store it alike share it. Raises PeerError if there is too little memory or disk."""
    bits = int(8 * stored)  # 4 of a copy, without its scales
    folder = source.converted / f"{module}-{bits}"
    if not (folder / DONE).exists():
        check_free("converting", SPACE * WORKING * source.parameters, available_memory("cpu"), "of memory")
        with closing(start_engine(module)) as process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            check_free("converting", SPACE * stored * source.parameters, shutil.disk_usage(folder).free, "on the disk")
            words = {"module": module, "source": str(source.folder), "folder": str(folder)}
            process.ask("convert", **words, vocabulary=source.vocabulary, bits=bits)
        (folder / DONE).touch()
    return folder
