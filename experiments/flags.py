"""The flags of `test.py`: a field each, with its help below it. settings.py interprets them.

A new flag takes two places: its field (here, or in `Decoding` for how to guess), and the code that uses it. The parser,
--help, the record of a run and --rerun are derived from the field.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from engine.quantised import BITS
from inputs.commandLine import VERSION, Parser, add_flags, choice, flag, flags_of, number, path, switch, text, whole
from inputs.files import ROOT
from inputs.models import DTYPES
from methods.catalogue import METHODS, QUICK, Role, choose
from methods.programs.registry import PROGRAMS
from methods.samplers import Decoding
from utils import Sampling, UserError

TIMED = ("speed", "speedNew", "speedMulti", "contrastive", "compare", "sweep", "steps")  # modes that measure speed
# Defaults that differ between modes; those for the other modes are where they are used.
MAX_LEN = {"speedNew": 1000, "diversity": 45}
STRIDE = 512
REPEATS = {"compare": 2, "sweep": 2, "diversity": 20}
FILTERS = {"diversity": (1.0, 1.0)}  # temperature and top_p; the article's naive sampling has neither
ON_OFF: dict[str, Any] = {"metavar": None, "nargs": "?", "const": 1, "choices": (0, 1)}  # no value means 1
# What a flag is for, and f(settings) -> whether a run does that.
CORPORA = "texts from the data set", lambda run: run.prompts_from_corpora or run.measuring.ppl
SEVERAL = (
    "several texts from the data set",
    lambda run: run.measuring.ppl or (run.prompts_from_corpora and run.measuring.groups.keys() - {"steps"}),
)
CUT_PROMPTS = "prompts from the data set", lambda run: run.prompts_from_corpora
GENERATED = "modes that generate text", lambda run: run.measuring.modes
SAMPLED = (  # Contrastive decoding has a temperature of its own.
    "modes that draw text from the target, and for --audit",
    lambda run: any(not METHODS[name].contrasts for name in run.measuring.names) or run.measuring.audit,
)
WRITTEN = "modes that generate text, except --steps", lambda run: set(run.measuring.modes) - {"steps"}
KEPT = "results to keep", lambda run: not run.measuring.played
REPEATED = (
    "modes that continue a prompt several times",
    lambda run: run.measuring.groups.keys() - {"steps", "lossless", *([] if run.draws else ["diversity"])},
)
WINDOWS = "--ppl", lambda run: run.measuring.ppl
CONTINUED = "prompts that are continued", lambda run: run.measuring.modes and not run.output.chat
LINES = "prompts that are measured", lambda run: run.measuring.groups
TIMES = "modes that measure speed, and not --diversity", lambda run: run.measuring.timed and not run.measuring.diversity
COPY = "the target's own copy (--draft self)", lambda run: {"self"} & {*vars(run.models).values(), *run.measuring.names}
OTHERS = "methods of other programs", lambda run: any(":" in name for name in run.measuring.names)
IN_BATCHES = (
    "modes that measure speed, except --sweep and --steps, for --lossless, and for --audit of drawn texts",
    lambda run: (
        (run.measuring.groups.keys() & {*TIMED, "lossless"} - {"steps"} and not run.measuring.sweep)
        or (run.measuring.audit and run.draws)
    ),
)


@dataclass(frozen=True)
class Measuring:
    """What to measure (the default is --speed --ppl).

    groups: {mode: its methods}; played: the one method whose text is played, and nothing is measured.
    """

    speed: int | None = flag(whole(0, 1), None, **ON_OFF)
    """Measure the time to the first token (TTFT), the time per output token (TPOT) and the tokens per second of the
    draft alone, the target alone, and speculative sampling. --speed 0 switches it off."""
    speed_new: bool = switch()
    """Measure the speed of the additive draft-length rule (see --draftLength) on long texts: 1000 new tokens unless
    --maxLen says otherwise."""
    speed_multi: bool = switch()
    """Measure the speed of a cascade of three models: the draft guesses for --mid, and both together guess for the
    target."""
    contrastive: bool = switch()
    """Measure the speed of contrastive decoding, plain and speculative."""
    compare: str | None = flag(text, None, "METHODS", first=True)
    """Measure the speed of several methods side by side. Give all, or a comma-separated list of: {methods}. The target
    alone is always measured too, as the baseline. all stands for every method whose models are available, except
    {left_out}. Other programs: {programs}. llama.cpp:int8 is one method of llama.cpp, llama.cpp alone all. Those other
    than generate (of transformers) must be installed: make bench-peers."""
    sweep: str | None = flag(str, None, None, nargs="?", const="gamma", choices=("gamma", "batch"))
    """Measure the speed of speculative sampling with gamma from 1 to 10, compare it with the speed that theory
    predicts, and draw a figure. Here --temperature takes several values. --sweep batch: with 1 to 32 texts decoded
    together and gamma of up to 8, as a map."""
    steps: bool = switch()
    """Measure what the steps of decoding cost: forwards of 1 to 32 tokens beside the time to read as many bytes,
    prefill, the growth with the context, and the parts of a round of --gamma guesses. With lookup, which guesses only
    where it finds a match, no round is timed."""
    ppl: int | None = flag(whole(0, 1), None, **ON_OFF)
    """Measure the perplexity of the draft, the target and the speculative sampler: of each text, and of the whole
    corpus. --ppl 0 switches it off."""
    diversity: bool = switch()
    """Measure the diversity of each method's texts: n-gram entropy, distinct n-grams, repetition, and their
    perplexity under the target."""
    lossless: str | None = flag(text, None, "METHODS", nargs="?", const="speculative", first=True)
    """Test whether the text of a method is distributed as the target's own. Give all, or a comma-separated list of:
    {lossless}. all stands for every one of them whose models are available, except target, which is what they are
    compared with, and noCache and speculativeNoCache, which are slow. quick in the list leaves out the planted
    mistakes, which take most of the time of a small run. Without a value: speculative. Cannot be combined with other
    modes. The exit code is 0 if no test finds a difference and 1 otherwise."""
    audit: Path | None = flag(path, None, "FILE")
    """Test whether the texts in this file are the target's under the flags of sampling, whatever wrote them. Each line
    is a JSON object with prompt and with tokens (token ids) or text; of both, the tokens count. Cannot be combined with
    other modes. A --draft with the target's tokenizer makes the tests more sensitive. The exit code is 0 if no test
    rejects the texts and 1 otherwise. docs/lossless.md says more."""
    written_in: str = choice(tuple(DTYPES), "bfloat16", only=("--audit", lambda settings: settings.measuring.audit))
    """The dtype in which the texts of --audit were computed. It decides how much rounding may explain."""
    rerun: str | None = flag(text, None, "RUN")
    """Repeat a run of results.jsonl in the folder --out with the flags and the device of its record, and report whether
    it produces the same texts and figures. Not compared are times, texts that depend on times, and texts of other
    programs. The repetition is added to that folder as a new run. Give the run's name, or 1 for the newest run, 2 for
    the one before. Takes no other flag but --out. The exit code is 0 if everything is equal and 1 otherwise."""
    check: bool = switch()
    """Check the device: whether every method of --lossless all writes plain decoding's greedy text on it, in float32,
    eager and compiled, what memory and speed it has, and where Pythia-2.8b would fit. Prints one page. Takes no other
    flag but --device. The exit code is 0 if every check passes and 1 otherwise."""
    repeats: int | None = flag(whole(1), only=REPEATED)
    """How many times each prompt is continued. Default: 3; for --compare and --sweep 2, for --diversity 20."""
    batch: int | None = flag(whole(1), only=IN_BATCHES)
    """How many texts to decode at a time. The others wait: when a text ends, its row of the batch goes to the next
    prompt. For the modes that measure speed, except --sweep and --steps, and for --lossless. For --audit of drawn
    texts: along how many texts guesses are made at a time. Default: 1; for --lossless and --audit 64."""
    tokens: int | None = flag(whole(1), only=("--lossless", lambda settings: settings.measuring.lossless))
    """How many tokens of each method --lossless tests at least. Default: 100000."""
    seed: int = flag(whole(0, (1 << 62) - 1), 0)
    """The seed of every random choice except the order in which methods are timed."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    played: str | None = None

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

    @property
    def plants(self) -> bool:
        """Whether --lossless tests planted mistakes too."""
        return QUICK not in map(str.strip, (self.lossless or "").split(","))

    def repeats_of(self, mode: str) -> int:
        """How often each prompt is continued in `mode`."""
        return self.repeats or REPEATS.get(mode, 3)


