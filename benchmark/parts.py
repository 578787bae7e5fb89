"""What the parts of decoding cost, each measured by itself: forwards beside what memory allows, a token after a long
context, and the parts of a round."""

import time

import torch
from tqdm import tqdm

from benchmark.peers import SAMPLING, synthetic
from decoding.rounds import judge, run
from decoding.verification import token_rule
from experiments.speed import quiet, synchronize
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import draw, probabilities

WIDTHS, CONTEXTS = (1, 2, 5, 9, 17), (64, 256, 1024, 2000)
PROMPT = 64  # tokens
TURNS, BUDGET = (5, 40), 20.0  # turns at least and at most, seconds after which it is enough
WARM = 0.005  # seconds
LARGE = 512 << 20  # bytes no processor keeps in its cache


@torch.inference_mode()
def in_turn(works, device, what):
    """{name: [seconds, ...]} of the functions `works`, in turn. One that returns a float has timed itself. Each is
    called for WARM seconds before the call that counts: what ran before has emptied the processor's caches, and in
    decoding a forward follows others of its own model."""
    seconds = {name: [] for name in works}
    with quiet(device), tqdm(total=TURNS[1], desc=what, disable=None, leave=False) as bar:
        for turn in range(-2, TURNS[1]):  # two to warm up
            if turn == 0:
                began = time.perf_counter()
            for name, work in works.items():
                start = time.perf_counter()
                while time.perf_counter() - start < WARM:
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
        works |= {
            (what, "read", 0): buffer.sum,
            (what, "read", 1): buffer.norm,
            (what, "read", 2): lambda buffer=buffer, one=one: buffer @ one,
        }
        for variant, models in variants.items() if what != "memory" else ():
            fill(models[what], PROMPT, PROMPT + max(WIDTHS))
            works |= {(what, variant, n): forward(models[what], n, PROMPT) for n in WIDTHS}
    seconds = in_turn(works, device, "forwards")
    reads = {
        what: [min(ways) for ways in zip(*(seconds[what, "read", way] for way in range(3)))]
        for what in ("target", "draft", "memory")
    }
    for what, best in reads.items():
        speeds[what] = [sizes[what, "buffer"] / each for each in best]
    for role, variant, n in (key for key in works if key[1] != "read"):
        cache, capacity = variants[variant][role]._cache, PROMPT + max(WIDTHS)
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        size = sizes[role] + kept * (PROMPT + n) // capacity
        own = seconds[role, variant, n]
        found.append(
            {
                "role": role,
                "variant": variant,
                "tokens": n,
                "bytes": size,
                "seconds": own,
                "share": [size / speed / each for speed, each in zip(speeds[role], own)],
            }
        )
    return found, speeds


def growth(variants, device, seed):
    """[{variant, context, seconds}] of a token of the target, drawn after that much context."""
    context = min(model.context for model in (models["target"] for models in variants.values()))
    contexts, works = sorted({min(each, context) for each in CONTEXTS}), {}
    generator = torch.Generator(device).manual_seed(seed)
    for variant, models in variants.items():
        fill(models["target"], contexts[-1], min(2048, context))
        for each in contexts:
            works[variant, each] = one_token(models["target"], each - 1, generator)
    return [
        {"variant": variant, "context": each, "seconds": own}
        for (variant, each), own in in_turn(works, device, "context").items()
    ]


def one_token(model, start, generator):
    """A function: a token is read at position `start`, and the next one drawn."""
    at = torch.tensor([[start]], device=model.device)
    return lambda: run(model, at % model.vocabulary, at, 1, SAMPLING, generator)[0].item() and None


def parts(variants, prompt, gamma, device, seed):
    """[{variant, part, seconds}] of a round's parts, of a whole round in which all guesses stand, and of its sampling
    (filters, draws and verification) by itself."""
    works, generator = {}, torch.Generator(device).manual_seed(seed)

    def numbers():
        return torch.rand(1, gamma + 1, device=device, generator=generator)

    for variant, models in variants.items():
        target, draft = models["target"], models["draft"]
        capacity = len(prompt) + 1 + 3 * (gamma + 1)  # as in `seconds_a_round`, so that both use one cache
        for model in (target, draft):
            fill(model, len(prompt), capacity)
        logits = forward(target, gamma + 1, len(prompt))()
        at = torch.arange(gamma + 1, device=device)[None] + len(prompt)
        q = probabilities(logits[:, :gamma], SAMPLING)
        drafts = draw(q, generator)
        block = torch.cat([at[:, :1] % target.vocabulary, drafts], 1)

        def scoring(target=target, block=block, at=at, q=q):
            judge(target, block, at, q, numbers(), SAMPLING, token_rule)[1].tolist()

        def sampling(logits=logits, q=q, drafts=drafts):
            for i in range(gamma):
                draw(probabilities(logits[:, i], SAMPLING), generator)
            token_rule(probabilities(logits, SAMPLING), q, drafts, numbers())[0].tolist()

        works |= {
            (variant, "plain step"): one_token(target, len(prompt), generator),
            (variant, "draft step"): one_token(draft, len(prompt), generator),
            (variant, "scoring"): scoring,
            (variant, "sampling"): sampling,
            (variant, "round"): lambda target=target, draft=draft: seconds_a_round(
                target, draft, prompt, gamma, generator
            ),
        }
    return [
        {"variant": variant, "part": part, "seconds": own}
        for (variant, part), own in in_turn(works, device, "a round").items()
    ]


def seconds_a_round(target, draft, prompt, gamma, generator):
    """Mean of two full rounds: in the one before them the draft reads the prompt."""
    _, (record,) = specSampling(
        [prompt],
        target,
        ModelDrafter(draft),
        1 + 3 * (gamma + 1),
        gamma,
        SAMPLING,
        None,
        generator,
        verify=synthetic(1.0),
    )
    return (record.times[-1] - record.times[1]) / (len(record.times) - 2)
