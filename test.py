"""Speculative decoding, measured: speed (TTFT, TPOT, throughput) and perplexity of a draft model, a target model, and
the two together. Results go to results.txt. `python test.py --help` lists the flags, README.md explains them."""

import math
import os
import shlex
import sys
import time
import uuid
from pathlib import Path

import torch
from tqdm import tqdm

import PPL
import results
from commandLine import Parser, as_command
from downloadModel import is_hub_id, on_first_use
from draftLength import RULES as DRAFT_LENGTHS
from drafters import ModelDrafter
from loading import (DTYPES, HERE, check_tokenizers, default_pair, find_model, load_model, load_tokenizer,
                     model_version, pick_device, pick_dtype)
from machine import machine
from regrSampling import regrSampling
from rows import check_room
from specSampling import specSampling
from speed import measure
from texts import load_corpora
from utils import Sampling, UserError
from verification import RULES as VERIFICATIONS

LIMITS = {"maxLen": 1, "gamma": 1, "sentences": 1, "sentenceLimit": 1, "books": 1, "repeats": 1, "promptLen": 1,
          "window": 2, "stride": 1, "seed": 0}
CHARACTERS = 16  # of text kept for each token of a prompt: far more than any text needs


def parse(argv):
    """The flags, checked as far as they can be before anything is loaded."""
    parser = Parser(prog="test.py", description=__doc__, allow_abbrev=False)
    mode = parser.add_argument_group("what to measure (with none of these: both)")
    mode.add_argument("--speed", nargs="?", type=int, const=1, choices=(0, 1), help="time to first token, time per "
                      "token, tokens per second; --speed 0 leaves it out")
    mode.add_argument("--ppl", nargs="?", type=int, const=1, choices=(0, 1), help="perplexity, per text and of the "
                      "corpus; --ppl 0 leaves it out")
    models = parser.add_argument_group("models")
    models.add_argument("--target", metavar="MODEL", help="the large model: a folder under models/, any path, or a hub "
                        "id owner/name, downloaded on first use (default: pythia-2.8b if it and pythia-70m are there, "
                        "else the bundled pair)")
    models.add_argument("--draft", metavar="MODEL", help="the small model that guesses")
    models.add_argument("--offline", action="store_true", help="download nothing")
    models.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: bfloat16 for speed where the "
                        "device computes in it, float32 for perplexity)")
    models.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
    how = parser.add_argument_group("how to guess and to verify")
    how.add_argument("--gamma", type=int, default=4, metavar="N", help="tokens guessed in a round, for some rules the "
                     "most or the least (4)")
    how.add_argument("--draftLength", choices=DRAFT_LENGTHS, default="fixed", help="the rule that says how many tokens "
                     "to guess (fixed)")
    how.add_argument("--verification", choices=VERIFICATIONS, default="token", help="the rule that accepts guesses "
                     "(token)")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--maxLen", type=int, default=200, metavar="N", help="new tokens at most (200)")
    sampling.add_argument("--temperature", type=float, default=0.85, metavar="T", help="0 is greedy (0.85)")
    sampling.add_argument("--top_p", type=float, default=0.9, metavar="P", help="nucleus, 1 is off (0.9)")
    sampling.add_argument("--top_k", type=int, default=0, metavar="K", help="0 is off (0)")
    sampling.add_argument("--repetition_penalty", type=float, default=1.0, metavar="R", help="1 is off (1)")
    data = parser.add_argument_group("texts")
    data.add_argument("--dataset", default="sample", metavar="NAME", help="sample, wikitext, pg19, another that "
                      "downloadData.py installed, or the path of a text file, a folder of them, or a saved data set "
                      "(sample)")
    data.add_argument("--books", type=int, metavar="N", help="documents of the data set used at most (all)")
    data.add_argument("--sentences", type=int, default=10, metavar="N", help="texts used: prompts in --speed, texts of "
                      "each corpus in --ppl (10)")
    data.add_argument("--sentenceLimit", type=int, default=500, metavar="N", help="characters a text has at least "
                      "(500)")
    data.add_argument("--prompt", metavar="TEXT", help="time the continuation of this text instead of the data set's")
    data.add_argument("--promptLen", type=int, nargs="+", default=[64], metavar="N", help="tokens of a text used as a "
                      "prompt; several lengths are timed one after the other (64)")
    data.add_argument("--window", type=int, default=1024, metavar="N", help="tokens of a corpus perplexity window "
                      "(1024; no more than the models' context)")
    data.add_argument("--stride", type=int, default=512, metavar="N", help="tokens from one window to the next (512)")
    other = parser.add_argument_group("measuring")
    other.add_argument("--repeats", type=int, default=3, metavar="N", help="times each prompt is timed (3)")
    other.add_argument("--seed", type=int, default=0, metavar="N", help="of every random choice (0)")
    other.add_argument("--out", type=Path, default=HERE, metavar="FOLDER", help="where results.txt and "
                       "results.jsonl are (the project's folder)")
    args = parser.parse_args(argv)
    for flag, least in LIMITS.items():
        value = getattr(args, flag)
        for each in value if isinstance(value, list) else [least if value is None else value]:
            if each < least:
                raise UserError(f"--{flag} must be {least} or more, not {each}")
    args.promptLen = sorted(set(args.promptLen))
    if args.seed >= 1 << 62:
        raise UserError("--seed must be less than 2**62")
    if args.stride >= args.window:
        raise UserError(f"--stride ({args.stride}) must be less than --window ({args.window})")
    if args.prompt is not None and not args.prompt:
        raise UserError("--prompt is empty: give some text")
    if args.prompt and args.prompt != args.prompt.encode(errors="replace").decode():
        raise UserError("--prompt is not text in this terminal's encoding: give UTF-8")
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    args.sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    if not (args.speed or args.ppl):  # neither is asked for: both, but for one that is switched off
        args.speed, args.ppl = int(args.speed is None), int(args.ppl is None)
    if not (args.speed or args.ppl):
        raise UserError("nothing to measure: leave out --speed 0 or --ppl 0")
    pair = default_pair()
    if args.target is None and args.draft is None:
        print(f"No models named: using {pair[0]} (target) and {pair[1]} (draft)."
              + ("" if pair[0].startswith("pythia") else " README.md says how to get Pythia."))
    args.target, args.draft = args.target or pair[0], args.draft or pair[1]
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv

    def work():
        try:
            run(parse(argv), argv)
        except torch.OutOfMemoryError:
            raise UserError("the device ran out of memory; use a smaller --dtype, --maxLen or --window. What was "
                            "measured is kept.") from None

    return as_command("test.py", work, "What was measured is kept in results.txt.")


