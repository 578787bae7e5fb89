"""`Program`: another program that decodes the same weights. One class says all of it: its methods, how it is installed,
how a model is converted and loaded, and how it continues prompts.

`main` runs in the process of one program, which `benchmark.peers.ProgramProcess` starts.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from safetensors import safe_open
from torch import Tensor

from inputs.files import ROOT
from utils import Sampling

FOLDER = ROOT / ".peers"  # what `python -m benchmark.install` installs, and the converted models
SITE = FOLDER / "site"
PIP = "-m", "pip", "--disable-pip-version-check", "--quiet"
ALIASES = {  # a weight that a file lacks, and what it is then: under the name of a newer transformers, or tied
    "embed_out.weight": "lm_head.weight",
    "lm_head.weight": "model.embed_tokens.weight",
}
# How a model is loaded from its folder, whose configuration may name code of the hub, also as its attention.
LOADING: Any = {"dtype": "auto", "attn_implementation": "eager", "local_files_only": True, "trust_remote_code": False}
# {how weights are stored: bytes of one, with its share of the scales of 4-bit blocks}
FORMS = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "Q4_1": 20 / 32, "Q4_0": 18 / 32, "pure Q4_0": 18 / 32}


@dataclass(frozen=True)
class Row:
    """A method of a program.

    title: a line of help. draft: the role of the model that guesses; "target" stands for the target's own copy in 4
    bits, "lookup" for prompt lookup; None: nothing guesses. precision: the type it computes in; "" is the run's dtype.
    form: how the weights are stored, one of FORMS; "" is the precision. matched, guesses: of prompt lookup without
    --gamma, as the program has them by default, else as its documentation's example has: the tokens that must occur
    again, and the guesses that follow.
    """

    title: str
    draft: str | None = None
    precision: str = ""
    form: str = ""
    matched: int = 2
    guesses: int = 5


@dataclass(frozen=True)
class LoadRequest:
    """The models to load: the folders of converted models. draft: None if no model drafts. context: the tokens of a
    text, prompt included. alpha: of synthetic acceptance. matched: the tokens that prompt lookup must find again; 0:
    another drafts. batch: the texts that it must be able to decode at once."""

    target: str
    draft: str | None
    precision: str
    threads: int
    gamma: int
    context: int
    alpha: float | None = None
    matched: int = 0
    batch: int = 1


@dataclass(frozen=True)
class TextRequest:
    """The request of one text. The text never ends early. seed: of 32 bits."""

    prompt: list[int]
    count: int
    sampling: Sampling
    seed: int


class Answer(NamedTuple):
    """One text: its tokens, and [(seconds since the call, tokens that came then)]. begun: seconds from the call to the
    moment the text got its row of the batch."""

    tokens: list[int]
    times: list[tuple[float, int]]
    begun: float = 0.0


class Weights:
    """The GPT-NeoX or Llama model in `folder`, read one weight at a time: `weights[name]` is a float32 array. Rows of
    the embeddings past `vocabulary` are cut off.

    parallel: attention and MLP of a layer read the same numbers. Raises ValueError for another architecture.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] not in ("gpt_neox", "llama"):
            raise ValueError(f"only GPT-NeoX and Llama models are converted, not {config['model_type']}")
        self.llama = config["model_type"] == "llama"
        own = "silu" if self.llama else "gelu"  # of the architecture
        if (activation := config.get("hidden_act", own)) != own:
            raise ValueError(f"models with the activation {activation} are not converted")
        # Files that are older than transformers 5 have rope_scaling, which is read first, or name each outside.
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        rope = {
            "rope_type": given.get("type", "default"),
            "rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000)),
            "partial_rotary_factor": config.get("rotary_pct", 0.25),
        } | given
        if rope["rope_type"] != "default":
            raise ValueError(f"rotary embeddings of type {rope['rope_type']} are not converted")
        self.folder, self.vocabulary, self.config = folder, vocabulary, config
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.head = config.get("head_dim") or config["hidden_size"] // self.heads
        self.groups = config.get("num_key_value_heads") or self.heads
        # transformers' Llama has no partial rotation, whatever its file says.
        self.rotary = self.head if self.llama else int(rope["partial_rotary_factor"] * self.head)
        self.theta = rope["rope_theta"]
        self.epsilon = config["rms_norm_eps" if self.llama else "layer_norm_eps"]
        self.context, self.parallel = config["max_position_embeddings"], config.get("use_parallel_residual", True)
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
        return weight[: self.vocabulary] if "embed" in name or "lm_head" in name else weight

    def library_model(self) -> Any:
        """The model as transformers loads it, in the type of its weights, with its vocabulary cut."""
        from transformers import AutoModelForCausalLM  # It takes seconds, and most programs do without it.

        model = AutoModelForCausalLM.from_pretrained(self.folder, **LOADING)
        model.resize_token_embeddings(self.vocabulary)
        return model


