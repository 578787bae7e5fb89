"""An engine in a process of its own: `EngineProcess` is its interface for the benchmark, and `main` runs in it.

The module of the engine is imported in that process alone. It has

    convert(weights: Weights, folder, bits)     writes the model in the engine's own format
    Engine(request: LoadRequest)                loads it
    Engine.version
    Engine.generate(request: TextRequest) -> Answer
    Engine.batch(request: BatchRequest) -> list[Answer]     if it decodes many texts at once

The process reads messages from stdin and answers on stdout, one JSON object a line.

    {"do": "convert", "module", "source", "folder", "vocabulary", "bits"}   answered by {}
    {"do": "load", "module", ...}    the fields of `LoadRequest`             answered by {"version"}
    {"do": "generate", ...}          the fields of `TextRequest`             answered by {"tokens", "times"}
    {"do": "batch", ...}             the fields of `BatchRequest`            answered by {"texts", "seconds"}

A failure is answered by {"error"}.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from inputs.files import ROOT

ENGINES = {"OpenVINO": "openvinoGenai", "llama.cpp": "llamaCpp", "CTranslate2": "cTranslate", "vLLM": "vllmCpu"}
BATCHING = "llama.cpp", "vLLM"  # engines that decode many texts at once here
FOLDER = ROOT / ".peers"  # what `python -m benchmark.engines.install` installs, and the converted models
SITE, SERVER = FOLDER / "site", FOLDER / "llama-server"
WAIT = 1800.0  # seconds for an answer; converting a large model takes minutes
ENVIRONMENTS = {"vllmCpu": FOLDER / "vllm"}  # {module: its virtual environment}; the others run in this one
CODE = "from benchmark.engines import engineProcess; engineProcess.main()"
REASON = 200  # characters of a reason
EMBEDDINGS = ("gpt_neox.embed_in.weight", "embed_out.weight", "lm_head.weight", "model.embed_tokens.weight")
ALIASES = {  # a weight that a file lacks, and what it is then: under the name of a newer transformers, or tied
    "embed_out.weight": "lm_head.weight",
    "lm_head.weight": "model.embed_tokens.weight",
}


@dataclass(frozen=True)
class LoadRequest:
    """The models that an engine loads: the folders of converted models. draft: None if no model drafts. context: the
    tokens of a text, prompt included. alpha: of synthetic acceptance. lookup: whether prompt lookup drafts. batch: the
    texts that it can decode at once."""

    target: str
    draft: str | None
    precision: str
    threads: int
    gamma: int
    context: int
    alpha: float | None = None
    lookup: bool = False
    batch: int = 1


@dataclass(frozen=True)
class TextRequest:
    """The request of one text. temperature: 0 for greedy decoding. The text never ends early."""

    prompt: list[int]
    count: int
    temperature: float
    top_p: float
    seed: int

    @property
    def seed32(self) -> int:
        """The seed as a number of 32 bits: the engines take no other."""
        return self.seed % (1 << 32)


@dataclass(frozen=True)
class BatchRequest:
    """Many texts, `batch` of them at once: the next prompt starts when a text ends. seeds: one for each text. All have
    `count` tokens."""

    prompts: list[list[int]]
    count: int
    temperature: float
    top_p: float
    seeds: list[int]
    batch: int

    @property
    def singles(self) -> list[TextRequest]:
        """The texts as requests of one each."""
        return [
            TextRequest(prompt, self.count, self.temperature, self.top_p, seed)
            for prompt, seed in zip(self.prompts, self.seeds)
        ]


# The tokens, and [seconds since the call, tokens that came then], as they came.
Answer = tuple[list[int], list[tuple[float, int]]]


class Weights:
    """The GPT-NeoX or Llama model in `folder`, read one weight at a time: `weights[name]` is a float32 array. Rows of
    the embeddings past `vocabulary` are cut off.

    Raises ValueError for another architecture.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] not in ("gpt_neox", "llama"):
            raise ValueError(f"only GPT-NeoX and Llama models are converted, not {config['model_type']}")
        rope = config["rope_parameters"]
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rotary embeddings of type {rope['rope_type']} are not converted")
        self.llama = config["model_type"] == "llama"
        self.folder, self.vocabulary, self.config = folder, vocabulary, config
        self.layers, self.heads, self.hidden = (
            config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        self.head = config.get("head_dim") or self.hidden // self.heads
        self.groups = config.get("num_key_value_heads", self.heads)
        self.rotary, self.theta = int(rope.get("partial_rotary_factor", 1) * self.head), rope["rope_theta"]
        self.epsilon = config["rms_norm_eps" if self.llama else "layer_norm_eps"]
        self.context = config["max_position_embeddings"]
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self.files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.stored(name).float().numpy()

    def stored(self, name: str) -> Tensor:
        """A weight in the type that the file has. It is mapped from the file, not copied."""
        while name not in self.files and name in ALIASES:
            name = ALIASES[name]
        weight = self.files[name].get_tensor(name)
        return weight[: self.vocabulary] if name in EMBEDDINGS else weight


class PeerError(Exception):
    """An engine failed. Its text is one line that says why."""


def short_reason(words: str) -> str:
    """The reason of a failure, shortened to one line."""
    line = " ".join(words.split())
    return line if len(line) <= REASON else line[: REASON - 4] + " ..."


def last_line(output: str) -> str:
    """The last line that a program printed, usually the reason why it ended."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no message")


class EngineProcess:
    """A child process that runs `main`, and makes itself a process group.

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
            text=True,
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
            raise PeerError(self.last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(short_reason(answer["error"]))
        self.signal(signal.SIGSTOP)
        return answer

    def last_words(self) -> str:
        """Why the process ended: the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.errors.seek(0)
        return short_reason(f"its process ended with exit code {self.process.poll()}: {last_line(self.errors.read())}")

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


# What `python -m benchmark.engines.install` leaves of each engine.
INSTALLED = {
    "openvinoGenai": SITE / "openvino_genai",
    "llamaCpp": SERVER,
    "cTranslate": SITE / "ctranslate2",
    "vllmCpu": ENVIRONMENTS["vllmCpu"] / "bin" / "python",
}


def start_engine(module: str) -> EngineProcess:
    """The process of an engine. It runs the Python of the engine's own environment, if there is one. Raises PeerError
    if the engine is not installed.

    vLLM's documentation wants an allocator and Intel's OpenMP loaded first, where they are installed.
    """
    if not INSTALLED[module].exists():
        raise PeerError("it is not installed: `make bench-peers` installs it")
    folder = ENVIRONMENTS.get(module)
    if folder is None:
        return EngineProcess()
    preload = [find_library("tcmalloc_minimal"), *map(str, (folder / "lib").glob("libiomp5.so"))]
    return EngineProcess([str(folder / "bin" / "python"), "-c", CODE], list(filter(None, preload)))


class RequestHandler:
    """Handles messages in the process of the engine."""

    engine: Any = None

    def convert(self, module: str, source: str, folder: str, vocabulary: int, bits: int) -> dict[str, Any]:
        engine_module(module).convert(Weights(Path(source), vocabulary), Path(folder), bits)
        return {}

    def load(self, module: str, **fields: Any) -> dict[str, Any]:
        self.engine = engine_module(module).Engine(LoadRequest(**fields))
        return {"version": self.engine.version, "settings": getattr(self.engine, "settings", {})}

    def generate(self, **fields: Any) -> dict[str, Any]:
        tokens, times = self.engine.generate(TextRequest(**fields))
        return {"tokens": list(map(int, tokens)), "times": times}

    def batch(self, **fields: Any) -> dict[str, Any]:
        """Continue many prompts. The seconds are those of all of them."""
        request = BatchRequest(**fields)
        write = getattr(self.engine, "batch", None) or partial(one_by_one, self.engine)
        start = time.perf_counter()
        answers = write(request)
        seconds = time.perf_counter() - start
        return {
            "texts": [{"tokens": list(map(int, new)), "times": times} for new, times in answers],
            "seconds": seconds,
        }


def one_by_one(engine: Any, request: BatchRequest) -> list[Answer]:
    """The texts of an engine that decodes one at a time. Raises ValueError if more are requested at once: one after
    another is not a batch."""
    if request.batch > 1:
        raise ValueError("it decodes one text at a time here")
    answers, start = [], time.perf_counter()
    for single in request.singles:
        before = time.perf_counter() - start
        tokens, times = engine.generate(single)
        answers.append((tokens, [(before + seconds, new) for seconds, new in times]))
    return answers


def engine_module(name: str) -> Any:
    """An engine's module, imported only where it is used: its library may be missing."""
    return importlib.import_module(f"benchmark.engines.{name}")


def main() -> None:
    """Answer messages until stdin ends."""
    os.setpgrp()  # `EngineProcess` stops and ends the whole group.
    # Engines print to stdout. Answers go to a copy of it, and everything else to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    handler = RequestHandler()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = getattr(handler, message.pop("do"))(**message)
        except Exception as error:  # Whatever an engine raises is the reason why its row is left out.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