@dataclass(frozen=True)
class ModelChoice:
    """Models."""

    target: str = flag(text, None, "MODEL", first=True)
    """The large model whose text is to be generated: the name of a folder in models/, a path, a hub id owner/name,
    which is downloaded at its first use, or random:SHAPE, Pythia's shape with random weights, such as
    random:pythia-2.8b. Default: pythia-2.8b if that and pythia-70m are in models/, else the bundled
    target."""
    draft: str = flag(text, None, "MODEL", first=True)
    """The small model that guesses, named as --target. If it has another tokenizer, it guesses the tokens that both
    have. Or self: the target's own copy with weights of few bits, which shares the target's KV cache. Or head: the
    trained head of --head. Or lookup: no model, the guesses come from the text so far. Default: pythia-70m or the
    bundled draft, as for --target."""
    mid: str | None = flag(text, None, "MODEL")
    """The model between the two, named as --target, or self, as for --draft. --speedMulti and the methods cascade and
    mid need it. It must have the target's tokenizer, and --draft must be given too, but not as self. Default: if
    neither --target nor --draft is given, pythia-410m or the bundled mid model; else none."""
    head: str | None = flag(text, None, "FOLDER")
    """The folder of a head that was trained for the target (scripts/trainHead.py): one decoder layer that guesses from
    the target's hidden states. It is the draft if no other is named. Default: for the bundled target the bundled head,
    else none."""
    draft_bits: str = choice((*map(str, BITS), "auto"), "6", only=COPY)
    """The bits of a weight in the target's own copy (self). auto: the number that decodes fastest, by acceptance and
    times measured on continuations of the prompts, which takes some seconds; of nearly equal ones, 6 before 5."""
    draft_vocab: int | None = flag(whole(1))
    """Let the draft guess only the N most frequent tokens, which makes its output layer smaller. Default: all
    tokens."""
    offline: bool = switch()
    """Download nothing. A model that is missing is an error."""
    dtype: str | None = choice(tuple(DTYPES))
    """The dtype of the weights. --lossless tests drawn text in float32, and in this dtype too. Default: for speed
    bfloat16, but float16 on GPUs without it, and float32 on CPUs without it unless --compile is given; for --ppl,
    --diversity, --lossless and --audit float32."""
    compile: bool = switch(first=True)
    """Decode with C++ kernels on a CPU, and by CUDA graphs on a GPU. The first time on a CPU, the kernels are built for
    it, which takes about a minute. No measurement includes that time. --audit stays eager, on a GPU --ppl too."""
    device: str | None = flag(text, None, None)
    """cpu, cuda, cuda:1 and so on, or auto: a model too large for one GPU is spread over all GPUs and the host's
    memory. mps is the GPU of an Apple computer (not tested on a real one). Default: cuda if available, else cpu."""
    draft_device: str | None = flag(text, None, "DEVICE")
    """Put the draft on a device of its own: cpu, cuda:1 and so on. Only tokens, guesses and the guesses' distributions
    travel between the two. Default: the target's device."""

    @property
    def bits(self) -> int | None:
        """The bits of a weight in the target's copy; None: not measured yet."""
        return None if self.draft_bits == "auto" else int(self.draft_bits)

    @property
    def roles(self) -> set[Role]:
        """The roles available beside the target. Its copy can always be created."""
        named = {role for role in Role if role is Role.SELF or getattr(self, role.model)}
        no_reader = {"lookup": {Role.DRAFT, Role.READER}, "head": {Role.READER}}.get(self.draft, set())
        no_expert = self.draft in ("lookup", "head", "self") or self.draft_vocab
        return named - no_reader - ({Role.EXPERT} if no_expert else set())


