"""The flags of `test.py`: `parser`, and the checks of each flag by itself. settings.py says what they mean together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from decoding.lengthRules import RULES as DRAFT_LENGTHS
from decoding.trees.rules import TREE_RULES
from decoding.verification import RULES as VERIFICATIONS
from engine.quantised import BITS
from inputs.commandLine import VERSION, Parser, number, path, text, whole
from inputs.files import ROOT
from inputs.models import DTYPES
from methods.catalogue import METHODS, lossless_methods
from methods.samplers import Decoding
from utils import Sampling, UserError

Options = dict[str, Any]  # what `add_argument` takes by keyword


def flag(
    kind: Callable[[str], Any], help: str, default: object = None, metavar: str | None = "N", **options: Any
) -> Options:
    """A flag that takes a value of that kind. A default that is a word or a number ends the help text. None: there is
    no default, or settings.py decides it."""
    if isinstance(default, (int, float, str)):
        help += f" Default: {default if isinstance(default, str) else format(default, 'g')}."
    return {"type": kind, "help": help, "default": default, "metavar": metavar} | options


def choice(values: Iterable[str], help: str, default: str | None = None) -> Options:
    """A flag that takes one of several words."""
    return flag(str, help, default, None, choices=list(values))


def described(rules: Mapping[str, Callable[..., Any]]) -> str:
    """What each rule does: the first sentence of its docstring."""
    documented = {name: " ".join((rule.__doc__ or "").split()) for name, rule in rules.items()}
    return " ".join(f"{name}: {doc.partition('. ')[0].rstrip('.')}." for name, doc in documented.items())


def switch(help: str) -> Options:
    """A flag without a value."""
    return {"action": "store_true", "help": help}


def on_off(help: str) -> Options:
    """A flag that takes 0 or 1, or no value, which means 1."""
    return flag(whole(0, 1), help, metavar=None, nargs="?", const=1, choices=(0, 1))


# {title of a group: {flag: its options}}. `parser` puts lists of methods for {methods}, {left_out} and {lossless}.
FLAGS = {
    "modes that measure speed (the default is --speed --ppl)": {
        "--speed": on_off(
            "Measure the time to the first token (TTFT), the time per output token (TPOT) and the tokens per second "
            "of the draft alone, the target alone, and speculative sampling. --speed 0 switches it off."
        ),
        "--speedNew": switch(
            "Measure the speed of the additive draft-length rule (see --draftLength) on long texts: 1000 new tokens "
            "unless --maxLen says otherwise."
        ),
        "--speedMulti": switch(
            "Measure the speed of a cascade of three models: the draft guesses for --mid, and both together guess for "
            "the target."
        ),
        "--contrastive": switch("Measure the speed of contrastive decoding, plain and speculative."),
        "--compare": flag(
            text,
            "Measure the speed of several methods side by side. Give all, or a comma-separated list of: {methods}. "
            "The target alone is always measured too, as the baseline. all stands for every method whose models are "
            "there, except {left_out}.",
            metavar="METHODS",
        ),
        "--sweep": flag(
            str,
            "Measure the speed of speculative sampling with gamma from 1 to 10, compare it with the speed that theory "
            "predicts, and draw a figure. Here --temperature takes several values. --sweep batch: with 1 to 32 texts "
            "decoded together and gamma from 0 to 8, as a map.",
            metavar=None,
            nargs="?",
            const="gamma",
            choices=("gamma", "batch"),
        ),
    },
    "other modes": {
        "--ppl": on_off(
            "Measure the perplexity of the draft, the target and the speculative sampler: of each text, and of the "
            "whole corpus. --ppl 0 switches it off."
        ),
        "--diversity": switch(
            "Measure how varied the texts of each method are: n-gram entropy, distinct n-grams, repetition, and their "
            "perplexity under the target."
        ),
        "--lossless": flag(
            text,
            "Test whether the text of a method is distributed as the target's own. Give all, or a comma-separated list "
            "of: {lossless}. all stands for every one of them whose models are there, except target, which is what "
            "they are compared with, and the two without a KV cache, which are slow. Without a value: speculative. "
            "This is a run of its own. The exit code is 0 if no test finds a difference and 1 otherwise.",
            metavar="METHODS",
            nargs="?",
            const="speculative",
        ),
        "--audit": flag(
            path,
            "Test whether the texts in this file are the target's under the flags of sampling, whatever wrote them. "
            "Each line is a JSON object with prompt and with tokens (token ids) or text. This is a run of its own. "
            "--draft, if named, only makes the tests sharper. The exit code is 0 if no test rejects the texts and 1 "
            "otherwise. docs/lossless.md says more.",
            metavar="FILE",
        ),
        "--writtenIn": choice(
            DTYPES,
            "The dtype in which the texts of --audit were computed. It decides how much rounding may explain. "
            "Default: bfloat16.",
        ),
        "--show": switch(
            "Show one text on the screen as it is decoded: guesses accepted, guesses rejected, and the target's own "
            "tokens. A terminal shows it slowly enough to follow. Nothing is measured. --speedNew, --speedMulti or "
            "--contrastive choose the method; the default is speculative sampling."
        ),
        "--html": flag(
            path,
            "Write the same as a web page that plays the text back round by round. To a name that ends in .json, write "
            "the rounds and where they come from.",
            metavar="FILE",
        ),
        "--rerun": flag(
            text,
            "Repeat a run of results.jsonl and report whether it gives the same tokens. Give the run's name, or 1 for "
            "the newest run, 2 for the one before. Takes no other flag but --out. The exit code is 0 if everything is "
            "the same and 1 otherwise.",
            metavar="RUN",
        ),
        "--version": {"action": "version", "version": VERSION, "help": "Print the version and stop."},
    },
    "models": {
        "--target": flag(
            text,
            "The large model whose text is to be generated: the name of a folder in models/, a path, or a hub id "
            "owner/name, which is downloaded at its first use. Default: pythia-2.8b if that and pythia-70m are in "
            "models/, else the bundled target.",
            metavar="MODEL",
        ),
        "--draft": flag(
            text,
            "The small model that guesses, named as --target. If it has another tokenizer, it guesses the tokens that "
            "both have. Or self: the target's own copy with weights of few bits, which shares the target's KV cache. "
            "Or head: the trained head of --head. Or lookup: no model, the guesses come from the text so far. Default: "
            "pythia-70m or the bundled draft, as for --target.",
            metavar="MODEL",
        ),
        "--mid": flag(
            text,
            "The model between the two, which a cascade needs, or self, as for --draft. Default: if neither --target "
            "nor --draft is given, pythia-410m or the bundled mid model; else none.",
            metavar="MODEL",
        ),
        "--head": flag(
            text,
            "A head that was trained for the target (scripts/trainHead.py), a folder: one decoder layer that guesses "
            "from the target's hidden states. It is the draft if no other is named. Default: for the bundled target "
            "the bundled head, else none.",
            metavar="FOLDER",
        ),
        "--draftBits": choice(
            (*map(str, BITS), "auto"),
            "The bits of a weight in the target's own copy (self). auto: those that decode fastest, by acceptance and "
            "times that are measured on a short text.",
            "auto",
        ),
        "--offline": switch("Download nothing. A model that is missing is an error."),
        "--dtype": choice(
            DTYPES,
            "The dtype of the weights. --lossless tests drawn text in float32, and in this dtype too. Default: for "
            "speed the fastest that the device supports natively (bfloat16, float16 on GPUs without bfloat16, else "
            "float32); for --ppl, --diversity, --lossless and --audit float32.",
        ),
        "--compile": switch(
            "Decode with C++ kernels on a CPU, and by CUDA graphs on a GPU. The first time on a CPU, the kernels are "
            "built for it, which takes about a minute. It is not part of any measurement. --diversity and --ppl stay "
            "eager."
        ),
        "--device": flag(
            text,
            "cpu, cuda, cuda:1 and so on, or auto: a model too large for one GPU is spread over all GPUs and the "
            "host's memory. mps is the GPU of an Apple computer (not tested on a real one). Default: cuda if "
            "available, else cpu.",
            metavar=None,
        ),
        "--draftDevice": flag(
            text,
            "Put the draft on a device of its own: cpu, cuda:1 and so on. Only tokens, guesses and the guesses' "
            "distributions travel between the two. Default: the target's device.",
            metavar="DEVICE",
        ),
    },
    "how to guess and to verify": {
        "--gamma": flag(
            whole(1, 1000),
            "How many tokens to guess in a round. For the additive rule it is the least, for draftConfidence and "
            "costAware the most. Default: 4; for --draft self 5; for draftConfidence, costAware and lookup 10.",
        ),
        "--draftLength": choice(
            DRAFT_LENGTHS,
            f"The rule that decides how many tokens to guess. {described(DRAFT_LENGTHS)}",
            Decoding.draft_length,
        ),
        "--draftThreshold": flag(
            number(0, 1),
            "draftConfidence stops guessing after a token that the draft gave a probability below this.",
            Decoding.draft_threshold,
            metavar="P",
        ),
        "--targetThreshold": flag(
            number(0, 1),
            "targetConfidence does not guess after a token that the target gave a probability below this.",
            Decoding.target_threshold,
            metavar="P",
        ),
        "--verification": choice(
            VERIFICATIONS, f"The rule that accepts guesses. {described(VERIFICATIONS)}", Decoding.verification
        ),
        "--tree": flag(
            str,
            "Guess a tree instead of a chain. 3,2,1,1: the last token has 3 children, each of these 2, and so on. "
            "3/2,1,0: level by level, with one number for each node. auto: the shape with the most tokens per second, "
            "by measured acceptance and costs; plain decoding and chains are among its choices. Default: a chain; for "
            "the methods tree and topDown of --compare and --lossless auto.",
            metavar="SHAPE",
        ),
        "--treeRule": choice(
            TREE_RULES, f"The rule that accepts guesses of a tree. {described(TREE_RULES)}", Decoding.tree_rule
        ),
        "--gamma1": flag(
            whole(1, 1000),
            "In a cascade, how many tokens the draft guesses for the mid model in a round.",
            Decoding.gamma1,
        ),
        "--gamma2": flag(
            whole(1, 1000),
            "In a cascade, how many tokens the draft and the mid model together guess for the target in a round.",
            Decoding.gamma2,
        ),
        "--lookupFirst": switch(
            "Let the text so far guess where its last tokens occurred before, as for --draft lookup, and the draft "
            "model elsewhere."
        ),
        "--ngram": flag(
            whole(1),
            "For lookup: at least so many of the last tokens must have occurred before. As many as possible are "
            "looked up. Default: 1; 4 where a draft model guesses elsewhere.",
        ),
        "--draftVocab": flag(
            whole(1),
            "Let the draft guess only the N most frequent tokens, which makes its output layer smaller. Default: all "
            "tokens.",
        ),
        "--draftTemperature": flag(
            number(0, 1000),
            "The temperature of the draft alone. The text stays distributed as the target's; how many guesses are "
            "accepted changes. Default: the target's.",
            metavar="T",
        ),
        "--draftTop_p": flag(
            number(0, 1), "The top_p of the draft alone, likewise. Default: the target's.", metavar="P"
        ),
    },
    "contrastive decoding": {
        "--plausibility": flag(
            number(0, 1),
            "Drop tokens that the target gives less than this share of its highest probability.",
            Decoding.plausibility,
            metavar="A",
        ),
        "--amateurTemperature": flag(
            number(1e-4, 1000),
            "The temperature of the draft's distribution, which is subtracted in logarithms from the target's.",
            Decoding.amateur_temperature,
            metavar="T",
        ),
        "--contrastiveTemperature": flag(
            number(0, 1000),
            "The temperature at which tokens are drawn from the scores. 0 takes the token of the highest score.",
            Decoding.contrastive_temperature,
            metavar="T",
        ),
    },
    "sampling": {
        "--maxLen": flag(
            whole(1), "The most new tokens of a text. Default: 200; for --speedNew 1000, for --diversity 45."
        ),
        "--temperature": flag(
            number(0, 1000),
            "The temperature of the target, and of the draft unless --draftTemperature is given. 0 is greedy "
            "decoding. --sweep takes several. Default: 0.85; for --diversity 1.",
            metavar="T",
            nargs="+",
        ),
        "--top_p": flag(
            number(0, 1),
            "Keep the smallest set of most probable tokens that holds this much probability (nucleus sampling). 1 "
            "keeps all. Default: 0.9; for --diversity 1.",
            metavar="P",
        ),
        "--top_k": flag(whole(0), "Keep the K most probable tokens. 0 keeps all.", 0, metavar="K"),
        "--repetition_penalty": flag(
            number(0.01, 100),
            "Divide positive logits, and multiply negative ones, of tokens already in the text by this. 1 does "
            "nothing.",
            1.0,
            metavar="R",
        ),
    },
    "texts": {
        "--dataset": flag(
            text,
            "The texts to use: sample, wikitext, pg19, another data set installed by downloadData.py, or the path of "
            "a text file, of a folder of text files, or of a saved data set.",
            "sample",
            metavar="NAME",
        ),
        "--books": flag(whole(1), "The most documents of the data set to use. Default: all."),
        "--sentences": flag(
            whole(1),
            "How many texts to use: prompts where texts are generated, texts of each corpus for --ppl. Default: 10; "
            "for --lossless 64.",
        ),
        "--sentenceLimit": flag(whole(1), "Use only texts of at least this many characters.", 500),
        "--prompt": flag(text, "Continue this text instead of the data set.", metavar="TEXT"),
        "--question": flag(
            text,
            "Ask a chat model this question in the form of its chat template, instead of using the data set. Given "
            "several times, with --show or --html, it is a conversation: each question comes after the answers to "
            "those before it. Measurements take one question, because the later ones depend on the answers.",
            metavar="TEXT",
            action="append",
        ),
        "--promptFile": flag(path, "Continue each line of this file instead of the data set.", metavar="FILE"),
        "--prompts": flag(
            text,
            "Continue the prompts of this file, and show the speed of each category of prompts. Each line is a JSON "
            "object with category, and with prompt (text) or turns (a list of texts: a conversation). sample: the "
            "bundled prompts. specbench: those of Spec-Bench, once downloadData.py has got them. A model with a chat "
            "template reads each turn as a message. The answers to earlier turns are the target's; they are written "
            "before anything is measured.",
            metavar="FILE",
        ),
        "--promptLen": flag(
            whole(1),
            "The length of prompts from the data set, in tokens. Several lengths are measured one after the other. "
            "Default: 64.",
            nargs="+",
            default=[64],
        ),
        "--window": flag(
            whole(2), "The window of the corpus perplexity, in tokens; at most the models' context.", 1024
        ),
        "--stride": flag(whole(1), "How many tokens each window starts after the one before; less than --window.", 512),
    },
    "measuring": {
        "--repeats": flag(
            whole(1),
            "How many times each prompt is continued. Default: 3; for --compare and --sweep 2, for --diversity 20.",
        ),
        "--batch": flag(
            whole(1),
            "How many texts to decode at a time. The others wait: when a text ends, its row of the batch goes to the "
            "next prompt. For the modes that measure speed, except --sweep, and for --lossless. Default: 1; for "
            "--lossless all texts of a call, 64.",
        ),
        "--tokens": flag(whole(1), "How many tokens of each method --lossless tests at least. Default: 100000."),
        "--seed": flag(whole(0, (1 << 62) - 1), "The seed of every random choice.", 0),
        "--out": flag(
            path,
            "The folder of results.txt, results.jsonl and figures/, which is made if it is not there. Default: the "
            "project's folder.",
            metavar="FOLDER",
            default=ROOT,
        ),
    },
}


def parser() -> Parser:
    """The parser of `test.py`."""
    result = Parser(
        prog="test.py",
        allow_abbrev=False,
        description="Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding "
        "method side by side. Results go to results.txt. README.md explains how to read them.",
    )
    lists = {
        "methods": "; ".join(f"{name} ({method.title})" for name, method in METHODS.items()),
        "left_out": ", ".join(name for name, method in METHODS.items() if not method.in_all),
        "lossless": ", ".join(lossless_methods()),
    }
    for title, flags in FLAGS.items():
        group = result.add_argument_group(title)
        for name, options in flags.items():
            group.add_argument(name, **options | {"help": options["help"].format(**lists)})
    return result


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of the command line `argv`. Raises UserError for a value that no other flag can make right."""
    args = parser().parse_args(argv)
    if args.rerun:
        check_rerun(args)
    check_numbers(args)
    check_prompts(args)
    if args.audit and not os.path.isfile(args.audit):
        raise UserError(f"--audit {args.audit} is not a file")
    if os.path.exists(args.out) and not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    return args


