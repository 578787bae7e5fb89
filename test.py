"""Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding method side by side.
Results go to results.txt. `python test.py --help` lists the flags, README.md explains them."""

import math
import shlex
import sys
import time
import uuid
from pathlib import Path

import torch
from tqdm import tqdm

import diversity
import flags
import methods
import playback
import plots
import PPL
import report
import results
import sweep
from commandLine import as_command
from downloadModel import is_hub_id, on_first_use
from draftVocabulary import RestrictedModel, most_frequent
from loading import check_tokenizers, find_model, load_model, load_tokenizer, model_version, pick_device, pick_dtype
from machine import machine
from rows import check_room
from speed import measure
from texts import load_corpora, read
from utils import GREEDY, UserError
from verification import RULES as VERIFICATIONS

CHARACTERS = 16  # of text kept for each token of a prompt: far more than any text needs


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv

    def work():
        try:
            run(flags.parse(argv), argv)
        except torch.OutOfMemoryError:
            raise UserError(
                "the device ran out of memory; use a smaller --dtype, --maxLen or --window. What was measured is kept."
            ) from None

    return as_command("test.py", work, "What was measured is kept in results.txt.")


def run(args, argv):
    """Load the models, measure what was asked for, and write the results."""
    device = pick_device(args.device)
    dtypes = {"speed": args.dtype or pick_dtype(device), "texts": args.dtype or "float32"}
    groups, played = flags.groups_of(args), flags.played(args)
    timing = [mode for mode in groups if mode != "diversity"]
    from_corpora = args.prompt is None and args.question is None and args.promptFile is None
    corpora = load_corpora(args.dataset, args.books) if args.ppl or (from_corpora and (timing or played)) else []
    given = None if from_corpora else read_prompts(args)
    folders = find_models(args, groups, played)
    tokenizer = load_tokenizer(folders["target"])
    for folder in folders.values():
        check_tokenizers(tokenizer, load_tokenizer(folder), (folders["target"].name, folder.name))
    prompts = choose_prompts(args, tokenizer, corpora, given) if timing or played else {}
    article = encode(given or diversity.PROMPTS, tokenizer, args) if "diversity" in groups else []
    room = {mode: article if mode == "diversity" else sum(prompts.values(), []) for mode in (*groups, *played)}
    tokens = max(
        [flags.max_len(args, mode) + max(map(len, each)) for mode, each in room.items()]
        + [args.window] * bool(args.ppl)
    )
    frequent = most_frequent(args.draftVocab, tokenizer) if args.draftVocab else None

    def load(dtype):
        models = {role: load_model(folder, tokenizer, dtype, device, tokens) for role, folder in folders.items()}
        return models if frequent is None else models | {"restricted": RestrictedModel(models["draft"], frequent)}

    texts_too = "diversity" in groups or args.ppl
    models = load(dtypes["speed" if timing or played else "texts"])
    for mode, each in room.items():
        check_room(each, flags.max_len(args, mode), list(models.values()))
    texts = [
        (c, tokenize(c.passages(args.sentenceLimit)[: args.sentences], tokenizer, models)) for c in corpora if args.ppl
    ]
    if args.ppl and not any(passages for _, passages in texts):
        raise UserError(f"no text of {args.dataset} has {args.sentenceLimit} characters; lower --sentenceLimit")
    if args.compile and (timing or played):  # after all that may be refused
        compile_models(models, flags.widths(args, {name for names in (*groups.values(), played) for name in names}))
    if played:
        play(args, models, next(iter(prompts.values()))[0], tokenizer, device, played[0])
        return

    store = results.Results(args.out)
    name = uuid.uuid4().hex[:8]
    kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    store.append(
        kind="run",
        run=name,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
        command=shlex.join(argv),
        flags=kept,
        device=device,
        machine=machine(device),
        models={
            role: {"name": folder.name, "version": model_version(folder), "parameters": models[role].parameters}
            for role, folder in folders.items()
        },
    )

    def append(**line):
        store.append(run=name, **line)

    try:
        for mode in timing:
            for length, each in prompts.items():
                time_group(
                    args,
                    mode,
                    groups[mode],
                    models,
                    each,
                    tokenizer,
                    device,
                    lambda **line: append(dtype=dtypes["speed"], promptLen=length, **line),
                )
        if "sweep" in groups:
            figure = plots.draw_sweep(
                [line for line in store.measurements(name) if line.get("mode") == "sweep"],
                args.out / "figures" / f"sweep-{name}.png",
            )
            append(kind="figure", of="sweep", file=f"figures/{figure.name}")
        if texts_too and timing and (args.compile or dtypes["texts"] != dtypes["speed"]):
            del models
            folders.pop("mid", None)
            models = load(dtypes["texts"])
        if "diversity" in groups:
            measure_diversity(
                args, models, article, tokenizer, device, lambda **line: append(dtype=dtypes["texts"], **line)
            )
        if args.ppl:
            window = min(args.window, *(model.context for model in models.values()))
            measure_perplexity(
                models,
                texts,
                tokenizer,
                window,
                args.stride if args.stride < window else window // 2,
                lambda **line: append(dtype=dtypes["texts"], sentenceLimit=args.sentenceLimit, **line),
            )
        append(kind="end")
    finally:
        try:
            store.render()
        finally:  # the screen needs no room on a disk
            report.show(*next(r for r in store.runs() if r[0]["run"] == name))
    print(f"Written to {store.text.name} (every measurement: {store.lines.name}).")