def run(args, argv):
    """Load the models, measure what was asked for, and write the results."""
    device = pick_device(args.device)
    dtypes = {"speed": args.dtype or pick_dtype(device), "ppl": args.dtype or "float32"}
    corpora = load_corpora(args.dataset, args.books) if args.ppl or args.prompt is None else []
    in_order = sorted((args.target, args.draft), key=is_hub_id)  # a wrong name is found before a large download
    found = {name: find_model(on_first_use(name, args.offline)) for name in in_order}
    folders = {"target": found[args.target], "draft": found[args.draft]}
    tokenizer = load_tokenizer(folders["target"])
    check_tokenizers(tokenizer, load_tokenizer(folders["draft"]), (folders["target"].name, folders["draft"].name))
    prompts = choose_prompts(args, tokenizer, corpora) if args.speed else {}

    def load(mode):
        tokens = args.window if mode == "ppl" else args.maxLen + max(len(p) for each in prompts.values() for p in each)
        return {role: load_model(folder, tokenizer, dtypes[mode], device, tokens) for role, folder in folders.items()}

    models = load("speed" if args.speed else "ppl")
    for each in prompts.values():
        check_room(each, args.maxLen, list(models.values()))
    texts = [(c, tokenize(c.passages(args.sentenceLimit)[:args.sentences], tokenizer, models))
             for c in corpora if args.ppl]
    if args.ppl and not any(passages for _, passages in texts):
        raise UserError(f"no text of {args.dataset} has {args.sentenceLimit} characters; lower --sentenceLimit")
    window = min(args.window, *(model.context for model in models.values()))
    stride = args.stride if args.stride < window else window // 2

    store = results.Results(args.out)
    name = uuid.uuid4().hex[:8]
    flags = {key: str(value) if isinstance(value, Path) else value
             for key, value in vars(args).items() if key != "sampling"}
    store.append(kind="run", run=name, time=time.strftime("%Y-%m-%d %H:%M:%S"), command=shlex.join(argv), flags=flags,
                 device=device, machine=machine(device),
                 models={role: {"name": folder.name, "version": model_version(folder),
                                "parameters": sum(p.numel() for p in models[role].model.parameters())}
                         for role, folder in folders.items()})
    try:
        if args.speed:
            for length, each in prompts.items():
                time_samplers(args, models, each, tokenizer, device, f"speed, prompts of {length} tokens",
                              lambda **line: store.append(run=name, dtype=dtypes["speed"], promptLen=length, **line))
        if args.ppl:
            if args.speed and dtypes["ppl"] != dtypes["speed"]:
                del models
                models = load("ppl")
            measure_perplexity(models, texts, tokenizer, window, stride,
                               lambda **line: store.append(run=name, dtype=dtypes["ppl"],
                                                           sentenceLimit=args.sentenceLimit, **line))
        store.append(kind="end", run=name)
    finally:
        try:
            store.render()
        finally:  # the screen needs no room on a disk
            results.show(*next(r for r in store.runs() if r[0]["run"] == name))
    print(f"Written to {store.text.name} (every measurement: {store.lines.name}).")


