"""`OtherMethod`: a method that another program computes. `Peer`: one whose program runs in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from decoding.rows import Record
from experiments.speed import Written, digest
from inputs.commandLine import one_line
from inputs.devices import available_memory
from inputs.files import ROOT, gigabytes, new_folder
from methods.programs.program import FOLDER, FORMS, SITE, LoadRequest, Program, TextRequest, last_line
from methods.programs.registry import PROGRAMS
from utils import Sampling

MODELS = FOLDER / "models"
WAIT = 1800.0  # seconds for an answer; converting a large model takes minutes
CODE = "import sys; from methods.programs import program; program.main(*sys.argv[1:])"
SPACE = 1.25  # memory and disk that a model takes, over the bytes of its weights
WORKING = 2  # bytes for each weight while a model is converted: programs keep what they write, but for 16-bit weights
ORIGIN = "origin.txt"  # in the folder of a converted model: a digest of all that it follows from but the weights
COPY = "pure Q4_0"  # how the weights of a 4-bit copy are stored, also those of its output layer
QUANTISED_ROUNDOFF = 2.0**-6
MATCHED = 2  # tokens that prompt lookup must find again with --gamma: it then guesses often, which an audit needs


class PeerError(Exception):
    """Another program failed. Its text is one line that says why."""

    def __init__(self, words: str) -> None:
        super().__init__(one_line(words))


class ProgramProcess:
    """A child process that runs `main` of methods/programs/program.py, with the Python of the program's own environment
    if there is one. Raises PeerError if the program is not installed.

    Between two messages it and all that it started are stopped, so that no thread of an idle program takes time from
    the row that is being measured.
    """

    def __init__(self, program: type[Program]) -> None:
        if not program.installed.exists():
            raise PeerError("it is not installed: `make bench-peers` installs it")
        path = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if preloaded := program.preloaded():
            environment["LD_PRELOAD"] = ":".join(filter(None, [*preloaded, os.environ.get("LD_PRELOAD")]))
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the child
        self.connection, theirs = Pipe()
        address, end = f"{program.__module__}:{program.__name__}", theirs.fileno()
        self.process = subprocess.Popen(
            [str(program.python), "-c", CODE, address, str(end)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=environment | {"PYTHONPATH": path},
            cwd=ROOT,
            pass_fds=[end],
        )
        theirs.close()

    def ask(self, do: str, *arguments: Any) -> Any:
        """The answer to a message. Raises PeerError if there is none within WAIT seconds, or if the program fails."""
        self.signal(signal.SIGCONT)
        try:
            self.connection.send((do, arguments))
            if not self.connection.poll(WAIT):
                raise PeerError(f"it did not answer within {WAIT:.0f} s")
            answer, failed = self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.errors.seek(0)
            words = f"its process ended with exit code {self.process.poll()}: {last_line(self.errors.read())}"
            raise PeerError(words) from None
        if failed is not None:
            raise PeerError(failed)
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process and all that it started."""
        self.signal(signal.SIGKILL)
        self.process.kill()  # It may not have a group of its own yet.
        self.process.wait()
        self.connection.close()
        self.errors.close()


@dataclass(frozen=True)
class Source:
    """A model to convert: its folder of safetensors, where converted models go, its size. slot: bytes of a token's keys
    and values."""

    folder: Path
    converted: Path
    parameters: int
    vocabulary: int
    slot: int = 0

    def as_stored(self, program: type[Program], form: str) -> str:
        """The folder of the model as the program stores it, its weights as `form`, written now or in an earlier run by
        the same code for the same version. Rows that store it alike share it. Raises PeerError if there is too little
        memory or disk."""
        folder = self.converted / f"{program.name}-{form}"
        code = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "methods/programs").glob("*.py"))]
        config = (self.folder / "config.json").read_text(encoding="utf-8")
        origin = digest([program.requirements, self.vocabulary, config, code])
        if not (folder / ORIGIN).exists() or (folder / ORIGIN).read_text() != origin:
            check_free("converting", SPACE * WORKING * self.parameters, available_memory("cpu"), "of memory")
            with closing(ProgramProcess(program)) as process, new_folder(folder) as written:
                free = shutil.disk_usage(written).free
                check_free("converting", SPACE * FORMS[form] * self.parameters, free, "on the disk")
                process.ask("convert", self.folder, self.vocabulary, written, form)
                (written / ORIGIN).write_text(origin)
        return str(folder)


