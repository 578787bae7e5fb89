"""`parser`: the flags of `test.py`. settings.py says what they mean together."""

from __future__ import annotations

from experiments.decodingFlags import Group, add_contrastive, add_decoding, add_drafters, add_sampling
from inputs.commandLine import Parser, path, text, whole
from inputs.files import ROOT
from inputs.models import DTYPES
from methods.catalogue import METHODS
from methods.selection import provable


def parser() -> Parser:
    """The parser of `test.py`, one group of flags after the other. Where the default depends on what is measured, the
    parser's default is None, and settings.py fills it in."""
    made = Parser(
        prog="test.py",
        allow_abbrev=False,
        description="Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding "
        "method side by side. Results go to results.txt. README.md explains how to read them.",
    )
    add_speed_modes(made.add_argument_group("modes that measure speed (the default is --speed --ppl)"))
    add_other_modes(made.add_argument_group("other modes"))
    add_models(made.add_argument_group("models"))
    decoding = made.add_argument_group("how to guess and to verify")
    add_decoding(decoding)
    add_drafters(decoding)
    add_contrastive(made.add_argument_group("contrastive decoding"))
    add_sampling(made.add_argument_group("sampling"))
    add_prompts(made.add_argument_group("texts"))
    add_measuring(made.add_argument_group("measuring"))
    return made


def add_speed_modes(group: Group) -> None:
    """The modes that measure speed."""
    group.add_argument(
        "--speed",
        nargs="?",
        type=whole(0, 1),
        const=1,
        choices=(0, 1),
        help="Measure the time to the first token (TTFT), the time per output token (TPOT) and the tokens per second "
        "of the draft alone, the target alone, and speculative sampling. --speed 0 switches it off.",
    )
    group.add_argument(
        "--speedNew",
        action="store_true",
        help="Measure the speed of the additive draft-length rule (see --draftLength) on long texts: 1000 new tokens "
        "unless --maxLen says otherwise.",
    )
    group.add_argument(
        "--speedMulti",
        action="store_true",
        help="Measure the speed of a cascade of three models: the draft guesses for --mid, and both together guess "
        "for the target.",
    )
    group.add_argument(
        "--contrastive", action="store_true", help="Measure the speed of contrastive decoding, plain and speculative."
    )
    group.add_argument(
        "--compare",
        type=text,
        metavar="METHODS",
        help="Measure the speed of several methods side by side. Give all, or a comma-separated list of: "
        + "; ".join(f"{name} ({method.title})" for name, method in METHODS.items())
        + ". The target alone is always measured too, as the baseline. all stands for every method whose models are "
        f"there, except {', '.join(name for name, method in METHODS.items() if not method.in_all)}.",
    )
    group.add_argument(
        "--sweep",
        action="store_true",
        help="Measure the speed of speculative sampling with gamma from 1 to 10, compare it with the speed that theory "
        "predicts, and draw a figure. Here --temperature takes several values.",
    )


def add_other_modes(group: Group) -> None:
    """The modes that measure texts, show one, or repeat a run."""
    group.add_argument(
        "--ppl",
        nargs="?",
        type=whole(0, 1),
        const=1,
        choices=(0, 1),
        help="Measure the perplexity of the draft, the target and the speculative sampler: of each text, and of the "
        "whole corpus. --ppl 0 switches it off.",
    )
    group.add_argument(
        "--diversity",
        action="store_true",
        help="Measure how varied the texts of each method are: n-gram entropy, distinct n-grams, repetition, and their "
        "perplexity under the target.",
    )
    group.add_argument(
        "--lossless",
        type=text,
        nargs="?",
        const="speculative",
        metavar="METHODS",
        help="Prove by statistical tests that the text of a method is distributed exactly as the target's own. Give "
        "all, or a comma-separated list of: " + ", ".join(provable()) + ". Without a value: speculative. This is a run "
        "of its own. The exit code is 0 if all tests pass and 1 otherwise.",
    )
    group.add_argument(
        "--show",
        action="store_true",
        help="Show one text on the screen as it is decoded: guesses accepted, guesses rejected, and the target's own "
        "tokens. Nothing is measured. --speedNew, --speedMulti or --contrastive choose the method; the default is "
        "speculative sampling.",
    )
    group.add_argument(
        "--html",
        type=path,
        metavar="FILE",
        help="Write the same as a web page that plays the text back round by round.",
    )
    group.add_argument(
        "--rerun",
        type=text,
        metavar="RUN",
        help="Repeat a run of results.jsonl and report whether it gives the same tokens. Give the run's name, or 1 for "
        "the newest run, 2 for the one before. Takes no other flag but --out. The exit code is 0 if everything is the "
        "same and 1 otherwise.",
    )


