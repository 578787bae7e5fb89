"""`Options`: the flags of the benchmark."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from benchmark.engines.engineProcess import ENGINES
from benchmark.randomModels import SHAPES
from engine.quantised import BITS
from inputs.commandLine import Parser, path, text, whole
from inputs.files import ROOT
from inputs.models import DTYPES, default_head, default_pair, find_model
from utils import UserError

# Texts so long that the first token is under a tenth of the time.
DEFAULTS = {"maxLen": 300, "prompts": 5, "repeats": 3}
SHAPE_DEFAULTS = {"maxLen": 64, "prompts": 2, "repeats": 2}  # with --shapes


@dataclass(frozen=True)
class Options:
    """What the flags say.

    target, draft: names of models, or of shapes if `shapes`. head: of a trained head, which guesses in compiled rows;
        None: there is none. dtype, device: None for the default.
    draft_bits: of the weights of the target's own copy; None: it does not guess. gamma_copy: its guesses in a round.
    peers: names of the other engines to time. batches: how many texts are decoded at once; none: single texts.
    text_check: the rows of this process whose text is tested. texts: the folder for the other engines' audited texts.
    flags: the flags themselves, for the record.
    """

    target: str
    draft: str
    head: str | None
    shapes: bool
    gamma: int
    draft_bits: int | None
    gamma_copy: int
    max_len: int
    prompts: int
    repeats: int
    dtype: str | None
    device: str | None
    seed: int
    out: Path
    compile: bool
    peers: tuple[str, ...]
    batches: tuple[int, ...]
    text_check: str
    texts: Path | None
    flags: dict[str, object]

    @property
    def names(self) -> dict[str, str]:
        """{role: name of the model}."""
        return {"target": self.target, "draft": self.draft}

    @property
    def is_map(self) -> bool:
        """Whether the map of batch and gamma is measured: queues of texts of models with random weights."""
        return self.shapes and bool(self.batches)


def parser() -> Parser:
    """The parser of the benchmark's flags."""
    flags = Parser(
        prog="python -m benchmark",
        allow_abbrev=False,
        description="Tokens per second beside transformers' own decoding, forwards beside the memory limit, "
        "growth with the context, and the share of sampling. generate of transformers compiles nothing on a CPU unless "
        "it is asked to, so that is a row of its own.",
    )
    add = flags.add_argument
    add("--target", type=text, metavar="MODEL", help="the large model (default: as test.py)")
    add("--draft", type=text, metavar="MODEL", help="the small model")
    add("--head", type=text, metavar="FOLDER", help="a head that was trained for the target (the bundled one)")
    shapes = "random weights in two of these shapes instead: " + ", ".join(SHAPES)
    add("--shapes", type=text, metavar="TARGET,DRAFT", help=shapes)
    add("--gamma", type=whole(1, 1000), default=4, metavar="N", help="tokens guessed in a round (4)")
    copy = (
        "the bits of a weight in the target's own copy, which guesses in compiled rows on a CPU; none: no such rows (4)"
    )
    add("--draftBits", choices=[*map(str, BITS), "none"], default="4", help=copy)
    add("--gammaCopy", type=whole(1, 1000), default=5, metavar="N", help="tokens that the copy guesses in a round (5)")
    for flag, value in DEFAULTS.items():
        usual = f"({value}; with --shapes {SHAPE_DEFAULTS[flag]})"
        add(f"--{flag}", type=whole(1, 10_000), metavar="N", help=usual)
    add("--dtype", choices=list(DTYPES), help="(bfloat16 if the device computes in it)")
    add("--device", type=text, help="cpu, cuda ... (cuda if there is a GPU)")
    add("--seed", type=whole(0, (1 << 62) - 1), default=0, metavar="N")
    add("--out", type=path, default=ROOT, metavar="FOLDER", help="(the project's folder)")
    add("--no-compile", action="store_true", help="leave out the compiled models")
    checked = "whose text is tested, which takes as long as timing it; other engines are always tested (all)"
    add("--text-check", choices=["all", "compiled", "none"], default="all", help=f"the rows of this process {checked}")
    engines = f"time other engines too; after `make bench-peers` all of {', '.join(ENGINES)}, or those named"
    add("--peers", type=text, nargs="?", const=",".join(ENGINES), metavar="ENGINE,...", help=engines)
    many = (
        "measure queues of texts that are decoded so many at a time instead of single texts, such as 1,8,32; with "
        "--shapes over gamma too"
    )
    add("--batch", type=text, metavar="N,...", help=many)
    kept = "with --peers: write the sampled texts of each engine to FOLDER, for test.py --audit"
    add("--texts", type=path, metavar="FOLDER", help=kept)
    return flags


def parse(argv: Sequence[str]) -> Options:
    """The options that the flags `argv` say. Raises UserError for flags that cannot be right."""
    args = parser().parse_args(argv)
    for flag, value in (SHAPE_DEFAULTS if args.shapes else DEFAULTS).items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    if args.shapes and args.batch and args.peers:
        raise UserError("--shapes with --batch measures this project's rows; leave out --peers")
    if args.texts and not args.peers:
        raise UserError("--texts are those of other engines; give --peers too")
    if args.texts and not os.path.isdir(args.texts):
        raise UserError(f"--texts {args.texts} is not a folder")
    if args.head and (args.shapes or args.no_compile):
        raise UserError("--head guesses in compiled rows of a trained target; leave out --shapes and --no-compile")
    args.target, args.draft = models_of(args)
    if not args.shapes and not args.no_compile:
        args.head = args.head or default_head(args.target)
    if args.head:
        find_model(args.head)
    flags = vars(args)
    named_alike = {field.name: flags[field.name] for field in fields(Options) if field.name in flags}
    others = {
        "shapes": args.shapes is not None,
        "draft_bits": None if args.draftBits == "none" else int(args.draftBits),
        "gamma_copy": args.gammaCopy,
        "max_len": args.maxLen,
        "compile": not args.no_compile,
        "batches": batches_of(args.batch),
        "peers": tuple(known_names(args.peers, ENGINES, "engine")),
        "flags": {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()},
    }
    return Options(**(named_alike | others))


def batches_of(words: str | None) -> tuple[int, ...]:
    """The numbers in a list with commas. Raises UserError for what is no number of texts."""
    names = words.split(",") if words else []
    for name in names:
        if not (name.isascii() and name.isdigit() and 1 <= int(name) <= 1024):
            raise UserError(f"--batch takes numbers of texts from 1 to 1024, such as 1,8,32; {name!r} is none")
    return tuple(dict.fromkeys(map(int, names)))


def known_names(words: str | None, known: Collection[str], what: str) -> list[str]:
    """The names in a list with commas. Raises UserError for one that is not known."""
    names = words.split(",") if words else []
    for name in names:
        if name not in known:
            raise UserError(f"unknown {what} {name!r}; known are: {', '.join(known)}")
    return names


def models_of(args: argparse.Namespace) -> tuple[str, str]:
    """The names of target and draft. Raises UserError for shapes that are unknown, or not two."""
    if args.shapes is None:
        pair = default_pair()
        return args.target or pair[0], args.draft or pair[1]
    if args.target or args.draft:
        raise UserError("--shapes names both models; leave out --target and --draft")
    names = known_names(args.shapes, SHAPES, "shape")
    if len(names) != 2:
        raise UserError("--shapes takes two shapes, TARGET,DRAFT")
    return names[0], names[1]