def choose_prompts(args, tokenizer, corpora):
    """Token ids of the prompts, {length: prompts}: the one given, or for each `promptLen` the text from the first
    passages of each corpus in turn on, cut to that length. Where too few go on for so long, the longest others."""
    if args.prompt is not None:
        ids = tokenizer(args.prompt, verbose=False)["input_ids"]
        return {len(ids): [ids]}
    prompts = {}
    for length in args.promptLen:
        passages = [corpus.passages(args.sentenceLimit, CHARACTERS * length) for corpus in corpora]
        in_turn = [p[i] for i in range(max(map(len, passages))) for p in passages if i < len(p)]
        if not in_turn:
            raise UserError(f"no text of {args.dataset} has {args.sentenceLimit} characters; lower --sentenceLimit")
        whole, shorter = [], []
        for text in in_turn:
            ids = tokenizer(text, verbose=False)["input_ids"][:length]
            (whole if len(ids) == length else shorter).append(ids)
            if len(whole) == args.sentences:
                break
        prompts[length] = (whole + sorted(shorter, key=len, reverse=True))[:args.sentences]
    return prompts


def tokenize(passages, tokenizer, models):
    """Token ids of each passage, cut to the models' context."""
    context = min(model.context for model in models.values())
    return [ids[:context] for ids in (tokenizer(text, verbose=False)["input_ids"] for text in passages) if len(ids) > 1]


def time_samplers(args, models, prompts, tokenizer, device, label, append):
    target, draft = models["target"], models["draft"]
    common = {"max_len": args.maxLen, "sampling": args.sampling, "end_of_text": tokenizer.eos_token_id}
    length = DRAFT_LENGTHS[args.draftLength](args.gamma)  # one for all prompts: some learn as they go
    methods = {
        "draft": lambda prompt, generator: regrSampling([prompt], draft, generator=generator, **common),
        "target": lambda prompt, generator: regrSampling([prompt], target, generator=generator, **common),
        "speculative": lambda prompt, generator: specSampling(
            [prompt], target, ModelDrafter(draft), gamma=length, generator=generator,
            verify=VERIFICATIONS[args.verification], **common)}
    with tqdm(total=len(methods) * len(prompts) * args.repeats, desc=label, disable=None, leave=False) as bar:
        for line in measure(methods, prompts, args.repeats, args.seed, device):
            append(kind="speed", **line)
            bar.update()


def measure_perplexity(models, texts, tokenizer, window, stride, append):
    target, draft = models["target"], models["draft"]
    roles = "draft", "target", "speculative"
    for corpus, passages in texts:
        if passages:
            bar = tqdm(passages, desc=f"perplexity per text, {corpus.name}", disable=None, leave=False)
            each = [PPL.perplexities(ids, target, draft) for ids in bar]
            append(kind="ppl_text", corpus=corpus.name, texts=len(each), tokens=sum(map(len, passages)), each=each,
                   ppl={role: math.fsum(e[role] for e in each) / len(each) for role in roles})
        documents = [text for text in corpus.documents if len(tokenizer(text, verbose=False)["input_ids"]) > 1]
        if not documents:
            continue
        with tqdm(desc=f"corpus perplexity, {corpus.name}", unit=" tokens", disable=None, leave=False) as bar:
            parts = [PPL.calculate_ppl_corpus(text, tokenizer, target, draft, window, stride, bar.update)
                     for text in documents]
            totals = {role: sum((part[role] for part in parts), PPL.CorpusPerplexity()) for role in roles}
        append(kind="ppl_corpus", corpus=corpus.name, tokens=totals["target"].tokens, documents=len(documents),
               window=window, stride=stride,
               ppl={role: {"token": t.token_ppl, "word": t.word_ppl, "byte": t.byte_ppl} for role, t in totals.items()})


if __name__ == "__main__":
    sys.exit(main())
