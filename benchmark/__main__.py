"""Where the time goes: this project's decoding beside `transformers`' own, and beside what memory allows.

    python benchmark.py                                      the pair that test.py uses by default
    python benchmark.py --shapes pythia-2.8b,pythia-70m      Pythia's true shapes with random weights, made in memory

One process, everything in turn (A B C A B C ...) after a warm-up; medians with 95 % bootstrap intervals, ratios paired
turn by turn. Written to benchmark.json and figures/benchmark.png, or benchmark-SHAPE.* with --shapes.
"""

import json
import os
import resource
import shlex
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from benchmark.parts import LARGE, PROMPT, WIDTHS, growth, limits, parts
from benchmark.peers import SAMPLING, SHAPES, by_library, cache_free, random_model, synthetic, twin
from benchmark.report import ALPHAS, picture, tables
from decoding.rows import check_room
from decoding.verification import block_rule, token_rule
from engine.cachedModel import CachedModel
from experiments.machine import machine
from experiments.speed import measure
from inputs.commandLine import Parser, as_command, path, text, whole
from inputs.hub import gigabytes
from inputs.models import (
    DTYPES,
    HERE,
    available_memory,
    check_tokenizers,
    default_pair,
    find_model,
    load_model,
    load_tokenizer,
    model_version,
    outline,
    pick_device,
    pick_dtype,
)
from inputs.texts import load_corpora
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from report.tables import WIDTH
from specSampling import specSampling
from utils import UserError

USUAL, USUAL_SHAPES = {"maxLen": 200, "prompts": 5, "repeats": 3}, {"maxLen": 40, "prompts": 2, "repeats": 2}


def parse(argv):
    parser = Parser(
        prog="benchmark.py",
        allow_abbrev=False,
        description="Tokens per second beside transformers' own, "
        "time beside what memory allows, growth with the context, and what sampling takes.",
    )
    parser.add_argument("--target", type=text, metavar="MODEL", help="the large model (default: as test.py)")
    parser.add_argument("--draft", type=text, metavar="MODEL", help="the small model")
    parser.add_argument(
        "--shapes",
        type=text,
        metavar="TARGET,DRAFT",
        help="random weights in two of these shapes instead: " + ", ".join(SHAPES),
    )
    parser.add_argument("--gamma", type=whole(1, 1000), default=3, metavar="N", help="tokens guessed in a round (3)")
    for flag, value in USUAL.items():
        parser.add_argument(
            f"--{flag}", type=whole(1, 10_000), metavar="N", help=f"({value}; with --shapes {USUAL_SHAPES[flag]})"
        )
    parser.add_argument("--dtype", choices=list(DTYPES), help="(bfloat16 where the device computes in it)")
    parser.add_argument("--device", type=text, help="cpu, cuda ... (cuda if there is one)")
    parser.add_argument("--seed", type=whole(0, (1 << 62) - 1), default=0, metavar="N")
    parser.add_argument("--out", type=path, default=HERE, metavar="FOLDER", help="(the project's folder)")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled forwards out")
    args = parser.parse_args(argv)
    for flag, value in (USUAL_SHAPES if args.shapes else USUAL).items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    if args.shapes is not None:
        if args.target or args.draft:
            raise UserError("--shapes names both models; leave out --target and --draft")
        names = args.shapes.split(",")
        for name in names:
            if name not in SHAPES:
                raise UserError(f"unknown shape {name!r}; known are: {', '.join(SHAPES)}")
        if len(names) != 2:
            raise UserError("--shapes takes two shapes, TARGET,DRAFT")
    else:
        pair = default_pair()
        names = args.target or pair[0], args.draft or pair[1]
    args.target, args.draft = names
    return args


def load(args, dtype, device):
    """({role: CachedModel}, prompts): the pair, and token ids to continue."""
    roles, names = {"target": args.target, "draft": args.draft}, (args.target, args.draft)
    most = max(args.maxLen, 1 + 3 * (args.gamma + 1))  # a round of accepted guesses is timed too (`seconds_a_round`)
    if args.shapes:
        count = sum(12 * layers * hidden**2 + 2 * 50304 * hidden for hidden, layers, _ in map(SHAPES.get, names))
        needed = count * DTYPES[dtype].itemsize * (1 if args.no_compile else 2) + 3 * LARGE
        if needed > available_memory(device):
            raise UserError(
                f"{args.shapes} in {dtype} need about {gigabytes(needed)} and {device} has "
                f"{gigabytes(available_memory(device))} free; use smaller shapes or --no-compile"
            )
        models = {
            role: CachedModel(random_model(name, DTYPES[dtype], device, args.seed), name=name)
            for role, name in roles.items()
        }
        generator = torch.Generator().manual_seed(args.seed)
        prompts = torch.randint(50304, (args.prompts, PROMPT), generator=generator).tolist()
        check_room(prompts, most, list(models.values()))
    else:
        tokenizer = load_tokenizer(args.target)
        check_tokenizers(tokenizer, load_tokenizer(args.draft), names)
        pairs = zip(*(corpus.passages(500) for corpus in load_corpora("sample")))
        passages = [passage for pair in pairs for passage in pair]
        prompts = [tokenizer(text, verbose=False)["input_ids"][:PROMPT] for text in passages[: args.prompts]]
        args.prompts = len(prompts)  # no more than there are
        check_room(prompts, most, [outline(find_model(name), tokenizer) for name in names])
        models = {role: load_model(name, tokenizer, dtype, device) for role, name in roles.items()}
    return models, prompts