def add_models(group: Group) -> None:
    """Which models are used, and how they are loaded."""
    group.add_argument(
        "--target",
        type=text,
        metavar="MODEL",
        help="The large model whose text is to be generated: the name of a folder in models/, a path, or a hub id "
        "owner/name, which is downloaded at its first use. Default: pythia-2.8b if that and pythia-70m are in models/, "
        "else the bundled target.",
    )
    group.add_argument(
        "--draft",
        type=text,
        metavar="MODEL",
        help="The small model that guesses, named as --target. If it has another tokenizer, it guesses the tokens that "
        "both have. Or lookup: no model, the guesses come from the text so far. Default: pythia-70m or the bundled "
        "draft, as for --target.",
    )
    group.add_argument(
        "--mid",
        type=text,
        metavar="MODEL",
        help="The model between the two, which a cascade needs. Default: if neither --target nor --draft is given, "
        "pythia-410m or the bundled mid model; else none.",
    )
    group.add_argument("--offline", action="store_true", help="Download nothing. A model that is missing is an error.")
    group.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="The dtype of the weights. Default: for speed the fastest that the device supports natively (bfloat16, "
        "float16 on GPUs without bfloat16, else float32); for --ppl, --diversity and --lossless float32.",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="Compile the decode steps, on a GPU into CUDA graphs. On a CPU the first time takes minutes; later runs "
        "reuse the result. Compilation is not part of any measurement. --diversity and --ppl stay eager.",
    )
    group.add_argument(
        "--device",
        type=text,
        help="cpu, cuda, cuda:1 and so on, or auto: a model too large for one GPU is spread over all GPUs and the "
        "host's memory. mps is the GPU of an Apple computer (not tested on a real one). Default: cuda if available, "
        "else cpu.",
    )
    group.add_argument(
        "--draftDevice",
        type=text,
        metavar="DEVICE",
        help="Put the draft on a device of its own: cpu, cuda:1 and so on. Only tokens, guesses and the guesses' "
        "distributions travel between the two. Default: the target's device.",
    )


def add_prompts(group: Group) -> None:
    """Which texts are continued, and which are scored for perplexity."""
    group.add_argument(
        "--dataset",
        type=text,
        default="sample",
        metavar="NAME",
        help="The texts to use: sample, wikitext, pg19, another data set installed by downloadData.py, or the path of "
        "a text file, of a folder of text files, or of a saved data set. Default: sample.",
    )
    group.add_argument(
        "--books", type=whole(1), metavar="N", help="The most documents of the data set to use. Default: all."
    )
    group.add_argument(
        "--sentences",
        type=whole(1),
        metavar="N",
        help="How many texts to use: prompts where texts are generated, texts of each corpus for --ppl. Default: 10; "
        "for --lossless 64.",
    )
    group.add_argument(
        "--sentenceLimit",
        type=whole(1),
        default=500,
        metavar="N",
        help="Use only texts of at least this many characters. Default: 500.",
    )
    group.add_argument("--prompt", type=text, metavar="TEXT", help="Continue this text instead of the data set.")
    group.add_argument(
        "--question",
        type=text,
        metavar="TEXT",
        help="Ask a chat model this question in the form of its chat template, instead of using the data set.",
    )
    group.add_argument(
        "--promptFile", type=path, metavar="FILE", help="Continue each line of this file instead of the data set."
    )
    group.add_argument(
        "--promptLen",
        type=whole(1),
        nargs="+",
        default=[64],
        metavar="N",
        help="The length of prompts from the data set, in tokens. Several lengths are measured one after the other. "
        "Default: 64.",
    )
    group.add_argument(
        "--window",
        type=whole(2),
        default=1024,
        metavar="N",
        help="The window of the corpus perplexity, in tokens; at most the models' context. Default: 1024.",
    )
    group.add_argument(
        "--stride",
        type=whole(1),
        default=512,
        metavar="N",
        help="How many tokens each window starts after the one before; less than --window. Default: 512.",
    )


def add_measuring(group: Group) -> None:
    """How often is measured, with which seed, and where the results go."""
    group.add_argument(
        "--repeats",
        type=whole(1),
        metavar="N",
        help="How many times each prompt is continued. Default: 3; for --compare and --sweep 2, for --diversity 20.",
    )
    group.add_argument(
        "--tokens",
        type=whole(1),
        metavar="N",
        help="How many tokens of each method --lossless tests at least. Default: 100000.",
    )
    group.add_argument(
        "--seed",
        type=whole(0, (1 << 62) - 1),
        default=0,
        metavar="N",
        help="The seed of every random choice. Default: 0.",
    )
    group.add_argument(
        "--out",
        type=path,
        default=ROOT,
        metavar="FOLDER",
        help="The folder of results.txt, results.jsonl and figures/. Default: the project's folder.",
    )
