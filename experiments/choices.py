"""`Settings`: everything the flags of `test.py` say, sorted into typed parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from methods.makers import Decoding
from utils import Sampling

TIMED = ("speed", "speedNew", "speedMulti", "contrastive", "compare", "sweep")  # modes that measure speed
MODES = (*TIMED, "diversity", "lossless")  # modes that measure methods
ALL_MODES = (*MODES, "ppl", "show", "html")
MAX_LEN = {"speedNew": 1000, "diversity": 45}
REPEATS = {"compare": 2, "sweep": 2, "diversity": 20}
USUAL = {"diversity": (1.0, 1.0)}  # temperature and top_p; the article's naive sampling has neither
TOKENS, ROWS = 100_000, 64  # of --lossless: tokens tested, and texts written at a time


@dataclass(frozen=True)
class Measuring:
    """What to measure. groups: {mode: its methods}; played: the one method whose text is played, and nothing is
    measured; repeats, tokens None: the mode's default."""

    groups: dict[str, list[str]]
    played: str | None
    ppl: bool
    repeats: int | None
    tokens: int | None
    seed: int

    @property
    def timed(self) -> list[str]:
        """The modes that measure speed."""
        return [mode for mode in self.groups if mode in TIMED]

    @property
    def names(self) -> set[str]:
        """All methods that are measured or played."""
        return {name for names in self.groups.values() for name in names} | ({self.played} if self.played else set())

    @property
    def modes(self) -> list[str]:
        """All modes that generate text."""
        return [*self.groups, *(["show"] if self.played else [])]

    def repeats_of(self, mode: str) -> int:
        """How often each prompt is continued in that mode."""
        return self.repeats or REPEATS.get(mode, 3)


@dataclass(frozen=True)
class ModelChoice:
    """Which models, and how they are loaded. draft "lookup": the text so far guesses; None: the default, for
    draft_device the target's device."""

    target: str
    draft: str
    mid: str | None
    draft_vocab: int | None
    dtype: str | None
    device: str | None
    draft_device: str | None
    compile: bool
    offline: bool

    @property
    def roles(self) -> set[str]:
        """The models there are beside the target."""
        return ({"draft"} if self.draft != "lookup" else set()) | ({"mid"} if self.mid else set())


@dataclass(frozen=True)
class SamplingChoice:
    """How tokens are drawn, and how many. None: the mode's default."""

    temperatures: tuple[float, ...]
    top_p: float | None
    top_k: int
    repetition_penalty: float
    max_len: int | None

    def of(self, mode: str, temperature: float | None = None) -> Sampling:
        """`Sampling` of that mode, at one of several temperatures."""
        usual, top_p = USUAL.get(mode, (0.85, 0.9))
        if temperature is None:
            temperature = self.temperatures[0] if self.temperatures else usual
        return Sampling(temperature, self.top_k, top_p if self.top_p is None else self.top_p, self.repetition_penalty)

    def max_len_of(self, mode: str) -> int:
        """New tokens at most in that mode."""
        return self.max_len or MAX_LEN.get(mode, 200)


@dataclass(frozen=True)
class TextChoice:
    """Which texts are continued and scored."""

    dataset: str
    books: int | None
    sentences: int
    sentence_limit: int
    prompt: str | None
    question: str | None
    prompt_file: Path | None
    prompt_lengths: tuple[int, ...]
    window: int
    stride: int

    @property
    def from_corpora(self) -> bool:
        """Whether the prompts come from the data set, not from a flag."""
        return self.prompt is None and self.question is None and self.prompt_file is None


@dataclass(frozen=True)
class Output:
    """Where results go. show: on the screen, as text is decoded; html: the page that plays it."""

    folder: Path
    show: bool
    html: Path | None


@dataclass(frozen=True)
class Settings:
    """Everything the flags say. rerun: the run to repeat; flags: the flags themselves, for the run's record."""

    measuring: Measuring
    models: ModelChoice
    decoding: Decoding
    sampling: SamplingChoice
    texts: TextChoice
    output: Output
    rerun: str | None
    flags: dict[str, object]

    @property
    def rows(self) -> int:
        """Texts that are decoded at a time. `--lossless` writes many; else each is timed alone."""
        if "lossless" not in self.measuring.groups:
            return 1
        return min(ROWS, -(-self.tokens // self.sampling.max_len_of("lossless")))

    @property
    def tokens(self) -> int:
        """Tokens of each method that `--lossless` tests at least."""
        return self.measuring.tokens or TOKENS