def compile_models(models, widths):
    """Make the graphs, and say how long it took; none of it is in any measurement."""
    widths["restricted"] = widths["draft"]
    with tqdm(total=sum(len(widths[role]) for role in models), desc="compiling", disable=None, leave=False) as bar:
        took = [model.compile(widths[role], progress=bar.update) for role, model in models.items()]
    if None not in took:
        print(f"Compiled in {sum(took):.0f} s; the graphs are kept for the next time.")


def find_models(args, groups, played):
    """{role: folder} of the models that are needed; those named by a hub id are downloaded."""
    used = {name for names in (*groups.values(), played) for name in names}
    needed = {role for name in used for role in methods.METHODS[name].needs}
    needed |= {"target"} if args.draft == "lookup" else {"target", "draft"}
    named = {role: getattr(args, role) for role in ("target", "draft", "mid") if role in needed}
    in_order = sorted(dict.fromkeys(named.values()), key=is_hub_id)  # a wrong name is found before a large download
    found = {name: find_model(on_first_use(name, args.offline)) for name in in_order}
    folders = {role: found[name] for role, name in named.items()}
    if used & {"contrastive", "speculativeContrastive"} and folders["target"] == folders["draft"]:
        raise UserError("contrastive decoding needs two models: --target and --draft are the same")
    return folders


def read_prompts(args):
    """The texts given by flag to be continued."""
    if args.prompt is not None:
        return [args.prompt]
    if args.question is not None:
        return [args.question]
    lines = [line for line in read(args.promptFile).splitlines() if line.strip()]
    if not lines:
        raise UserError(f"--promptFile {args.promptFile} holds no prompt; write one on each line")
    return lines


def encode(texts, tokenizer, args):
    """Token ids of texts that are continued from their end; a question in the form its chat model was trained on."""
    if args.question is None:
        return [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {args.target} has no chat template; give the question with --prompt, or "
            "name an instruct model"
        )
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in texts
    ]


def choose_prompts(args, tokenizer, corpora, given):
    """Token ids of the prompts, {length: prompts}: those given, or for each `promptLen` the text from the first
    passages of each corpus in turn on, cut to that length. Where too few go on for so long, the longest others."""
    if given:
        prompts = encode(given, tokenizer, args)
        return {max(map(len, prompts)): prompts}
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
        prompts[length] = (whole + sorted(shorter, key=len, reverse=True))[: args.sentences]
    return prompts


def tokenize(passages, tokenizer, models):
    """Token ids of each passage, cut to the models' context."""
    context = min(model.context for model in models.values())
    return [ids[:context] for ids in (tokenizer(text, verbose=False)["input_ids"] for text in passages) if len(ids) > 1]