class Program(ABC):
    """A program with a model loaded: `Program(load_request)`. Its library is imported in its own process alone, so
    inside functions.

    name, rows: {kind of method: row}, as --compare has them. requirements: what pip installs. installed: a file that
    the installation leaves. python: the interpreter that its process runs. batches: it decodes many texts at once.
    coin: it can accept guesses by a coin (synthetic acceptance). version, settings: what is recorded.
    """

    name: ClassVar[str]
    rows: ClassVar[Mapping[str, Row]]
    requirements: ClassVar[Sequence[str]] = ()
    installed: ClassVar[Path]
    python: ClassVar[Path] = Path(sys.executable)
    batches: ClassVar[bool] = False
    coin: ClassVar[bool] = False
    version = ""
    settings: Mapping[str, Any] = {}

    @abstractmethod
    def __init__(self, request: LoadRequest) -> None: ...

    @classmethod
    def install(cls) -> None:
        """Without dependencies: .venv has them, and another torch must not come with them."""
        run_command(sys.executable, *PIP, "install", "--no-deps", "--upgrade", "--target", SITE, *cls.requirements)

    @staticmethod
    def preloaded() -> list[str]:
        """The libraries that its process loads first."""
        return []

    @staticmethod
    @abstractmethod
    def convert(weights: Weights, folder: Path, form: str) -> None:
        """Write the model in the program's own format, its weights stored as `form`, one of FORMS."""

    @abstractmethod
    def generate(self, request: TextRequest) -> Answer:
        """Continue one prompt."""

    def write(self, requests: Sequence[TextRequest], batch: int) -> list[Answer]:
        """Continue all prompts, `batch` at once: the next starts when a text ends."""
        return [self.generate(request) for request in requests]


def last_line(output: str) -> str:
    """The last line that a program printed, usually the reason why it ended."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no message")


def run_command(*command: object) -> str:
    """Run a command and return what it printed. Raises RuntimeError with the last line of that, if it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode:
        raise RuntimeError(last_line(result.stdout))
    return result.stdout


def main(address: str, descriptor: str) -> None:
    """Answer the messages that come through a pipe, about the program whose class has this address ("module:class"):

    ("convert", folder of the model, vocabulary, folder, form): None
    ("load", LoadRequest): (version, settings)
    ("write", list of TextRequest, batch): list of Answer

    each as (answer, None), or as (None, the reason) if it fails.
    """
    os.setpgid(0, 0)  # `ProgramProcess` stops and ends the whole group.
    program: type[Program] = pkgutil.resolve_name(address)
    loaded: Any = None
    connection = Connection(int(descriptor))
    while True:
        try:
            do, arguments = connection.recv()
        except (EOFError, OSError):
            # The run was killed: without it nobody would end what the program started, such as a server.
            os.killpg(0, signal.SIGKILL)
        answer: Any = None
        try:
            if do == "convert":
                source, vocabulary, *rest = arguments
                program.convert(Weights(source, vocabulary), *rest)
            elif do == "load":
                loaded = program(*arguments)
                answer = loaded.version, loaded.settings
            else:
                answer = loaded.write(*arguments)
        except Exception as error:  # Whatever a program raises is the reason why its row is left out.
            connection.send((None, f"{type(error).__name__}: {error}"))
        else:
            connection.send((answer, None))
