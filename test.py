"""Speculative decoding, measured: speed (TTFT, TPOT, throughput), perplexity, and every decoding method side by side.
Results go to results.txt. `python test.py --help` lists the flags, README.md explains them."""

import os
import shlex
import sys
import time
import uuid
from pathlib import Path

from tqdm import tqdm

from decoding.rows import check_room
from downloadModel import is_hub_id, on_first_use
from engine.restrictedModel import RestrictedModel, most_frequent
from experiments.machine import machine
from experiments.measure import diversity, measure_diversity, measure_perplexity, play, rerun, settings, time_group
from inputs.commandLine import as_command
from inputs.models import (
    check_tokenizers,
    find_model,
    load_model,
    load_tokenizer,
    model_version,
    outline,
    pick_device,
    pick_dtype,
)
from inputs.prompts import check_passages, choose_prompts, encode, read_prompts, tokenize
from inputs.texts import load_corpora
from lossless.proof import Proof, other_dtype
from methods.catalogue import catalogue as methods
from report.runReport import figures as plots
from report.runReport import losslessReport, results
from report.runReport import runReport as report
from utils import UserError


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv

    def work():
        args = settings.parse(argv)
        if args.rerun:
            return run_again(args, argv)
        name = run(args, argv)
        return 0 if args.lossless is None else losslessReport.exit_code(results.Results(args.out).run(name)[1])

    return as_command(
        "test.py",
        work,
        "What was measured is kept in results.txt.",
        "use smaller models, a smaller --dtype, --maxLen or --window",
    )


def run_again(args, argv):
    """Run what a record says, and compare. Returns the exit code: 1 where something differs."""
    store = results.Results(args.out)
    earlier, lines = rerun.choose(store, args.rerun)
    folder = os.path.abspath(args.out)
    if os.path.isdir(earlier.get("folder", "")):
        os.chdir(earlier["folder"])  # relative paths among its flags start there
    name = run(settings.parse(rerun.arguments(earlier, folder)), argv, earlier)
    sentences, same = rerun.compare(earlier, lines, *results.Results(folder).run(name))
    print(*sentences, sep="\n")
    return 0 if same else 1


def run(args, argv, earlier=None):
    """Load the models, measure what was asked for, and write the results. earlier: the record of the run that this one
    repeats. Returns the new run's name (None where a text was played)."""
    device = pick_device(args.device)
    dtypes = {"speed": args.dtype or pick_dtype(device), "texts": args.dtype or "float32"}
    groups, played = settings.groups_of(args), settings.played(args)
    timing, proving = [mode for mode in groups if mode not in ("diversity", "lossless")], "lossless" in groups
    continuing = timing or played or proving
    from_corpora = args.prompt is None and args.question is None and args.promptFile is None
    corpora = load_corpora(args.dataset, args.books) if args.ppl or (from_corpora and continuing) else []
    if corpora:
        check_passages(corpora, args)
    given = None if from_corpora else read_prompts(args)
    folders = find_models(args, groups, played)
    tokenizer = load_tokenizer(folders["target"])
    for folder in folders.values():
        check_tokenizers(tokenizer, load_tokenizer(folder), (folders["target"].name, folder.name))
    outlines = [outline(folder, tokenizer) for folder in folders.values()]
    context = min(each.context for each in outlines)
    prompts = choose_prompts(args, tokenizer, corpora, given, context) if continuing else {}
    article = encode(given or diversity.PROMPTS, tokenizer, args) if "diversity" in groups else []
    room = {mode: article if mode == "diversity" else sum(prompts.values(), []) for mode in (*groups, *played)}
    for mode, each in room.items():
        check_room(each, settings.max_len(args, mode), outlines)
    texts = [
        (c, tokenize(c.passages(args.sentenceLimit)[: args.sentences], tokenizer, context)) for c in corpora if args.ppl
    ]
    if args.ppl and not any(passages for _, passages in texts):
        raise UserError(f"no text of {args.dataset} has two tokens; raise --sentenceLimit")
    tokens = max(
        [settings.rows(args) * (settings.max_len(args, mode) + max(map(len, each))) for mode, each in room.items()]
        + [args.window] * bool(args.ppl)
    )
    frequent = most_frequent(args.draftVocab, tokenizer) if args.draftVocab else None

    def load(dtype):
        spread = args.device == "auto"
        models = {
            role: load_model(folder, tokenizer, dtype, device, tokens, spread) for role, folder in folders.items()
        }
        return models if frequent is None else models | {"restricted": RestrictedModel(models["draft"], frequent)}

    texts_too = "diversity" in groups or args.ppl
    models = load(dtypes["speed" if timing or played else "texts"])
    if args.compile and continuing:  # after all that may be refused
        names = {name for names in (*groups.values(), played) for name in names}
        compile_models(models, settings.graphs(args, names), settings.rows(args), settings.guesses_at_once(args, names))
    if played:
        play(args, models, next(iter(prompts.values()))[0], tokenizer, device, played[0])
        return None

    store = results.Results(args.out)
    name = uuid.uuid4().hex[:8]
    kept = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    record = {
        "kind": "run",
        "run": name,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(argv),
        "folder": os.getcwd(),
        "flags": kept,
        "device": device,
        "machine": machine(device),
        "models": {
            role: {"name": folder.name, "version": model_version(folder), "parameters": models[role].parameters}
            for role, folder in folders.items()
        },
    }
    if earlier:
        for line in rerun.changes(earlier, record):
            print(line)
    store.append(**record)

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
                [line for line in store.run(name)[1] if line.get("mode") == "sweep"],
                args.out / "figures" / f"sweep-{name}.png",
            )
            append(kind="figure", of="sweep", file=f"figures/{figure.name}")
        if proving:
            proof = Proof(args, groups["lossless"], models, room["lossless"], device, dtypes["texts"], append)
            if proof.sampling.temperature:
                proof.test_methods()
                proof.find_mistakes()
                figure = plots.draw_lossless(store.run(name)[1], args.out / "figures" / f"lossless-{name}.png")
                append(kind="figure", of="lossless", file=f"figures/{figure.name}")
            proof.compare_greedy()
            dtype = other_dtype(dtypes["texts"], device)
            del models, proof
            models = load(dtype)
            Proof(args, groups["lossless"], models, room["lossless"], device, dtype, append).compare_greedy()
        if texts_too and timing and (args.compile or dtypes["texts"] != dtypes["speed"]):
            del models
            folders.pop("mid", None)
            models = load(dtypes["texts"])
        if "diversity" in groups:
            measure_diversity(
                args, models, article, tokenizer, device, lambda **line: append(dtype=dtypes["texts"], **line)
            )
        if args.ppl:
            window = min(args.window, context)
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
            report.show(*store.run(name))
    print(f"Written to {store.text.name} (every measurement: {store.lines.name}).")
    return name


def compile_models(models, graphs, rows, guesses):
    """Make the graphs for blocks of `rows` rows, and for rounds of so many guesses, and say how long it took; none of
    it is in any measurement."""
    graphs["restricted"] = graphs["draft"]
    total = sum(len(widths) + len(runs) for widths, runs in map(graphs.get, models)) + (guesses > 0)
    with tqdm(total=total, desc="compiling", disable=None, leave=False) as bar:
        took = [model.compile(*graphs[role], rows, bar.update) for role, model in models.items()]
        draft = models.get("restricted") or models.get("draft")
        if guesses and draft and None not in took:
            took.append(models["target"].compile_round(draft, 2, guesses, rows))
            bar.update()
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


if __name__ == "__main__":
    sys.exit(main())