def check_free(what: str, needed: float, free: float, where: str) -> None:
    """Raise PeerError if `what` needs more bytes than are free."""
    if needed > free:
        raise PeerError(f"{what} needs about {gigabytes(needed)} {where}, and {gigabytes(free)} are free")


class OtherMethod(ABC):
    """The method `name` of another program. `failed` says why it is left out; None if it is timed.

    precision: that it computes in, if its row does not say it. gamma: of its guesses, if the program takes a number;
    None: as the row has it. batch: the texts that it must be able to decode at once. matched: of prompt lookup.
    version, settings: what is recorded of the program. memory: bytes that it takes beside this process.
    """

    def __init__(self, name: str, precision: str, gamma: int | None, batch: int = 1) -> None:
        program, _, kind = name.partition(":")
        self.program, self.row = PROGRAMS[program], PROGRAMS[program].rows[kind]
        self.precision, self.batch = self.row.precision or precision, batch
        self.gamma, self.matched = (gamma, MATCHED) if gamma else (self.row.guesses, self.row.matched)
        self.memory = 0.0
        self.failed: str | None = None
        self.version: str | None = None
        self.settings: Mapping[str, Any] = {}

    @property
    def is_quantised(self) -> bool:
        return self.precision.startswith("int")

    @property
    def unit_roundoff(self) -> float:
        return QUANTISED_ROUNDOFF if self.is_quantised else torch.finfo(getattr(torch, self.precision)).eps / 2

    def load(self, sources: Mapping[str, Source], context: int, free: float, alpha: float | None = None) -> None:
        """Prepare to write texts of up to `context` tokens, prompts included, with at most `free` bytes of memory.
        alpha: of synthetic acceptance. Raises PeerError."""
        if self.batch > 1 and not self.program.batches:
            raise PeerError("it decodes one text at a time here")
        if alpha is not None and self.row.draft and not self.program.coin:
            raise PeerError("it cannot accept guesses by a coin")

    @abstractmethod
    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        """`count` new tokens after each prompt, `batch` texts at once: the next prompt starts when a text ends. Each
        text has its own seed. Raises PeerError if the program fails."""

    def fail(self, error: Exception) -> None:
        """Leave the method out from now on."""
        self.failed = one_line(error)
        self.close()

    def close(self) -> None:
        """End what it started."""
        self.memory = 0.0


class Peer(OtherMethod):
    """A method of a program that runs in a process of its own. dtype: of the run."""

    def __init__(self, name: str, dtype: str, gamma: int | None, batch: int = 1) -> None:
        super().__init__(name, "float32" if dtype == "float16" else dtype, gamma, batch)
        self.form = self.row.form or self.precision
        self.process: ProgramProcess | None = None

    def load(self, sources: Mapping[str, Source], context: int, free: float, alpha: float | None = None) -> None:
        super().load(sources, context, free, alpha)
        drafts, target = self.row.draft, sources["target"]
        models = {"target": (target, self.form)}
        if drafts and drafts != "lookup":
            models["draft"] = sources[drafts], COPY if drafts == "target" else self.form
        folders = {role: source.as_stored(self.program, form) for role, (source, form) in models.items()}
        needed = SPACE * sum(source.parameters * FORMS[form] for source, form in models.values())
        needed += target.slot * context * self.batch
        check_free("loading", needed, min(free, available_memory("cpu")), "of memory")
        request = LoadRequest(
            target=folders["target"],
            draft=folders.get("draft"),
            precision=self.precision,
            threads=torch.get_num_threads(),
            gamma=self.gamma,
            context=context,
            alpha=alpha if drafts else None,
            matched=self.matched if drafts == "lookup" else 0,
            batch=self.batch,
        )
        self.process = ProgramProcess(self.program)
        self.version, self.settings = self.process.ask("load", request)
        self.memory = needed

    def write(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seeds: Sequence[int], batch: int = 1
    ) -> Written:
        assert self.process is not None
        requests = [  # The programs take no seeds of more bits.
            TextRequest(prompt, count, sampling, seed % (1 << 32)) for prompt, seed in zip(prompts, seeds)
        ]
        texts, records = [], []
        for part in [requests] if batch > 1 else [[request] for request in requests]:
            for answer in self.process.ask("write", part, batch):
                record = Record(begun=answer.begun)
                for seconds, new in answer.times:
                    if new:
                        record.add(seconds, new, 0, 0)
                if not len(answer.tokens) == record.tokens == count:
                    raise PeerError(f"it wrote {len(answer.tokens)} tokens, and {count} were requested")
                texts.append(answer.tokens)
                records.append(record)
        return texts, records

    def close(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = None
        super().close()
