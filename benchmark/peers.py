"""What `benchmark.py` needs beside this project's own: the library's decoding, speculative sampling without a cache,
models of true shapes with random weights, and acceptance by a coin.

Samplers are f(prompt, generator) -> (tokens, records), as `speed.measure` takes them.
"""

import copy
import functools
import time

import torch
from tqdm import tqdm
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from decoding.record import Record
from decoding.verification import token_rule
from utils import Sampling, draw, probabilities

#                   hidden layers heads
SHAPES = {
    "pythia-70m": (512, 6, 8),
    "pythia-160m": (768, 12, 12),
    "pythia-410m": (1024, 24, 16),
    "pythia-1b": (2048, 16, 8),
    "pythia-1.4b": (2048, 24, 16),
    "pythia-2.8b": (2560, 32, 32),
}
SAMPLING = Sampling()


def twin(model):
    """A second model over the same weights, with `transformers`' own attention: what is set or replaced in one of them
    does not change the other."""
    other = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    other.set_attn_implementation("sdpa")
    return other


def configuration(name, **options):
    """The configuration of the Pythia model of that name."""
    hidden, layers, heads = SHAPES[name]
    return GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        rotary_pct=0.25,
        max_position_embeddings=2048,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )


def random_model(name, dtype, device, seed):
    """A GPT-NeoX model of that shape with random weights, which are made where they stay, in the dtype they have."""
    config = configuration(name, attn_implementation="sdpa")
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
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_len,
            do_sample=True,
            temperature=SAMPLING.temperature,
            top_p=SAMPLING.top_p,
            top_k=SAMPLING.top_k,
            assistant_model=assistant,
            **options,
        )[0, len(prompt) :].tolist()
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
        u = torch.rand(1, len(q) + 1, device=target.device, generator=generator)
        accepted, token = token_rule(p, torch.cat(q, 1) if q else p[:, :0], drafts, u)
        text = torch.cat([text[:, : length + accepted.item()], token[:, None]], 1)
        for history, value in (
            (record.times, time.perf_counter() - start),
            (record.drafted, len(q)),
            (record.committed, text.shape[1] - length),
            (record.accepted, accepted.item()),
        ):
            history.append(value)
    return [text[0, len(prompt) :].tolist()], [record]


@functools.cache  # recordings are kept for each rule: the same alpha must be the same one
def synthetic(alpha):
    """A rule that accepts each guess with probability `alpha`, whatever the models say, and computes all else as the
    token rule does: for the speed of models whose agreement is an accident."""

    def verify(p, q, drafts, u):
        at = drafts[..., None]
        p[:, : drafts.shape[1]].scatter_(-1, at, alpha * q.gather(-1, at))
        return token_rule(p, q, drafts, u)

    return verify