def check_rerun(args: argparse.Namespace) -> None:
    """Raise UserError if other flags stand beside --rerun."""
    defaults = vars(parser().parse_args([]))
    for name, value in vars(args).items():
        if name not in ("rerun", "out") and value != defaults[name]:
            raise UserError(f"--rerun takes its flags from the run; leave out --{name}")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for numbers that no single flag can refuse."""
    if args.stride >= args.window:
        raise UserError(f"--stride ({args.stride}) must be less than --window ({args.window})")
    Sampling(args.contrastiveTemperature)
    Sampling().but(args.draftTemperature, args.draftTop_p)
    if args.temperature and len(args.temperature) > 1 and not args.sweep:
        raise UserError("several temperatures are for --sweep; give one")
    for temperature in args.temperature or [1.0]:
        Sampling(temperature, args.top_k, 1.0 if args.top_p is None else args.top_p, args.repetition_penalty)


def check_prompts(args: argparse.Namespace) -> None:
    """Raise UserError for prompts that cannot be continued, and a page that cannot be written."""
    prompts = [flag for flag in ("prompt", "question", "promptFile", "prompts") if getattr(args, flag) is not None]
    if len(prompts) > 1:
        raise UserError(f"--{prompts[0]} and --{prompts[1]} both say what to continue; give one of them")
    words = [] if args.prompt is None else [("prompt", args.prompt)]
    for flag, said in words + [("question", question) for question in args.question or ()]:
        if not said.strip("\n" if flag == "prompt" else None):
            raise UserError(f"--{flag} is empty: give some text")
        if said != said.encode(errors="replace").decode():
            raise UserError(f"--{flag} is not text in this terminal's encoding: give UTF-8")
    if args.html and not os.path.isdir(os.path.dirname(os.path.abspath(args.html))):
        raise UserError(f"--html {args.html} is in no folder that exists")
    if args.html and os.path.isdir(args.html):
        raise UserError(f"--html {args.html} is a folder; name a file")
