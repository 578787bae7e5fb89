"""Where the time goes: this project's decoding beside `transformers`' own, and beside what memory allows.

    python benchmark.py                                      the pair that test.py uses by default
    python benchmark.py --shapes pythia-2.8b,pythia-70m      Pythia's true shapes with random weights, made in memory

One process, everything in turn (A B C A B C ...) after a warm-up; medians with 95 % bootstrap intervals, ratios paired
turn by turn. Written to benchmark.json and figures/benchmark.png, or benchmark-SHAPE.* with --shapes.
"""

import copy
import json
import resource
import shlex
import sys
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import theory
from cachedModel import CachedModel
from commandLine import Parser, as_command
from drafters import ModelDrafter
from hub import gigabytes
from loading import (DTYPES, HERE, available_memory, check_tokenizers, default_pair, load_model, load_tokenizer,
                     model_version, pick_device, pick_dtype)
from machine import machine
from record import Record
from regrSampling import regrSampling
from report import WIDTH, grid, plain, span
from rows import check_room
from specSampling import specSampling
from speed import interval, measure, paired_ratios, quiet, summarize, synchronize
from texts import load_corpora
from utils import Sampling, UserError, draw, probabilities
from verification import token_rule

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

#                   hidden layers heads
SHAPES = {"pythia-70m": (512, 6, 8), "pythia-160m": (768, 12, 12), "pythia-410m": (1024, 24, 16),
          "pythia-1b": (2048, 16, 8), "pythia-1.4b": (2048, 24, 16), "pythia-2.8b": (2560, 32, 32)}
LIMITS = {"gamma": 1, "maxLen": 1, "prompts": 1, "repeats": 1, "seed": 0}
USUAL, USUAL_SHAPES = {"maxLen": 200, "prompts": 5, "repeats": 3}, {"maxLen": 40, "prompts": 2, "repeats": 2}
WIDTHS, CONTEXTS, ALPHAS = (1, 2, 5, 9, 17), (64, 256, 1024, 2000), (0.4, 0.6, 0.8)
PROMPT = 64                # tokens
TURNS, BUDGET = (5, 40), 20.0  # of parts: turns at least and at most, seconds after which it is enough
LARGE = 512 << 20          # bytes no processor keeps in its cache
COLOURS = {"transformers": "#c9c9c9", "compiled": "#5a9bd8", "no cache": "#f6c3bd", "": "#9fc5ec"}
SAMPLING = Sampling()