@dataclass(frozen=True)
class SamplingChoice:
    """Sampling."""

    max_len: int | None = flag(whole(1), first=True, only=WRITTEN)
    """The most new tokens of a text. A timed text has as many: no end token ends it. Default: 200; for --speedNew 1000,
    for --diversity 45."""
    temperatures: tuple[float, ...] = flag(
        number(0, 1000), (), "T", name="temperature", nargs="+", first=True, only=SAMPLED
    )
    """The temperature of the target, and of the draft unless --draftTemperature is given. 0 is greedy decoding. --sweep
    takes several. Default: 0.85; for --diversity 1."""
    top_p: float | None = flag(number(0, 1), None, "P", only=SAMPLED)
    """Keep the smallest set of most probable tokens that holds this much probability (nucleus sampling). 1 keeps all.
    Default: 0.9; for --diversity 1."""
    top_k: int = flag(whole(0), 0, "K", only=SAMPLED)
    """Keep the K most probable tokens. 0 keeps all."""
    repetition_penalty: float = flag(number(0.01, 100), 1.0, "R", name="repetition_penalty", only=SAMPLED)
    """Divide positive logits, and multiply negative ones, of tokens already in the text by this. 1 does nothing."""

    def of(self, mode: str, temperature: float | None = None) -> Sampling:
        """`Sampling` of `mode`, at one of several temperatures."""
        default, top_p = FILTERS.get(mode, (0.85, 0.9))
        if temperature is None:
            temperature = self.temperatures[0] if self.temperatures else default
        return Sampling(temperature, self.top_k, top_p if self.top_p is None else self.top_p, self.repetition_penalty)

    def max_len_of(self, mode: str) -> int:
        """The most new tokens of a text in `mode`."""
        return self.max_len or MAX_LEN.get(mode, 200)