def time_group(args, mode, names, models, prompts, tokenizer, device, append):
    """Time the methods of one mode on `prompts`; `--sweep` does so for each temperature."""
    max_len, repeats = flags.max_len(args, mode), flags.repeats(args, mode)
    for temperature in (args.temperature or [None]) if mode == "sweep" else [None]:
        sampling, samplers = flags.sampling(args, mode, temperature), methods.build(names, models, args)
        gamma = 4 if mode == "speed" and args.draftLength == "fixed" else None  # elsewhere each method has its own
        shown = {
            "mode": mode,
            "maxLen": max_len,
            "gamma": args.gamma or gamma,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if mode == "sweep":
            drafter, verify = methods.guesser(models, args), VERIFICATIONS[args.verification]
            samplers |= sweep.samplers(models["target"], drafter, verify)
            append(
                kind="costs",
                **shown,
                **sweep.costs(prompts, models["target"], drafter, sampling, verify, max_len, args.seed, device),
            )
        timed = {
            name: lambda prompt, generator, sampler=sampler: sampler(
                [prompt], max_len, sampling, tokenizer.eos_token_id, generator
            )
            for name, sampler in samplers.items()
        }
        with tqdm(total=len(timed) * len(prompts) * repeats, desc=mode, disable=None, leave=False) as bar:
            for line in measure(timed, prompts, repeats, args.seed, device):
                append(kind="speed", **shown, **line)
                bar.update()


def measure_diversity(args, models, prompts, tokenizer, device, append):
    """Texts of each method and how varied they are: several of each prompt where there is chance, else one."""
    sampling, max_len = flags.sampling(args, "diversity"), flags.max_len(args, "diversity")
    samplers = methods.build(flags.GROUPS["diversity"], models, args)
    runs = {"naive": (samplers.pop("target"), sampling)} | {name: (s, sampling) for name, s in samplers.items()}
    runs["greedy"] = runs["naive"][0], GREEDY
    heats = {"greedy": 0, "naive": sampling.temperature, "speculative": sampling.temperature}  # 0: no chance in it
    repeats = {
        name: flags.repeats(args, "diversity") if heats.get(name, args.contrastiveTemperature) else 1 for name in runs
    }
    with tqdm(total=sum(repeats.values()) * len(prompts), desc="diversity", disable=None, leave=False) as bar:
        for name, (sampler, shape) in runs.items():
            each = []
            for repeat in range(repeats[name]):
                generator = torch.Generator(device).manual_seed(args.seed + repeat)
                texts, _ = sampler(prompts, max_len, shape, tokenizer.eos_token_id, generator)
                each += [diversity.figures(p, t, tokenizer, models["target"]) for p, t in zip(prompts, texts)]
                bar.update(len(prompts))
            append(
                kind="diversity",
                method=name,
                prompts=len(prompts),
                texts=len(each),
                maxLen=max_len,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                each=each,
            )


def play(args, models, prompt, tokenizer, device, name):
    """Continue one prompt on the screen, and write the page that plays it back."""
    watched = []

    def watch(drafter):
        watched.append(playback.Watched(drafter))
        return watched[0]

    sampler = methods.build([name], models, args, watch)[name]
    screen = playback.Screen(tokenizer) if args.show else None
    trace = playback.Trace(watched[0], screen and screen.round)
    text, max_len = tokenizer.decode(prompt), flags.max_len(args, "show")
    if screen:
        screen.begin(text)
    try:
        sampler(
            [prompt],
            max_len,
            flags.sampling(args, "show"),
            tokenizer.eos_token_id,
            torch.Generator(device).manual_seed(args.seed),
            trace.callback,
        )
    finally:
        if screen:
            screen.end()
    if args.html:
        names = {role: model.name for role, model in models.items()}
        playback.write_page(args.html, text, trace.rounds, tokenizer, "Speculative decoding, round by round", names)
        print(f"Written to {args.html}")


def measure_perplexity(models, texts, tokenizer, window, stride, append):
    target, draft = models["target"], models["draft"]
    roles = "draft", "target", "speculative"
    for corpus, passages in texts:
        if passages:
            bar = tqdm(passages, desc=f"perplexity per text, {corpus.name}", disable=None, leave=False)
            each = [PPL.perplexities(ids, target, draft) for ids in bar]
            append(
                kind="ppl_text",
                corpus=corpus.name,
                texts=len(each),
                tokens=sum(map(len, passages)),
                each=each,
                ppl={role: math.fsum(e[role] for e in each) / len(each) for role in roles},
            )
        documents = [text for text in corpus.documents if len(tokenizer(text, verbose=False)["input_ids"]) > 1]
        if not documents:
            continue
        with tqdm(desc=f"corpus perplexity, {corpus.name}", unit=" tokens", disable=None, leave=False) as bar:
            parts = [
                PPL.calculate_ppl_corpus(text, tokenizer, target, draft, window, stride, bar.update)
                for text in documents
            ]
            totals = {role: sum((part[role] for part in parts), PPL.CorpusPerplexity()) for role in roles}
        append(
            kind="ppl_corpus",
            corpus=corpus.name,
            tokens=totals["target"].tokens,
            documents=len(documents),
            window=window,
            stride=stride,
            ppl={role: {"token": t.token_ppl, "word": t.word_ppl, "byte": t.byte_ppl} for role, t in totals.items()},
        )


if __name__ == "__main__":
    sys.exit(main())