def samplers(args, variants, library):
    """{name: sampler} of every row of the first table."""
    found, max_len, device = {}, args.maxLen, library["target"].device
    rules = (
        {f"synthetic {a}": synthetic(a) for a in ALPHAS}
        if args.shapes
        else {"speculative": token_rule, "block verification": block_rule}
    )
    for variant, models in variants.items():
        target, drafter = models["target"], ModelDrafter(models["draft"])
        found[f"plain, {variant}"] = lambda prompt, generator, target=target: regrSampling(
            [prompt], target, max_len, SAMPLING, None, generator
        )
        for name, rule in rules.items():
            found[f"{name}, {variant}"] = lambda prompt, generator, target=target, drafter=drafter, rule=rule: (
                specSampling([prompt], target, drafter, max_len, args.gamma, SAMPLING, None, generator, verify=rule)
            )
    found["transformers"] = by_library(library["target"], max_len)
    if args.shapes:
        return found
    static = {"cache_implementation": "static", "disable_compile": device.type == "cpu"}
    try:
        by_library(library["target"], 2, **static)([1, 2, 3], torch.Generator(device).manual_seed(0))
        found["transformers, static cache"] = by_library(library["target"], max_len, **static)
    except Exception as error:  # a cache of the library's that some models, devices and versions do not have
        print("transformers, static cache is left out:", *str(error).split()[:30], file=sys.stderr)
    found["transformers, assistant"] = by_library(library["target"], max_len, library["draft"], args.gamma)
    found["transformers, assistant as it comes"] = by_library(library["target"], max_len, library["draft"])
    vocabulary = variants["eager"]["target"].vocabulary
    found["speculative, no cache"] = lambda prompt, generator: cache_free(
        prompt, library["target"], library["draft"], max_len, args.gamma, generator, vocabulary=vocabulary
    )
    return found


def run(args, argv):
    device = pick_device(args.device)
    dtype = args.dtype or pick_dtype(device)
    models, prompts = load(args, dtype, device)
    versions = {
        role: {
            "name": getattr(args, role),
            "parameters": model.parameters,
            "version": "random weights" if args.shapes else model_version(getattr(args, role)),
        }
        for role, model in models.items()
    }
    library = {role: twin(model.model) for role, model in models.items()}
    variants, took = {"eager": models}, None
    if not args.no_compile:
        graphs = {"target": ({*WIDTHS, args.gamma + 1}, {(1, 1)}), "draft": ({*WIDTHS}, {(2, 1), (2, args.gamma)})}
        ready = {role: CachedModel(twin(model.model), model.vocabulary, model.name) for role, model in models.items()}
        total = sum(map(len, sum(graphs.values(), ()))) + 1
        with tqdm(total=total, desc="compiling", disable=None, leave=False) as bar:
            took = [model.compile(*graphs[role], progress=bar.update) for role, model in ready.items()]
            if None not in took:
                took.append(ready["target"].compile_round(ready["draft"], 2, args.gamma))
                bar.update()
        if None not in took:  # else a line has said why
            variants["compiled"] = ready
    record = {
        "command": shlex.join(argv),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": device,
        "dtype": dtype,
        "flags": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "machine": machine(device),
        "models": versions,
        "compile_seconds": took,
        "speed": [],
    }
    timed = samplers(args, variants, library)
    with tqdm(total=len(timed) * len(prompts) * args.repeats, desc="speed", disable=None, leave=False) as bar:
        for line in measure(timed, prompts, args.repeats, args.seed, device, warm_up=1):
            # generate says when it is done, not when it began to write
            record["speed"].append(line | ({} if line["rounds"] else {"ttft": None, "tpot": None}))
            bar.update()
    record["forwards"], record["bandwidth"] = limits(variants, device)
    record["parts"] = parts(variants, prompts[0], args.gamma, device, args.seed)
    record["growth"] = growth(variants, device, args.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record["peak_memory"] = peak * (1 if sys.platform == "darwin" else 1024)
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False)
    for piece in tables(record):
        console.print(piece)
    name = f"benchmark-{args.target}" if args.shapes else "benchmark"
    try:
        picture(record, args.out / "figures" / f"{name}.png")
        whole = json.loads(json.dumps(record), parse_constant=lambda _: None)  # JSON has no nan
        (args.out / f"{name}.json").write_text(json.dumps(whole, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"the results cannot be written to {args.out} ({error.strerror or error})") from None
    print(f"Written to {name}.json and figures/{name}.png.")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv

    return as_command(
        "benchmark.py",
        lambda: run(parse(argv), argv),
        "Nothing was written.",
        "use smaller models, a smaller --dtype, or --no-compile",
    )


if __name__ == "__main__":
    sys.exit(main())
