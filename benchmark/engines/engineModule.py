"""`ROWS`: the optional rows of the benchmark, and what they share with the processes that run them.

A row is run by a child process (worker.py), in which the engine's module is imported: `openvinoGenai`, `llamaCpp`,
`cTranslate`. Each of these modules has

    convert(weights, folder, bits)      writes the model in the engine's own format
    Engine(load)                        loads it, as `Load` says
    Engine.generate(asked)              continues one prompt: the tokens, and when they came
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inputs.folders import ROOT

FOLDER = ROOT / ".peers"  # what `python -m benchmark.engines.install` installs, and the converted models
SITE, SERVER = FOLDER / "site", FOLDER / "llama-server"
BITS = {"float32": 24, "float16": 11, "bfloat16": 8, "int8": 6}  # of precision: 2 ** -BITS is the unit roundoff


@dataclass(frozen=True)
class Row:
    """A row: an engine with weights of some precision, with or without a draft model.

    engine: its name. module: in this folder. precision: in which it computes: one of BITS. stored: bytes of a stored
    weight, which tell how much memory the row needs. alpha: of synthetic acceptance, for models with random weights.
    """

    engine: str
    module: str
    precision: str
    stored: int
    speculative: bool = False
    alpha: float | None = None

    @property
    def name(self) -> str:
        """As it stands in the table. A row with quantised weights says so."""
        words = self.precision + " (quantised)" * self.quantised
        guesses = f", synthetic {self.alpha}" if self.alpha else ", speculative" * self.speculative
        return f"{self.engine}, {words}{guesses}"

    @property
    def quantised(self) -> bool:
        """Whether its weights are not those of the target."""
        return self.precision == "int8"

    @property
    def form(self) -> str:
        """The name of the converted model's folder: rows of the same form share it."""
        return f"{self.module}-{8 * self.stored}"


@dataclass(frozen=True)
class Load:
    """What a row's process loads: converted models, in folders. draft: None without speculative decoding. context: the
    tokens of a text, prompt included."""

    target: Path
    draft: Path | None
    precision: str
    threads: int
    gamma: int
    context: int
    alpha: float | None = None


@dataclass(frozen=True)
class Asked:
    """One text that is asked for. temperature: 0 for greedy decoding. The text never ends early."""

    prompt: list[int]
    count: int
    temperature: float
    top_p: float
    seed: int


# The tokens, and [seconds since the call, tokens that came then], as they came.
Answer = tuple[list[int], list[tuple[float, int]]]


def rows(dtype: str, alpha: float | None = None) -> list[Row]:
    """All rows, in the order of the table. dtype: of the benchmark's own rows. OpenVINO computes in it; llama.cpp has
    float16 everywhere, CTranslate2 has no 16-bit type on CPUs.

    alpha: accept guesses by a coin. Only llama.cpp can; the speculative rows of others are left out.
    """
    short = "float32" if dtype == "float16" else dtype
    found = [
        Row("OpenVINO", "openvinoGenai", short, 2),
        Row("OpenVINO", "openvinoGenai", short, 2, speculative=True),
        Row("OpenVINO", "openvinoGenai", "int8", 1),
        Row("llama.cpp", "llamaCpp", "float16", 2),
        Row("llama.cpp", "llamaCpp", "float16", 2, speculative=True, alpha=alpha),
        Row("llama.cpp", "llamaCpp", "int8", 1),
        Row("CTranslate2", "cTranslate", "float32", 4),
        Row("CTranslate2", "cTranslate", "int8", 1),
    ]
    return [row for row in found if alpha is None or row.alpha or not row.speculative]


ENGINES = tuple(dict.fromkeys(row.engine for row in rows("float32")))