def parse(argv):
    parser = Parser(prog="benchmark.py", allow_abbrev=False, description="Tokens per second beside transformers' own, "
                    "time beside what memory allows, growth with the context, and what sampling takes.")
    parser.add_argument("--target", metavar="MODEL", help="the large model (default: as test.py)")
    parser.add_argument("--draft", metavar="MODEL", help="the small model")
    parser.add_argument("--shapes", metavar="TARGET,DRAFT", help="random weights in two of these shapes instead: "
                        + ", ".join(SHAPES))
    parser.add_argument("--gamma", type=int, default=4, metavar="N", help="tokens guessed in a round (4)")
    for flag, value in USUAL.items():
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=f"({value}; with --shapes {USUAL_SHAPES[flag]})")
    parser.add_argument("--dtype", choices=list(DTYPES), help="(bfloat16 where the device computes in it)")
    parser.add_argument("--device", help="cpu, cuda ... (cuda if there is one)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, default=HERE, metavar="FOLDER", help="(the project's folder)")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled forwards out")
    args = parser.parse_args(argv)
    for flag, value in (USUAL_SHAPES if args.shapes else USUAL).items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    for flag, least in LIMITS.items():
        if not least <= getattr(args, flag) < 1 << 62:
            raise UserError(f"--{flag} must be {least} or more, not {getattr(args, flag)}")
    if not args.out.is_dir():
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


def twin(model):
    """A second model over the same weights, with `transformers`' own attention: what is set or replaced in one of them
    does not change the other."""
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    other.set_attn_implementation("sdpa")
    return other


def random_model(name, dtype, device, seed):
    """A GPT-NeoX model of that shape with random weights, which are made where they stay, in the dtype they have."""
    hidden, layers, heads = SHAPES[name]
    config = GPTNeoXConfig(vocab_size=50304, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                           intermediate_size=4 * hidden, rotary_pct=0.25, max_position_embeddings=2048,
                           use_parallel_residual=True, tie_word_embeddings=False, attn_implementation="sdpa",
                           bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.gpt_neox.rotary_emb = type(model.gpt_neox.rotary_emb)(config).to(device)  # computed, not loaded: now empty
    generator = torch.Generator(device).manual_seed(seed)
    for key, weight in tqdm(list(model.named_parameters()), desc=f"making {name}", disable=None, leave=False):
        if weight.dim() > 1:
            weight.normal_(0, 0.02, generator=generator)
        else:
            weight.fill_(0.0 if key.endswith("bias") else 1.0)
    return model


def load(args, dtype, device):
    """({role: CachedModel}, prompts): the pair, and token ids to continue."""
    roles, names = {"target": args.target, "draft": args.draft}, (args.target, args.draft)
    if args.shapes:
        count = sum(12 * layers * hidden ** 2 + 2 * 50304 * hidden for hidden, layers, _ in map(SHAPES.get, names))
        needed = count * DTYPES[dtype].itemsize * (1 if args.no_compile else 2) + 3 * LARGE
        if needed > available_memory(device):
            raise UserError(f"{args.shapes} in {dtype} need about {gigabytes(needed)} and {device} has "
                            f"{gigabytes(available_memory(device))} free; use smaller shapes or --no-compile")
        models = {role: CachedModel(random_model(name, DTYPES[dtype], device, args.seed), name=name)
                  for role, name in roles.items()}
        generator = torch.Generator().manual_seed(args.seed)
        prompts = torch.randint(50304, (args.prompts, PROMPT), generator=generator).tolist()
    else:
        tokenizer = load_tokenizer(args.target)
        check_tokenizers(tokenizer, load_tokenizer(args.draft), names)
        models = {role: load_model(name, tokenizer, dtype, device) for role, name in roles.items()}
        pairs = zip(*(corpus.passages(500) for corpus in load_corpora("sample")))
        passages = [passage for pair in pairs for passage in pair]
        prompts = [tokenizer(text, verbose=False)["input_ids"][:PROMPT] for text in passages[:args.prompts]]
        args.prompts = len(prompts)  # no more than there are
    # A round of accepted guesses is timed from here too (see `seconds_a_round`).
    check_room(prompts, max(args.maxLen, 1 + 3 * (args.gamma + 1)), list(models.values()))
    return models, prompts


# What is timed: samplers f(prompt, generator) -> (tokens, records), as speed.measure takes them.

def by_library(model, max_len, assistant=None, gamma=None, **options):
    """`transformers`' generate, with an assistant if one is given: gamma guesses each round, or (None) its defaults."""
    def sampler(prompt, generator):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        if assistant is not None:  # its own configuration rules how it guesses
            config = assistant.generation_config
            config.num_assistant_tokens, config.assistant_confidence_threshold = gamma, 0.0 if gamma else None
            config.num_assistant_tokens_schedule = "constant" if gamma else None
        torch.manual_seed(generator.initial_seed())
        start, tokens = time.perf_counter(), torch.tensor([prompt], device=model.device)
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_len, do_sample=True,
                              temperature=SAMPLING.temperature, top_p=SAMPLING.top_p, top_k=SAMPLING.top_k,
                              assistant_model=assistant, **options)[0, len(prompt):].tolist()
        return [made], [Record([time.perf_counter() - start], [len(made)], [0], [0])]
    return sampler


@torch.inference_mode()
def cache_free(prompt, target, draft, max_len, gamma, generator=None, sampling=SAMPLING, vocabulary=None):
    """Speculative sampling as course reports have it, for comparison: at every step a model reads the whole text."""
    def distributions(model, count):
        return probabilities(model(input_ids=text, use_cache=False).logits[:, -count:, :vocabulary], sampling)

    start, text, record = time.perf_counter(), torch.tensor([prompt], device=target.device), Record()
    while record.tokens < max_len:
        length, q = text.shape[1], []
        for _ in range(min(gamma, max_len - record.tokens - 1)):
            q.append(distributions(draft, 1))
            text = torch.cat([text, draw(q[-1], generator)], 1)
        p, drafts = distributions(target, len(q) + 1), text[:, length:]
        accepted, token = token_rule(p, torch.cat(q, 1) if q else p[:, :0], drafts, generator)
        text = torch.cat([text[:, :length + accepted.item()], token[:, None]], 1)
        for history, value in ((record.times, time.perf_counter() - start), (record.drafted, len(q)),
                               (record.committed, text.shape[1] - length), (record.accepted, accepted.item())):
            history.append(value)
    return [text[0, len(prompt):].tolist()], [record]


def synthetic(alpha):
    """A rule that accepts each guess with probability `alpha`, whatever the models say, and computes all else as the
    token rule does: for the speed of models whose agreement is an accident."""
    def verify(p, q, drafts, generator=None):
        at = drafts[..., None]
        p[:, :drafts.shape[1]].scatter_(-1, at, alpha * q.gather(-1, at))
        return token_rule(p, q, drafts, generator)
    return verify


def samplers(args, variants, library):
    """{name: sampler} of every row of the first table."""
    found, max_len, device = {}, args.maxLen, library["target"].device
    rules = {f"synthetic {a}": synthetic(a) for a in ALPHAS} if args.shapes else {"speculative": token_rule}
    for variant, models in variants.items():
        target, drafter = models["target"], ModelDrafter(models["draft"])
        found[f"plain, {variant}"] = lambda prompt, generator, target=target: regrSampling(
            [prompt], target, max_len, SAMPLING, None, generator)
        for name, rule in rules.items():
            found[f"{name}, {variant}"] = lambda prompt, generator, target=target, drafter=drafter, rule=rule: (
                specSampling([prompt], target, drafter, max_len, args.gamma, SAMPLING, None, generator, verify=rule))
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
        prompt, library["target"], library["draft"], max_len, args.gamma, generator, vocabulary=vocabulary)
    return found


# The parts, each measured by itself.

@torch.inference_mode()
def in_turn(works, device, what):
    """{name: [seconds, ...]} of the functions `works`, in turn. One that returns a float has timed itself. Each is
    called twice and the second call counts: what ran before has emptied the processor's caches, and in decoding a
    forward follows others of its own model."""
    seconds = {name: [] for name in works}
    with quiet(device), tqdm(total=TURNS[1], desc=what, disable=None, leave=False) as bar:
        for turn in range(-2, TURNS[1]):  # two to warm up
            if turn == 0:
                began = time.perf_counter()
            for name, work in works.items():
                work()
                synchronize(device)
                start = time.perf_counter()
                own = work()
                synchronize(device)
                if turn >= 0:
                    seconds[name].append(own if isinstance(own, float) else time.perf_counter() - start)
            bar.update(turn >= 0)
            if turn + 1 >= TURNS[0] and time.perf_counter() - began > BUDGET:
                break
    return seconds


def fill(model, length, capacity):
    """Read `length` tokens into a cache of `capacity` slots: slots never written would all be one page of memory."""
    model.reserve(1, capacity)
    for start in range(0, length, 256):  # in pieces whose logits are small
        at = torch.arange(start, min(start + 256, length), device=model.device)[None]
        model.forward(at % model.vocabulary, at, keep=torch.tensor([at.shape[1] - 1], device=model.device))


def forward(model, count, start):
    """A function: the forward of `count` tokens from position `start` on."""
    at = torch.arange(start, start + count, device=model.device)[None]
    tokens = at % model.vocabulary
    return lambda: model.forward(tokens, at)


def weight_bytes(model):
    """Bytes of the weights that a forward must read: all but the input embedding, of which it needs a few rows."""
    weights = {weight.data_ptr(): weight.nbytes for weight in model.model.parameters()}
    if model.model.get_input_embeddings().weight is not model.model.get_output_embeddings().weight:
        weights.pop(model.model.get_input_embeddings().weight.data_ptr())
    return sum(weights.values())


def limits(variants, device):
    """What forwards of WIDTHS tokens take, each model's in turn with the reading of as many bytes as they read, and of
    a large buffer. [{role, variant, tokens, bytes, seconds, share}], and bytes per second of each reading."""
    found, speeds, works, sizes = [], {}, {}, {}
    for role in ("target", "draft"):
        sizes[role] = weight_bytes(variants["eager"][role])
    for what, size in (sizes | {"memory": LARGE}).items():
        buffer = torch.rand(max(min(size, LARGE) // 4096, 1), 1024, device=device)
        one, sizes[what, "buffer"] = torch.ones(1024, device=device), buffer.nbytes
        # Several ways, since one may be slow for a reason of its own: the best one of each turn counts.
        works |= {(what, "read", 0): buffer.sum, (what, "read", 1): buffer.norm,
                  (what, "read", 2): lambda buffer=buffer, one=one: buffer @ one}
        for variant, models in variants.items() if what != "memory" else ():
            fill(models[what], PROMPT, PROMPT + max(WIDTHS))
            works |= {(what, variant, n): forward(models[what], n, PROMPT) for n in WIDTHS}
    seconds = in_turn(works, device, "forwards")
    reads = {what: [min(ways) for ways in zip(*(seconds[what, "read", way] for way in range(3)))]
             for what in ("target", "draft", "memory")}
    for what, best in reads.items():
        speeds[what] = [sizes[what, "buffer"] / each for each in best]
    for role, variant, n in (key for key in works if key[1] != "read"):
        cache, capacity = variants[variant][role]._cache, PROMPT + max(WIDTHS)
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        size = sizes[role] + kept * (PROMPT + n) // capacity
        own = seconds[role, variant, n]
        found.append({"role": role, "variant": variant, "tokens": n, "bytes": size, "seconds": own,
                      "share": [size / speed / each for speed, each in zip(speeds[role], own)]})
    return found, speeds


def growth(variants, device, seed):
    """[{variant, context, seconds}] of a token of the target, drawn after that much context."""
    context = min(model.context for model in (models["target"] for models in variants.values()))
    contexts, works = sorted({min(each, context) for each in CONTEXTS}), {}
    generator = torch.Generator(device).manual_seed(seed)
    for variant, models in variants.items():
        fill(models["target"], contexts[-1], min(2048, context))
        for each in contexts:
            works[variant, each] = one_token(forward(models["target"], 1, each - 1), generator)
    return [{"variant": variant, "context": each, "seconds": own}
            for (variant, each), own in in_turn(works, device, "context").items()]


def one_token(step, generator):
    return lambda: draw(probabilities(step()[:, -1], SAMPLING), generator).item() and None


def parts(variants, prompt, gamma, device, seed):
    """[{variant, part, seconds}] of a round's parts, of a whole round in which all guesses stand, and of its sampling
    (filters, draws and verification) by itself."""
    works, generator = {}, torch.Generator(device).manual_seed(seed)
    for variant, models in variants.items():
        target, draft = models["target"], models["draft"]
        capacity = len(prompt) + 1 + 3 * (gamma + 1)  # as in `seconds_a_round`, so that both use one cache
        for model in (target, draft):
            fill(model, len(prompt), capacity)
        score, logits = forward(target, gamma + 1, len(prompt)), forward(target, gamma + 1, len(prompt))()
        q = probabilities(logits[:, :gamma], SAMPLING)
        drafts = draw(q, generator)

        def verified(logits, q=q, drafts=drafts):
            return token_rule(probabilities(logits, SAMPLING), q, drafts, generator)[0].tolist()

        def sampling(logits=logits, verified=verified):
            for i in range(gamma):
                draw(probabilities(logits[:, i], SAMPLING), generator)
            verified(logits)

        works |= {(variant, "plain step"): one_token(forward(target, 1, len(prompt)), generator),
                  (variant, "draft step"): one_token(forward(draft, 1, len(prompt)), generator),
                  (variant, "scoring"): lambda score=score, verified=verified: verified(score()),
                  (variant, "sampling"): sampling,
                  (variant, "round"): lambda target=target, draft=draft: seconds_a_round(
                      target, draft, prompt, gamma, generator)}
    return [{"variant": variant, "part": part, "seconds": own}
            for (variant, part), own in in_turn(works, device, "a round").items()]


def seconds_a_round(target, draft, prompt, gamma, generator):
    """Mean of two full rounds: in the one before them the draft reads the prompt."""
    _, (record,) = specSampling([prompt], target, ModelDrafter(draft), 1 + 3 * (gamma + 1), gamma, SAMPLING, None,
                                generator, verify=synthetic(1.0))
    return (record.times[-1] - record.times[1]) / (len(record.times) - 2)


# What is shown.

def ratio(upper, lower):
    """Interval of the ratios of two lists measured in turn."""
    return interval([a / b for a, b in zip(upper, lower)])


def predict(record):
    """[{variant, alpha, measured, theory}]: speed-ups with synthetic acceptance, and theorem 3.8 with the measured
    costs of guessing and of scoring."""
    found, seconds = [], {(m["variant"], m["part"]): m["seconds"] for m in record["parts"]}
    for variant in dict.fromkeys(m["variant"] for m in record["parts"]):
        step = seconds[variant, "plain step"]
        c, scoring = (ratio(seconds[variant, part], step)[0] for part in ("draft step", "scoring"))
        for alpha in ALPHAS:
            found.append({"variant": variant, "alpha": alpha, "c": c, "scoring": scoring,
                          "theory": theory.improvement(alpha, record["flags"]["gamma"], c, scoring),
                          "measured": interval(paired_ratios(record["speed"], f"synthetic {alpha}, {variant}",
                                                             f"plain, {variant}"))})
    return found


def tables(record):
    """Everything shown, as rich renderables."""
    flags, lines, machine_ = record["flags"], record["speed"], record["machine"]
    yield plain(f"{flags['target']} and {flags['draft']}" + (", random weights" if flags["shapes"] else "")
                + f", {record['dtype']}; {machine_['processor']}, {machine_['threads']} threads, {record['device']}; "
                f"torch {machine_['torch']}, transformers {machine_['transformers']}")
    table = grid(f"Tokens per second: {flags['prompts']} prompts of {PROMPT} tokens, maxLen {flags['maxLen']}, gamma "
                 f"{flags['gamma']}, temperature {SAMPLING.temperature}, top_p {SAMPLING.top_p}",
                 ["", "tokens/s", "of plain,\neager", "of trans-\nformers", "alpha", "tokens/\nround"])
    theirs = {row["method"]: row["speedup"] for row in summarize(lines, "transformers")}
    for row in summarize(lines, "plain, eager"):
        guesses = row["acceptance_by_position"]
        table.add_row(row["method"], span(row["throughput"]), span(row["speedup"]), span(theirs[row["method"]]),
                      f"{row['alpha']:.3f}" if guesses else "",
                      span(row["tokens_per_round"][:1] * 3) if guesses else "")
    yield table
    if flags["shapes"]:
        table = grid("Synthetic acceptance: speed-up over plain decoding of the same kind",
                     ["", "alpha", "measured", "theory", "c", "scoring"])
        for row in predict(record):
            table.add_row(row["variant"], str(row["alpha"]), span(row["measured"]), f"{row['theory']:.2f}",
                          f"{row['c']:.3f}", f"{row['scoring']:.2f}")
        yield table
        yield Text(f"synthetic: each guess stands with probability alpha, by a coin. c: a draft step, scoring: "
                   f"{flags['gamma'] + 1} tokens at once, in units of a plain step, sampling included.")
    kinds = list(dict.fromkeys(m["variant"] for m in record["forwards"]))
    table = grid("Forwards beside what reading their bytes takes",
                 ["", "tokens", "MB", *(f"{kind}\n{what}" for kind in kinds for what in ("ms", "of one", "% limit"))])
    for role in ("target", "draft"):
        own = {(m["variant"], m["tokens"]): m for m in record["forwards"] if m["role"] == role}
        for n in WIDTHS:
            cells = [(span(interval(m["seconds"]), 1e3), f"{ratio(m['seconds'], own[kind, 1]['seconds'])[0]:.2f}",
                      span(interval(m["share"]), 100)) for kind in kinds for m in [own[kind, n]]]
            table.add_row(role, str(n), f"{own[kinds[0], n]['bytes'] / 1e6:,.0f}", *sum(cells, ()))
    yield table
    reads = {what: f"{interval(speeds)[0] / 1e9:.1f}, at best {max(speeds) / 1e9:.1f}"
             for what, speeds in record["bandwidth"].items()}
    yield Text(f"GB/s read: as many bytes as the target's forward {reads['target']}; the draft's {reads['draft']}; a "
               f"buffer of {LARGE >> 20} MB {reads['memory']}. A small model's weights may stay in the processor's "
               "cache, so a forward is held against the reading of as many bytes, in the same turn.")
    table = grid("A token of the target, drawn after so much context",
                 ["context", *(f"{kind}\n{what}" for kind in kinds for what in ("ms", "of the first"))])
    costs = {(m["variant"], m["context"]): m["seconds"] for m in record["growth"]}
    contexts = sorted({context for _, context in costs})
    for context in contexts:
        table.add_row(str(context), *(cell for kind in kinds for cell in (
            span(interval(costs[kind, context]), 1e3), span(ratio(costs[kind, context], costs[kind, contexts[0]])))))
    yield table
    seconds = {(m["variant"], m["part"]): m["seconds"] for m in record["parts"]}
    table = grid("A round in which all guesses stand, and the filters, draws and verification in it",
                 ["", "draft step\nms", "scoring\nms", "round\nms", "sampling\nms", "share of\nround, %"])
    for kind in kinds:
        table.add_row(kind, *(span(interval(seconds[kind, part]), 1e3)
                              for part in ("draft step", "scoring", "round", "sampling")),
                      span(ratio(seconds[kind, "sampling"], seconds[kind, "round"]), 100))
    yield table
    yield Text("Medians [95 % bootstrap interval], all in turn. Memory of the process at most "
               + gigabytes(record["peak_memory"]) + ".")


def picture(record, path):
    """Tokens per second by method; beside it how near to the limit forwards are."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), dpi=120, width_ratios=(1.25, 1))
    rows = summarize(record["speed"], "plain, eager")[::-1]
    for y, row in enumerate(rows):
        middle, low, high = row["throughput"]
        colour = next(colour for word, colour in COLOURS.items() if word in row["method"])
        error = None if low != low else [[max(middle - low, 0)], [max(high - middle, 0)]]
        left.barh(y, middle, xerr=error, color=colour, ecolor="#555555", capsize=2, height=0.7)
        left.text(0, y + 0.02, f"  {middle:.3g}", va="center", fontsize=8)
    left.set(yticks=range(len(rows)), yticklabels=[row["method"] for row in rows], xlabel="tokens per second")
    left.tick_params(axis="y", labelsize=9, length=0)
    for (role, variant), style in {("target", "eager"): "o--", ("target", "compiled"): "o-", ("draft", "eager"): "s--",
                                   ("draft", "compiled"): "s-"}.items():
        own = [m for m in record["forwards"] if (m["role"], m["variant"]) == (role, variant)]
        if own:
            middle, low, high = ([100 * value for value in values] for values in
                                 zip(*(interval(m["share"]) for m in own)))
            colour = "#2c3e50" if role == "target" else "#d98c3f"
            right.plot(range(len(own)), middle, style, color=colour, markersize=5, label=f"{role}, {variant}")
            right.fill_between(range(len(own)), low, high, color=colour, alpha=0.12, linewidth=0)
    right.axhline(100, color="#999999", linewidth=0.8, linestyle=":")
    right.set(xticks=range(len(WIDTHS)), xticklabels=WIDTHS, xlabel="tokens scored at once", ylim=(0, None),
              ylabel="% of the limit")
    right.set_title("time to read as many bytes / time of the forward", fontsize=9, loc="left")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    names = f"{record['flags']['target']} with {record['flags']['draft']}"
    figure.suptitle(names + (" (shapes; random weights, synthetic acceptance)" if record["flags"]["shapes"] else "")
                    + f", {record['dtype']}, {record['machine']['processor']}, {record['machine']['threads']} threads",
                    x=0.01, ha="left", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def run(args, argv):
    device = pick_device(args.device)
    dtype = args.dtype or pick_dtype(device)
    models, prompts = load(args, dtype, device)
    versions = {role: {"name": getattr(args, role), "parameters": model.parameters,
                       "version": "random weights" if args.shapes else model_version(getattr(args, role))}
                for role, model in models.items()}
    library = {role: twin(model.model) for role, model in models.items()}
    variants, took = {"eager": models}, None
    if not args.no_compile:
        widths = {"target": {*WIDTHS, args.gamma + 1}, "draft": {*WIDTHS}}
        ready = {role: CachedModel(twin(model.model), model.vocabulary, model.name) for role, model in models.items()}
        with tqdm(total=sum(map(len, widths.values())), desc="compiling", disable=None, leave=False) as bar:
            took = [model.compile(sorted(widths[role]), progress=bar.update) for role, model in ready.items()]
        if None not in took:  # else a line has said why
            variants["compiled"] = ready
    record = {"command": shlex.join(argv), "time": time.strftime("%Y-%m-%d %H:%M:%S"), "device": device, "dtype": dtype,
              "flags": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
              "machine": machine(device), "models": versions, "compile_seconds": took, "speed": []}
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

    def work():
        try:
            run(parse(argv), argv)
        except torch.OutOfMemoryError:
            raise UserError("the device ran out of memory; use smaller models or --dtype, or --no-compile") from None

    return as_command("benchmark.py", work, "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