@dataclass(frozen=True)
class TextChoice:
    """Texts."""

    dataset: str = flag(text, "sample", "NAME", only=CORPORA)
    """The texts to use: sample, wikitext, pg19, another data set installed by downloadData.py, or the path of a text
    file, of a folder of text files, or of a saved data set."""
    books: int | None = flag(whole(1), only=CORPORA)
    """The most documents of each corpus of the data set to use. Default: all."""
    sentences: int = flag(whole(1), only=SEVERAL)
    """How many texts to use: prompts where texts are generated, texts of each corpus for --ppl. Default: 10; for
    --lossless 64."""
    sentence_limit: int = flag(whole(1), 500, only=CORPORA)
    """Use only texts of at least this many characters."""
    prompt: str | None = flag(text, None, "TEXT", first=True, only=CONTINUED)
    """Continue this text instead of the data set."""
    questions: tuple[str, ...] = flag(text, (), "TEXT", name="question", action="append", only=GENERATED)
    """Ask a chat model this question in the form of its chat template, instead of using the data set. Given several
    times, with --show or --html, it is a conversation: each question comes after the answers to those before it.
    Measurements take one question, because the later ones depend on the answers."""
    prompt_file: Path | None = flag(path, None, "FILE", only=LINES)
    """Continue each line of this file instead of the data set."""
    prompts: str | None = flag(text, None, "FILE", only=TIMES)
    """Continue the prompts of this file, and show the speed of each category of prompts. Each line is a JSON object
    with category, and with prompt (text) or turns (a list of texts: a conversation). sample: the bundled prompts.
    specbench: those of Spec-Bench, once downloadData.py has downloaded them. A model with a chat template reads each
    turn as a message. The answers to earlier turns are the target's; they are written before anything is measured."""
    prompt_lengths: tuple[int, ...] = flag(whole(1), (64,), name="promptLen", nargs="+", only=CUT_PROMPTS)
    """The length of prompts from the data set, in tokens. Several lengths are measured one after the other. Default:
    64."""
    window: int = flag(whole(2), 1024, only=WINDOWS)
    """The window of the corpus perplexity, in tokens; at most the models' context."""
    stride: int | None = flag(whole(1), None, only=WINDOWS)
    """How many tokens each window starts after the one before; less than --window. Default: 512, or half of a window
    that is not longer."""

    @property
    def from_corpora(self) -> bool:
        """Whether the prompts come from the data set, not from a flag."""
        return self.prompt is None and not self.questions and self.prompt_file is None and self.prompts is None


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    folder: Path = flag(path, ROOT, "FOLDER", name="out", only=KEPT)
    """The folder of results.txt, results.jsonl and figures/, which is created if it does not exist. Default: the
    project's folder."""
    texts: Path | None = flag(path, None, "FOLDER", only=OTHERS)
    """Test sampled texts of other programs before they are timed, as --audit does, and write them to this folder, each
    in a file for --audit."""
    show: bool = switch(first=True)
    """Show one text on the screen as it is decoded: guesses accepted, guesses rejected, and the target's own tokens. A
    terminal shows it slowly enough to follow; its speed comes at the end. Nothing is measured. --speedNew, --speedMulti
    or --contrastive choose the method; the default is speculative sampling."""
    chat: bool = switch()
    """Talk with an instruct model: each line of the input is a question. An answer is shown as it is decoded, accepted
    guesses faintly, with its speed at the end. Ctrl-C ends an answer. /plain and /self switch guesses off and on, /new
    forgets the conversation, /quit ends it."""
    html: Path | None = flag(path, None, "FILE")
    """Write what --show shows as a web page that plays the text back round by round. If the name ends in .json, write
    the rounds and their origin."""


