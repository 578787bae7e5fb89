"""Tiny models of every tested family, and exact reference computations."""

import ctypes
import itertools
import mmap
import os
import time
from types import SimpleNamespace

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from decoding.drafter import LengthRule
from decoding.tree import Tree
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.copies import weights_of
from engine.kernels import loader
from engine.quantised import Codes, quantised_copy, rounded
from experiments.flags import Measuring
from experiments.processes import SINGLE
from methods.samplers import Decoding
from utils import probabilities, seen_after

# What a sweep reads of `Inputs`.
SETTINGS = SimpleNamespace(measuring=Measuring(), decoding=Decoding())
SINGLE_INPUTS = SimpleNamespace(device="cpu", processes=SINGLE, settings=SETTINGS)
FULL = bool(os.environ.get("FULL"))  # FULL=1 in the environment asks for what takes minutes
DRAWS = 200_000 if FULL else 10_000  # of a distribution test

GROUPED = {"intermediate_size": 64, "num_key_value_heads": 2}
FAMILIES = {  # {model type: sizes that only its config has}
    "gpt_neox": {"intermediate_size": 64},
    "llama": GROUPED,
    "gpt2": {"n_inner": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen2": GROUPED,
}


class Excluding(torch.nn.Linear):
    """An output layer that excludes five tokens, as Chameleon's forward does."""

    low = torch.finfo(torch.float32).min

    def forward(self, x):
        return super().forward(x).index_fill(-1, torch.arange(5, device=x.device), self.low)


def tiny(family="gpt_neox", seed=0, vocabulary=61, layers=2, sharpness=4.0, context=128, **sizes):
    """A random model of 2 layers x 32. `sharpness` scales the output layer, so that its distributions are far from
    uniform and from another seed's. family: one of FAMILIES, or a type of model in transformers. sizes: of its
    config."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "initializer_range": 0.3}
    tokens = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    options = {"max_position_embeddings": context, **shape, **tokens, **FAMILIES.get(family, GROUPED), **sizes}
    attention = {"attn_implementation": options.pop("attn_implementation", "sdpa")}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**options), **attention).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness / 4)
    return CachedModel(model, vocabulary, f"{family}-{seed}")


def wait_for(condition, seconds=60):
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def roles(device="cpu", vocabulary=61):
    """{role: model}: a target, and models that often agree with it, of which "self" shares its KV cache."""
    models = {}
    for role, noise in ("target", 0.0), ("draft", 0.4), ("mid", 0.2), ("self", 0.1):
        model = tiny(vocabulary=vocabulary, layers=1).model
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * weight.std().nan_to_num() * torch.randn_like(weight))
        models[role] = CachedModel(model.to(device), vocabulary, role, models["target"] if role == "self" else None)
    return models


def compiled_roles(models):
    """`roles`, compiled: those that are on a device of the target's type."""
    target = compiled(models["target"])
    others = {role: model for role, model in models.items() if role != "target"}
    for role, model in others.items():
        if model.device.type == target.device.type:
            others[role] = compiled(model, target if model.cache_of else None)
    return {"target": target, **others}


def captured(model, device="cuda"):
    """A model on a GPU, whose steps are captured."""
    return compiled(CachedModel(model.model.to(device), model.vocabulary, model.name))


def random_codes(out, size, bits):
    """A weight `[out, size]` in few bits."""
    generator = torch.Generator().manual_seed(out + size + bits)
    codes = torch.randint(2**bits, (out, size), generator=generator).to(torch.uint8)
    return Codes(codes, torch.randn(out, size // 32, generator=generator).bfloat16(), bits)


def at_the_end_of_memory(tensor):
    """A copy of a tensor, behind which reading is a fault."""
    room = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - tensor.nbytes)
    behind = copy.data_ptr() + copy.nbytes
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy.copy_(tensor.flatten()).view(tensor.shape)


def use_kernel(kind=None):
    """Linear layers use the kernel `kind` from now on; None: the best one. Returns the kind in use: the previous one if
    `kind` is not available."""
    return loader.load().use_kernel(kind and kind.encode()).decode()


def left_padded(rows):
    """Rows of tokens as `generate` of transformers takes them in a batch."""
    width = max(map(len, rows))
    tokens = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}


class InTurn(LengthRule):
    """Plain decoding and these shapes in turn. last: {text: last accepted node} of each round."""

    def __init__(self, *shapes):
        self.shapes, self.last = [Tree.chain(0), *shapes], []

    def begin(self, rows):
        self.rows = rows

    def shape(self):
        return self.shapes[(len(self.last) + 1) % len(self.shapes)]

    def gammas(self):
        return [self.shape().depth] * self.rows.size

    def learn(self, drafted, last, sure):
        self.last.append(last)


@torch.inference_mode()
def joint_distribution(model, prefix, length, sampling):
    """Exact probability of every continuation of `length` tokens of one prefix under plain sampling from `model`, as a
    float64 tensor `[V] * length`, computed without any cache."""
    vocabulary = model.vocabulary
    total = torch.ones((), dtype=torch.float64)
    for n in range(length):
        paths = list(itertools.product(range(vocabulary), repeat=n))
        tokens = torch.tensor([list(prefix) + list(path) for path in paths])
        seen = seen_after(torch.zeros(len(paths), vocabulary, dtype=torch.bool), tokens)[:, -1]
        step = probabilities(model.score(tokens)[:, -1], sampling, seen).double().view([vocabulary] * (n + 1))
        total = total[..., None] * step
    return total


def chi_square(samples, expected, vocabulary):
    """p-value that `samples` (rows of tokens) were drawn from the joint distribution `expected`; cells expecting fewer
    than 5 are pooled, and a sample the distribution forbids is a p-value of 0."""
    from scipy.stats import chisquare

    samples = torch.as_tensor(samples)
    index = torch.zeros(len(samples), dtype=torch.long)
    for column in samples.T:
        index = index * vocabulary + column
    counts = torch.bincount(index, minlength=expected.numel()).double()
    wanted = expected.flatten() / expected.sum() * len(samples)
    if counts[wanted == 0].sum() > 0:
        return 0.0
    small = wanted < 5
    if wanted[small].sum() < 5:  # too little even pooled: with the largest cell
        small[wanted.argmax()] = True
    observed, wanted = ([*x[~small].tolist(), x[small].sum().item()] for x in (counts, wanted))
    return chisquare(observed, [w * sum(observed) / sum(wanted) for w in wanted]).pvalue


def rounded_copy(model, bits):
    """A copy of `model` whose weights are rounded each by itself, without a text. It shares the model's KV cache."""
    codes = {name: rounded(weight, bits) for name, weight in weights_of(model.model).items()}
    return CachedModel(quantised_copy(model.model, codes), model.vocabulary, f"{model.name} in {bits} bits", model)
