"""What `test.py` measures with models that are loaded: speed, diversity and perplexity, each line of results as it
comes; and one text played."""

import math

import torch
from tqdm import tqdm

import PPL
from decoding.verification import RULES as VERIFICATIONS
from experiments.measure import diversity, settings, sweep
from experiments.speed import digest, measure
from inputs.escape import visible
from methods.catalogue import catalogue as methods
from report.runReport import playback
from utils import GREEDY


def time_group(args, mode, names, models, prompts, tokenizer, device, append):
    """Time the methods of one mode on `prompts`; `--sweep` does so for each temperature."""
    max_len, repeats = settings.max_len(args, mode), settings.repeats(args, mode)
    for temperature in (args.temperature or [None]) if mode == "sweep" else [None]:
        sampling, samplers = settings.sampling(args, mode, temperature), methods.build(names, models, args)
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
                append(kind="speed", repeatable=methods.repeatable(line["method"], args), **shown, **line)
                bar.update()


def measure_diversity(args, models, prompts, tokenizer, device, append):
    """Texts of each method and how varied they are: several of each prompt where there is chance, else one."""
    sampling, max_len = settings.sampling(args, "diversity"), settings.max_len(args, "diversity")
    samplers = methods.build(settings.GROUPS["diversity"], models, args)
    runs = {"naive": (samplers.pop("target"), sampling)} | {name: (s, sampling) for name, s in samplers.items()}
    runs["greedy"] = runs["naive"][0], GREEDY
    heats = {"greedy": 0, "naive": sampling.temperature, "speculative": sampling.temperature}  # 0: no chance in it
    repeats = {
        name: settings.repeats(args, "diversity") if heats.get(name, args.contrastiveTemperature) else 1
        for name in runs
    }
    with tqdm(total=sum(repeats.values()) * len(prompts), desc="diversity", disable=None, leave=False) as bar:
        for name, (sampler, shape) in runs.items():
            each, written = [], []
            for repeat in range(repeats[name]):
                generator = torch.Generator(device).manual_seed(args.seed + repeat)
                texts, _ = sampler(prompts, max_len, shape, tokenizer.eos_token_id, generator)
                written += texts
                each += [diversity.figures(p, t, tokenizer, models["target"]) for p, t in zip(prompts, texts)]
                bar.update(len(prompts))
            append(
                kind="diversity",
                method=name,
                repeatable=methods.repeatable(name, args),
                input=digest(prompts),
                sha256=digest(written),
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
    text, max_len = tokenizer.decode(prompt), settings.max_len(args, "show")
    if screen:
        screen.begin(text)
    try:
        sampler(
            [prompt],
            max_len,
            settings.sampling(args, "show"),
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
        print(visible(f"Written to {args.html}", ""))


def measure_perplexity(models, texts, tokenizer, window, stride, append):
    target, draft = models["target"], models["draft"]
    roles = "draft", "target", "speculative"
    for corpus, passages in texts:
        shown = visible(corpus.name, "")
        if passages:
            bar = tqdm(passages, desc=f"perplexity per text, {shown}", disable=None, leave=False)
            each = [PPL.perplexities(ids, target, draft) for ids in bar]
            append(
                kind="ppl_text",
                corpus=corpus.name,
                texts=len(each),
                tokens=sum(map(len, passages)),
                input=digest(passages),
                each=each,
                ppl={role: math.fsum(e[role] for e in each) / len(each) for role in roles},
            )
        documents = [text for text in corpus.documents if len(tokenizer(text, verbose=False)["input_ids"]) > 1]
        if not documents:
            continue
        with tqdm(desc=f"corpus perplexity, {shown}", unit=" tokens", disable=None, leave=False) as bar:
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
            input=digest(documents),
            window=window,
            stride=stride,
            ppl={role: {"token": t.token_ppl, "word": t.word_ppl, "byte": t.byte_ppl} for role, t in totals.items()},
        )