PARTS = (ModelChoice, Measuring, Decoding, SamplingChoice, TextChoice, Output)
FLAGS = {name: declared for part in PARTS for name, declared in flags_of(part).items()}


@cache
def parser() -> Parser:
    result = Parser(
        prog="test.py",
        usage="%(prog)s [flags]",
        description="Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding "
        "method side by side. Results go to results.txt. docs/glossary.md explains how to read them.",
    )
    own = {name: method for name, method in METHODS.items() if not method.engine}
    lists = {
        "methods": "; ".join(f"{name} ({method.title})" for name, method in own.items()),
        "programs": "; ".join(f"{name} ({', '.join(program.rows)})" for name, program in PROGRAMS.items()),
        "left_out": ", ".join(name for name, method in own.items() if "compare" not in method.in_all),
        "lossless": ", ".join(name for name, method in METHODS.items() if method.lossless),
    }
    first = result.add_argument_group("the flags that most people need first")
    for part in PARTS:
        add_flags(result, first, part, **lists)
    other = result.add_argument_group("other")
    other.add_argument("--version", action="version", version=VERSION, help="Print the version and stop.")
    return result


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the command line `argv`. Raises UserError for a value that is invalid whatever the other flags."""
    args = parser().parse_args(argv)
    Sampling(args.contrastiveTemperature)
    Sampling().but(args.draftTemperature, args.draftTop_p)
    for temperature in args.temperature or [1.0]:
        Sampling(temperature, args.top_k, 1.0 if args.top_p is None else args.top_p, args.repetition_penalty)
    for mode in "compare", "lossless":
        choose(getattr(args, mode) or "all", set(Role), mode)  # Which models there are is not known yet.
    for wrong, message in wrong_values(args, argv):
        if wrong:
            raise UserError(message)
    return args


def wrong_values(args: argparse.Namespace, argv: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """(condition, message) of values of `argv` that the parser takes and that are invalid all the same."""
    given = {word.split("=")[0] for word in argv}
    for single, other, why in (
        ("rerun", "out", "takes its flags from the run"),
        ("check", "device", "takes only --device"),
    ):
        for name in FLAGS if getattr(args, single) else ():
            yield f"--{name}" in given and name not in (single, other), f"--{single} {why}; leave out --{name}"
    yield (args.stride or 0) >= args.window, f"--stride ({args.stride}) must be less than --window ({args.window})"
    several = len(args.temperature or ()) > 1 and not args.sweep
    yield several, "only --sweep takes several temperatures; give one"
    prompts = [flag for flag in ("prompt", "question", "promptFile", "prompts") if getattr(args, flag) is not None]
    yield len(prompts) > 1, f"--{' and --'.join(prompts[:2])} both give the prompt; use one of them"
    one = [] if args.prompt is None else [args.prompt]
    for name, values, blank in ("prompt", one, "\n"), ("question", args.question or [], None):
        yield not all(value.strip(blank) for value in values), f"--{name} is empty: give some text"
        broken = any(value != value.encode(errors="replace").decode() for value in values)
        yield broken, f"--{name} is not text in this terminal's encoding: give UTF-8"
    if args.html:
        folder = os.path.dirname(os.path.abspath(args.html))
        yield not os.path.isdir(folder), f"--html {args.html} is in no folder that exists"
        yield os.path.isdir(args.html), f"--html {args.html} is a folder; name a file"
        real = os.path.realpath(args.html)
        closed = not os.access(os.path.dirname(real), os.W_OK) or (os.path.exists(real) and not os.path.isfile(real))
        yield closed, f"--html {args.html} cannot be written: name another file"
    yield args.audit and not os.path.isfile(args.audit), f"--audit {args.audit} is not a file"
    yield args.texts and not os.path.isdir(args.texts), f"--texts {args.texts} is not a folder"
    yield os.path.lexists(args.out) and not os.path.isdir(args.out), f"--out {args.out} is not a folder"
