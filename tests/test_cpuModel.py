"""The kernels' model against the eager one, and the models that have no kernels. (For the kernels alone see
test_kernels.py and test_multiply.py.)"""

import copy
import gc
import itertools
import weakref
from dataclasses import replace
from functools import partial

import helpers
import pytest
import torch
from conftest import refused
from helpers import FULL, compiled_roles, roles
from test_otherTokenizer import TEXTS, models_of
from test_specSampling import PROMPTS
from torch import nn

from decoding.lengthRules import DraftConfidence
from decoding.model import Model
from decoding.rows import uniform
from decoding.tree import Places, Tree
from engine import decoderLayers
from engine.cachedModel import CachedModel, Store
from engine.compiling import compiled, is_compiled
from engine.cpuModel import CpuModel
from engine.decoderLayers import Description, PackedLayer
from engine.kernels import loader
from engine.kernels.packedLinear import packed
from engine.kvCache import SlotLayer
from engine.sharedWeights import RestrictedModel
from methods.catalogue import METHODS, build
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter, LookupFirst
from methods.otherTokenizer import OtherTokenizerDrafter
from methods.samplers import Decoding
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling

pytestmark = pytest.mark.usefixtures("kernels")

FREE = Sampling(1.0, 0, 1.0)
ROPE = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
ROPE |= {"low_freq_factor": 1, "high_freq_factor": 4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
PARTS = {"partial_rotary_factor": 0.7, "short_factor": [1.0] * 7, "long_factor": [2.0] * 7}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA = {"head_dim": 12, "sliding_window": 20, "num_hidden_layers": 3, "query_pre_attn_scalar": 20}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "final_logit_softcapping": 9.0}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.2, "attention_multiplier": 0.1}
# Kinds of models that the kernels know: {name: (family, sizes of its config)}.
KINDS = {
    **{family: (family, {}) for family in helpers.FAMILIES},
    "sequential": ("gpt_neox", {"use_parallel_residual": False, "rope_parameters": {"partial_rotary_factor": 1.0}}),
    "without biases": ("gpt_neox", {"attention_bias": False}),
    "odd sizes": ("llama", {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": 50}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "one layer": ("llama", {"num_hidden_layers": 1, "head_dim": 12}),
    "llama3": ("llama", {"rope_parameters": ROPE | {"rope_type": "llama3"}}),
    "yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn"}}),
    "norms of heads": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, a window": ("mistral", {"sliding_window": 20}),
    "qwen2, a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "gemma": ("gemma", {"head_dim": 10, "attention_bias": True}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 4.0, "attn_implementation": "eager"}),
    "gemma3_text": ("gemma3_text", GEMMA | {"attention_bias": True, "tie_word_embeddings": False}),
    "phi3": ("phi3", {"sliding_window": None, "intermediate_size": 50, "rope_parameters": LONG}),
    "phi3, rotated in part": ("phi3", {"hidden_size": 80, "rope_parameters": LONG | PARTS}),
    "phi3, a window": ("phi3", {"sliding_window": 37, "hidden_size": 36, "num_attention_heads": 6}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3, "mlp_bias": True}),
    "smollm3, a window": ("smollm3", {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 9}),
    "granite": ("granite", GRANITE),
    "olmo2": ("olmo2", {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 1, "attention_bias": True}),
    "phi": ("phi", {"qk_layernorm": True, "rope_parameters": PARTIAL, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm, in parallel": ("stablelm", {"use_parallel_residual": True, "rope_parameters": PARTIAL}),
    "starcoder2": ("starcoder2", {"sliding_window": 50, "intermediate_size": 70}),
    "plain norms": ("opt", {"layer_norm_elementwise_affine": False, "enable_bias": False}),
    # Wide enough for several threads, and for several parts of a block (`FAR` of multiply.cpp):
    "wide": ("llama", {"hidden_size": 128, "intermediate_size": 400}),
    "wide, in parallel": ("gpt_neox", {"hidden_size": 192, "intermediate_size": 600}),
    "wide, with norms of heads": ("qwen3", {"hidden_size": 96, "intermediate_size": 3000, "head_dim": 80}),
    **{f"{name} with a gate": ("llama", {"hidden_act": name}) for name in ("gelu", "relu", "gelu_pytorch_tanh")},
    **{name: ("gpt2", {"activation_function": name}) for name in ("gelu", "silu", "gelu_fast")},
    **{f"heads of {width}": ("llama", {"head_dim": width}) for width in (2, 96, 130, 256, *(64, 128) * FULL)},
}


def scattered(model):
    """The model, with norms and biases that are not all ones and zeros: what is left out is seen. Half of an MLP's
    numbers are so large that an exponential would overflow."""
    torch.manual_seed(9)
    with torch.no_grad():
        for name, weight in model.model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            if "mlp.c_fc" in name or "mlp.down_proj.weight" in name:
                weight[..., ::2].mul_(1e4 if "c_fc" in name else 1e-4)
            elif "mlp.c_proj.weight" in name or "mlp.gate_proj" in name:
                weight[::2].mul_(1e4 if "gate_proj" in name else 1e-4)
    return model


def both(kind="gpt_neox", dtype=torch.float32, vocabulary=61, **sizes):
    """(the eager model, the compiled one) of the same weights."""
    family, more = KINDS[kind]
    eager, model = (scattered(helpers.tiny(family, context=512, **more | sizes)) for _ in range(2))
    eager, model = (CachedModel(each.model.to(dtype), vocabulary, "model") for each in (eager, model))
    model = compiled(model)
    assert type(model) is CpuModel and type(eager) is CachedModel
    return eager, model


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens_of(rows, count, generator):
    return torch.randint(61, (rows, count), generator=generator)


def block_at(starts, width):
    return torch.tensor(starts)[:, None] + torch.arange(width)


def layers_of(model):
    """The keys and the values of all layers in the cache of a model."""
    return list(model.cache.states())


def near_enough(found, wanted, error=1e-5):
    """Assert that two tensors of logits are as near as their dtype allows, in the mean and everywhere."""
    assert found.shape == wanted.shape and found.dtype == torch.float32
    assert (found - wanted).norm() <= error * wanted.norm()
    assert (found - wanted).abs().max() <= 20 * error * wanted.abs().max()


def check(eager, model, rows=1, error=1e-5, widths=(1, 2, 5, 12, 13, 17, 33, 64, 70)):
    """Assert that two models compute the same logits, keys and values: of prompts, of blocks of any width at any place,
    of ragged blocks, kept tokens, moved slots, trees and texts, whatever the cache holds. The compiled one's cache has
    other rows too."""
    generator = draws(rows)

    def same(*inputs):
        near_enough(*(each.forward(*inputs) for each in (model, eager)), error)

    def same_of_some(tokens, positions, places=None):
        """Of each row only its first tokens are computed and written; none of blocks of two."""
        width = tokens.shape[1]
        counts = torch.randint(width + 1, (rows, 1), generator=generator) * (width != 2)
        wanted, before = eager.forward(tokens, positions, places), [layer.clone() for layer in layers_of(model)]
        slots = positions if places is None else places.slots
        left = torch.ones(rows, 400, dtype=torch.bool).scatter(1, slots, torch.arange(width) >= counts)
        own = torch.stack([torch.randperm(width, generator=generator)[:2] for _ in range(rows)])
        for keep in None, torch.tensor([0, width - 1, 0]), own:
            columns = (torch.arange(width) if keep is None else keep).expand(rows, -1)
            logits, computed = model.forward(tokens, positions, places, keep, counts[:, 0]), columns < counts
            assert logits.shape[:2] == columns.shape and not logits[~computed].any()
            if computed.any():
                near_enough(logits[computed], wanted[torch.arange(rows)[:, None], columns][computed], error)
        for layer, old in zip(layers_of(model), before):
            after, untouched = (states[1 : 1 + rows].transpose(1, 2)[left] for states in (layer, old))
            assert torch.equal(after.nan_to_num(), untouched.nan_to_num())
        near_enough(model.forward(tokens, positions, places), wanted, error)

    eager.reserve(rows, 400)
    model.reserve(rows + 2, 400)
    model.first_row = 1
    for layer in layers_of(model):
        layer.fill_(torch.nan)  # What no token was written to is not read, and no other row.
    for length in 40, 300, 129:  # More than the 256 tokens of all rows that the kernels read at once, and less.
        prompt, at = tokens_of(rows, length, generator), block_at([0] * rows, length)
        same_of_some(prompt, at)
        same(prompt, at, None, torch.tensor([length - 1, 2, length // 2]))
    for keep in torch.tensor([100, 3, 100, 100, 4]), torch.zeros(140, dtype=torch.long):  # Some more than once.
        same(prompt, at, None, keep)
    for width in widths:
        starts = torch.randint(330 - width - 30, (rows,), generator=generator).tolist()
        (same_of_some if width in widths[::3] else same)(tokens_of(rows, width, generator), block_at(starts, width))
    moved = [torch.stack([torch.randperm(300, generator=generator)[:9] for _ in range(rows)]) for _ in range(2)]
    with torch.inference_mode():
        for each in model, eager:
            each.move(*moved)
    for layer, wanted in zip(layers_of(model), layers_of(eager)):
        near_enough(layer[1 : 1 + rows, :, :300].float(), wanted[:, :, :300], error)
        assert layer[[0, -1]].isnan().all()
    for tree in Tree.of("3/2,1,0/1,2,0"), Tree.of("40"):
        places = Places.at(torch.randint(230, (rows,), generator=generator), tree)
        same_of_some(tokens_of(rows, tree.size + 1, generator), places.positions, places)
        for nodes in tree.levels[1], tree.levels[-1]:
            some, block = places.only(list(nodes)), tokens_of(rows, len(nodes), generator)
            same(block, some.positions, some)
            same(block, some.positions, some, torch.tensor([len(nodes) - 1]))
    model.first_row, texts = 0, tokens_of(rows, 70, generator)
    cache, before = model.cache, [layer.clone() for layer in layers_of(model)]
    near_enough(*(each.score(texts) for each in (model, eager)), error)
    assert model.cache is cache
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(layers_of(model), before))
    model.first_row = 1
    same(tokens_of(rows, 3, generator), block_at([31] * rows, 3))
    model.first_row = 0


ALONE = [kind for kind in KINDS if FULL or kind in (*helpers.FAMILIES, "wide", "wide, in parallel")]  # also as one row


@pytest.mark.parametrize(
    "kind, rows",
    [*((kind, 3) for kind in KINDS), *((kind, 1) for kind in ALONE), ("gpt2", 9), ("gpt_neox", 0), ("qwen2", 0)],
)
def test_logits_keys_and_values_are_eagers(kind, rows):
    """Of one row and of rows that have positions of their own; 0: of every width of 1 to 70 tokens."""
    check(*both(kind), rows or 1, **{} if rows else {"widths": range(1, 71)})


@pytest.mark.parametrize("kind", ["wide, in parallel", *("wide", "wide, with norms of heads") * FULL])
def test_any_number_of_threads_computes_the_same(kind, three_threads):
    check(*both(kind), 2, widths=(1, 8, 9, 17))


@pytest.mark.parametrize(
    "kind", [*helpers.FAMILIES, "norms of heads", "heads of 130", *("heads of 96", "heads of 256") * FULL]
)
def test_in_bfloat16_logits_are_as_near_as_transformers(kind):
    """To those of the same weights in float32. Transformers rounds after each operator."""
    eager, model = both(kind, torch.bfloat16)
    exact = CachedModel(copy.deepcopy(eager.model).float(), 61)
    check(eager, model, 3, error=0.15, widths=(1, 2, 5, 12, 17, 40))
    for rows in 1, 3:
        for width in 1, 5, 60:
            tokens = tokens_of(rows, width, draws(width))
            near, far = ((each.score(tokens) - exact.score(tokens)).norm() for each in (model, eager))
            assert near <= 1.2 * far
    assert model.keys_values()[0][0].dtype == torch.bfloat16 and eager.cache_dtype == torch.float32


@pytest.mark.parametrize("processor", list(loader.KINDS)[1:])
def test_the_kernels_of_each_kind_of_processor_compute_the_same(processor):
    """Whole models; for the loop that the kinds have of their own see test_multiply.py."""
    if helpers.use_kernel(processor) != processor:
        pytest.skip(f"no {processor} here")
    try:
        for kind, dtype, error in ("wide", torch.float32, 1e-5), ("wide, in parallel", torch.bfloat16, 0.1):
            check(*both(kind, dtype), 2, error, widths=(1, 3, 13, 40))
    finally:
        helpers.use_kernel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_behind_the_weights_and_the_cache_is_read(dtype, monkeypatch):
    monkeypatch.setattr(decoderLayers, "packed", lambda weight: helpers.at_the_end_of_memory(packed(weight)))
    for kind in "odd sizes", "wide", "heads of 130":
        _, model = both(kind, dtype, num_hidden_layers=1)
        model.reserve(2, 71)
        states = [[helpers.at_the_end_of_memory(layer) for layer in layers] for layers in model.keys_values()]
        model.decoder.bind(*states, *model.description.angles(71), None)
        for width in 1, 2, 5, 13, 71:
            logits = model.forward(tokens_of(2, width, draws()), block_at([71 - width] * 2, width))
            assert logits.isfinite().all()


decoder_of, angles = Description.decoder, Description.angles
MISTAKES = {
    "arranged": lambda self, name, rows: torch.cat(list(rows)),
    "decoder": lambda self, layers, *rest: decoder_of(self, layers[::-1], *rest),
    "angles": lambda self, capacity: tuple(x.roll(1, 1) for x in angles(self, capacity)),
}


@pytest.mark.parametrize("method", MISTAKES)
def test_a_mistake_in_a_models_description_is_seen_before_its_layers_are_packed(method, monkeypatch):
    """And if it were not, by the comparison above."""
    monkeypatch.setattr(Description, method, MISTAKES[method])
    with pytest.raises(RuntimeError, match="something that the kernels do not"):
        CpuModel(helpers.tiny().model)
    monkeypatch.setattr(Description, "check", lambda self, layers: None)
    models = both()
    with pytest.raises(AssertionError):
        check(*models)


class Wrong:
    """A decoder of which a method gets other arguments."""

    def __init__(self, decoder, method, change):
        self.bind, self.forward, self.draw = decoder.bind, decoder.forward, decoder.draw
        right = getattr(decoder, method)
        setattr(self, method, lambda *given: right(*change(*given)))


WRONG = {  # {mistake: what it makes of the arguments of a decoder's forward}
    "a token": lambda tokens, *rest: (60 - tokens, *rest),
    "a position": lambda tokens, at, *rest: (tokens, at + 1, *rest),
    "no tree": lambda *given: (*given[:3], None, None, *given[5:]),
    "no slots": lambda *given: (*given[:2], None, *given[3:]),
    "other tokens are kept": lambda *given: (*given[:5], None if given[5] is None else given[5].flip(0), *given[6:]),
    "the next row": lambda *given: (*given[:-1], given[-1] + 1),
    "one token more": lambda *given: (*given[:-2], None if given[-2] is None else given[-2] + 1, given[-1]),
    "all tokens": lambda *given: (*given[:-2], None, given[-1]),
    "another row's count": lambda *given: (*given[:-2], None if given[-2] is None else given[-2].flip(0), given[-1]),
}


@pytest.mark.parametrize("mistake", [*WRONG, "score leaves its cache", "slots are moved back"])
def test_a_wrong_forward_is_seen(mistake, monkeypatch):
    eager, model = both("llama")
    kernels = model.kernels
    if mistake in WRONG:
        model.decoder = Wrong(model.decoder, "forward", WRONG[mistake])
    elif mistake == "slots are moved back":
        monkeypatch.setattr(model, "move", lambda source, slots: CpuModel.move(model, slots, source))
    else:
        text = lambda: model.bound[0] and model.bound[0].capacity == 70  # noqa: E731 - the cache of a text that is scored
        monkeypatch.setattr(model, "kernels", lambda: model.decoder if text() else kernels())
    with pytest.raises((AssertionError, RuntimeError)):
        check(eager, model, 2)


# Draws.


@torch.inference_mode()
def drawn(model, prompts, width, count, sampling, counts=None):
    """What `model` draws after a block of that width: tokens and distributions. And the logits that come next, or after
    ragged draws those in the place of the block."""
    rows, length = prompts.shape
    seen = torch.zeros(rows, 61, dtype=torch.bool).scatter(1, prompts, True)
    u = uniform(count, rows, device=torch.device("cpu"), generator=draws(count))
    inputs = prompts, block_at([0] * rows, length + count + 1), u, seen
    prompts, at, u, seen = (x.to(model.device) for x in inputs)
    model.reserve(rows, 40)
    model.forward(prompts[:, :-width], at[:, : length - width])
    block = prompts[:, -width:], at[:, length - width : -2]
    tokens, q = model.draw(*block, u, sampling, seen if sampling.repetition_penalty != 1 else None, counts)
    after = length - width if counts else length + count - 1
    return [x.cpu() for x in (tokens, q, model.forward(prompts[:, :2], at[:, after : after + 2]))]


def check_draws(eager, model, rows, width, count, sampling, counts=None):
    """Assert that two models draw the same. counts: of each row only so many tokens are drawn."""
    prompts = tokens_of(rows, 10, draws())
    wanted, found = (drawn(each, prompts, width, count, sampling, counts) for each in (eager, model))
    is_drawn = torch.arange(count) < torch.tensor(counts or [count] * rows)[:, None]
    assert torch.equal(found[0], wanted[0] * is_drawn)
    torch.testing.assert_close(found[1], wanted[1] * is_drawn[..., None], atol=1e-5, rtol=1e-4)
    near_enough(found[2], wanted[2], 1e-5)


PENALISED = [Sampling(0.9, 0, 0.95, 1.3), Sampling(0.0, 0, 1.0, 1.5)]


@pytest.mark.parametrize("sampling", [FREE, GREEDY, Sampling(), Sampling(0.7, 8, 0.9), *PENALISED])
def test_draws_are_those_of_a_model_step_by_step(sampling):
    eager, model = both("llama")
    for rows, (width, count) in zip(itertools.cycle((1, 3)), itertools.product((1, 2, 5), (1, 2, 7))):
        check_draws(eager, model, rows, width, count, sampling)


@pytest.mark.parametrize("sampling", [FREE, GREEDY, Sampling(0.7, 8, 0.9)])
def test_ragged_draws_are_the_first_of_full_draws(sampling):
    check_draws(*both("llama"), 4, 2, 5, sampling, [2, 0, 5, 1])


WRONG_DRAWS = {
    "u": lambda tokens, at, u, *rest: (tokens, at, u.flip(1), *rest),
    "a position": lambda tokens, at, *rest: (tokens, torch.cat([at[:, :-1], at[:, -2:-1]], 1), *rest),
    "a filter": lambda *given: (*given[:3], torch.tensor([1.0, 0, 1]).double(), *given[4:]),
}


@pytest.mark.parametrize("mistake", WRONG_DRAWS)
def test_a_wrong_draw_is_seen(mistake):
    eager, model = both("llama")
    model.decoder = Wrong(model.decoder, "draw", WRONG_DRAWS[mistake])
    with pytest.raises(AssertionError):
        check_draws(eager, model, 2, 2, 7, Sampling(0.7, 8, 0.9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 70], ids=["a few slots", "a prompt"])
@torch.inference_mode()
def test_attention_to_nan_is_nan(dtype, count):
    """The maximum of some numbers, and comparisons with them, pass over nan."""
    model = compiled(changed(lambda model: model.to(dtype)))
    assert is_compiled(model)
    model.reserve(1, 80)
    model.forward(torch.arange(count)[None] % 61, block_at([0], count))
    for wrong in torch.nan, torch.inf, -torch.inf:
        layers_of(model)[0][:, :, 0] = wrong  # The keys of the first token.
        logits = model.forward(torch.arange(count)[None] % 61, block_at([1], count))
        assert logits.isnan().all(), wrong


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma3_text"])
@torch.inference_mode()
def test_from_logits_of_nan_no_token_is_drawn_and_the_next_forward_is_as_ever(kind):
    eager, model = both(kind)
    for each in eager, model:
        each.model.get_input_embeddings().weight[7] = torch.nan
    for tokens in torch.tensor([[5, 7]]), torch.tensor([[5, 9], [7, 8], [3, 3]]):
        rows, found = len(tokens), []
        for each in eager, model:
            each.reserve(rows, 20)
            u = torch.full((3, rows), 0.5)
            found.append(each.draw(tokens, block_at([0] * rows, 4), u, Sampling()))
        assert torch.equal(found[0][0], found[1][0]) and (found[1][0] == 61).any()
        torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4, equal_nan=True)
        tokens = torch.full_like(tokens, 3)
        near_enough(*(each.forward(tokens, block_at([0] * rows, 2)) for each in (model, eager)), 1e-5)


def test_what_cannot_be_read_is_refused_and_nothing_is_written():
    for kind in "gpt_neox", "opt":
        _, model = both(kind)
        with pytest.raises(RuntimeError, match="reserve"):
            model.forward(torch.tensor([[5]]), torch.tensor([[0]]))
        model.reserve(2, 20)
        right, at = torch.tensor([[5, 6], [7, 8]]), block_at([0, 3], 2)
        tree = Places(at, at, torch.tensor([0, 3]), torch.tensor([1, 3]))

        def refused(error, tokens=right, positions=at, places=None, keep=None, counts=None):
            with pytest.raises(error):
                model.forward(tokens, positions, places, keep, counts)

        for token in -1, 61, 10**6:
            refused(IndexError, right.clone().fill_(token))
        for position in -1, 20, 10**6:
            beyond = torch.tensor([[0, 1], [3, position]])
            refused(RuntimeError, positions=beyond)
            refused(RuntimeError, places=tree._replace(slots=beyond))
        refused(RuntimeError, right[[0, 1, 1]], at[[0, 1, 1]])  # the cache has two rows
        for model.first_row in -1, 1:
            refused(RuntimeError)
            with pytest.raises(RuntimeError, match="rows"):
                model.move(at, at)
        model.first_row = 0
        for counts in torch.tensor([1]), torch.tensor([3, 0]), torch.tensor([0, -1]), torch.tensor([1.0, 1.0]):
            refused(RuntimeError, counts=counts)
        for counts in [1], [1.0, 1.0]:
            with pytest.raises(RuntimeError, match="a count for each row"):
                model.draw(right, at, torch.rand(1, 2), Sampling(), None, counts)
        for name, wrong in {"slots": at[:, :1], "ancestors": torch.tensor([1]), "root": torch.tensor([1])}.items():
            refused(RuntimeError, places=tree._replace(**{name: wrong}))
        for positions in at[:, :1], at.float():
            refused(RuntimeError, positions=positions)
        refused(RuntimeError, keep=torch.tensor([[0, 1]]))
        refused(RuntimeError, right.int())
        for token in -1, 2:
            refused(IndexError, keep=torch.tensor([0, token]))
        with pytest.raises(RuntimeError):
            model.draw(right, torch.tensor([[0, 1, 20], [3, 4, 5]]), torch.rand(2, 2), Sampling())
        model.reserve(2, 21)
        with pytest.raises(RuntimeError, match="no slot"):
            model.move(torch.tensor([[0], [21]]), torch.tensor([[0], [0]]))
        assert not any(layer.any() for layer in layers_of(model))
        model.forward(right, at, tree, torch.tensor([1, 0]))  # The mistake that the check is for.
        assert all(layer.any() for layer in layers_of(model))


# Texts.


DECODING = Decoding(
    gamma=4, gamma1=2, draft_threshold=0.2, target_threshold=0.2, contrastive_temperature=1.0, tree="3/2,1,0/1,2,0"
)
# (method, options of `write`): those whose text depends on no clock.
CASES = [(name, {}) for name, method in METHODS.items() if method.seeded(DECODING) and not method.engine]
CASES.remove(("head", {}))  # It has its tests in test_head.py.
CASES += [("fixed", {"gamma": 9}), ("fixed", {"draft": "few"}), ("topDown", {"tree": "1,1,1"})]


@pytest.fixture(scope="module")
def models(kernels):
    """The eager models by role, and the compiled ones of the same weights. few: a draft that knows few tokens."""
    eager, others = roles(), roles()
    for each in eager, others:
        each["few"] = RestrictedModel(each["draft"], torch.arange(0, 61, 2))
    return eager, compiled_roles(others)


def write(m, name, prompts, sampling, draft="draft", **options):
    """The texts that a method writes with the models m."""
    sampler = build([name], m | {"draft": m[draft]}, replace(DECODING, **options))[name]
    return sampler(prompts, max_len=12, sampling=sampling, generator=draws(3))[0]


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_texts_are_those_of_eager_models(models, name, options):
    """Of one row and of several, greedy and drawn, with a penalty and without."""
    nucleus, penalty = Sampling(0.85, 0, 0.9), Sampling(1.0, 5, 1.0, 1.3)
    for sampling, prompts in (GREEDY, PROMPTS), (nucleus, PROMPTS[2:3]), (penalty, PROMPTS):
        wanted, found = (write(m, name, prompts, sampling, **options) for m in models)
        assert found == wanted and set(map(len, found)) == {12}


def test_a_wrong_text_is_seen(models):
    """A draft cannot change the greedy text, but it changes a drawn one; the target changes both."""
    eager, m = models[0], dict(models[1])
    for role, samplings in ("draft", [FREE]), ("target", [GREEDY, FREE]):
        wrong = m[role] = copy.copy(m[role])
        wrong.store, wrong.bound, wrong.draw = Store(), (None, None), partial(Model.draw, wrong)
        wrong.decoder = Wrong(wrong.description.pack(), "forward", WRONG["a token"])
        for sampling in samplings:
            assert write(eager, "fixed", PROMPTS, sampling) != write(m, "fixed", PROMPTS, sampling)


def test_a_draft_of_another_tokenizer_is_compiled_too(kinds):
    _, target, draft, translation = models_of(kinds)
    prompts, texts = [kinds["llama"](text)["input_ids"] for text in TEXTS], []
    for make in (lambda model: model), compiled:
        guesser = OtherTokenizerDrafter(make(draft), translation)
        texts += [
            specSampling(prompts, make(target), guesser, 12, 4, sampling, None, draws())[0]
            for sampling in (GREEDY, Sampling(0.9, 0, 0.9, 1.2))
        ]
    assert texts[:2] == texts[2:]


@pytest.mark.parametrize("name", ["lookup", "cascade", "tree"])
def test_no_text_depends_on_torchs_default_dtype(models, name):
    def texts():
        for m in models:
            options = {"sampling": Sampling(1.0, 0, 0.9), "generator": [draws(row) for row in range(len(PROMPTS))]}
            yield build([name], m, DECODING)[name](PROMPTS, max_len=12, **options)[0]

    wanted = [*texts()]
    for dtype in (torch.bfloat16, torch.float64):
        llama = helpers.tiny("llama")
        greedy = regrSampling(PROMPTS[:1], llama, 9, GREEDY)[0]
        torch.set_default_dtype(dtype)
        try:
            assert [*texts()] == wanted
            assert is_compiled(now := compiled(llama)) and regrSampling(PROMPTS[:1], now, 9, GREEDY)[0] == greedy
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_cache_that_was_not_allocated_to_its_end_is_allocated_then(monkeypatch):
    model, allocate, calls = compiled(helpers.tiny(layers=3)), SlotLayer.lazy_initialization, []
    wanted = regrSampling(PROMPTS[:1], model, 9, GREEDY)[0]
    regrSampling(PROMPTS[:1], model, 4, GREEDY)  # Of another size.

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return allocate(*args)

    monkeypatch.setattr(SlotLayer, "lazy_initialization", interrupted)
    with pytest.raises(KeyboardInterrupt):
        regrSampling(PROMPTS[:1], model, 9, GREEDY)
    assert regrSampling(PROMPTS[:1], model, 9, GREEDY)[0] == wanted and len(calls) == 4


def test_kernels_belong_to_the_compiled_model(models, monkeypatch):
    """Eager decoding is pure PyTorch, even where another model of the process was compiled."""
    eager, right = models[0], models[1]["target"]
    assert type(eager["target"]).probabilities is Model.probabilities is not type(right).probabilities
    wanted = write(eager, "fixed", PROMPTS[:1], GREEDY)
    for name in "probabilities", "pick", "siblings", "accept", "accept_block", "accept_tree", "move":
        monkeypatch.setattr(torch.ops.native, name, lambda *args: pytest.fail("a kernel was called"))
    assert write(eager, "fixed", PROMPTS[:1], GREEDY) == wanted
    with pytest.raises(pytest.fail.Exception):  # The mistake that the check is for.
        monkeypatch.setattr(eager["target"], "probabilities", right.probabilities)
        write(eager, "fixed", PROMPTS[:1], GREEDY)


# Packing.


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_that_shares_its_layers_takes_those_that_are_packed(family):
    """A draft and the same for few tokens. The size that a record names is that of the whole model."""
    eager, draft, other = (helpers.tiny(family, attn_implementation="eager") for _ in range(3))
    assert is_compiled(compiled(RestrictedModel(other, torch.tensor([0, 3]))))  # before the whole model is
    few, tokens = RestrictedModel(draft, torch.tensor([0, 3, 17, 60])), torch.tensor([[5, 60, 2]])
    sizes = draft.parameters, few.parameters
    draft, few = compiled(draft), compiled(few)
    assert is_compiled(draft) and is_compiled(few) and compiled(draft) is draft
    packed = [model.model.model.layers[1].parts["down"] for model in (draft, few)]
    assert packed[0] is packed[1] and (draft.parameters, few.parameters) == sizes
    wanted, found = eager.score(tokens), few.score(tokens)
    near_enough(draft.score(tokens), wanted, 1e-5)
    near_enough(found[..., [0, 3, 17, 60]], wanted[..., [0, 3, 17, 60]], 1e-5)
    assert (found > -torch.inf).sum(-1).tolist() == [[4, 4, 4]]


def test_nothing_of_the_original_layers_is_kept():
    for kind in helpers.FAMILIES:
        model = helpers.tiny(kind)
        names = {name: weight for name, weight in model.model.named_parameters() if weight.dim() == 2}
        kept = {name: weakref.ref(weight) for name, weight in names.items()}
        inner = {name for name in names if any(part.isdigit() for part in name.split("."))}
        del names
        model = compiled(model)
        gc.collect()
        assert len(inner) > 5 and is_compiled(model)
        assert {name for name, weight in kept.items() if weight() is None} == inner
        layer = next(module for module in model.model.modules() if isinstance(module, PackedLayer))
        with refused("this model is compiled"):
            layer(torch.zeros(1, 1, 32))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_that_are_tied_or_not_and_a_vocabulary_that_is_cut(kind, tied):
    for vocabulary in 61, 40, 33:
        eager, model = both(kind, vocabulary=vocabulary, tie_word_embeddings=tied)
        assert (model.model.get_output_embeddings().weight is model.model.get_input_embeddings().weight) is tied
        for tokens in torch.arange(7)[None], torch.tensor([[60]]):  # Any token can be read.
            near_enough(model.score(tokens), eager.score(tokens), 1e-5)
            assert model.score(tokens).shape[-1] == vocabulary


# Models that have no kernels.


def changed(change, family="llama", **sizes):
    model = helpers.tiny(family, **sizes)
    change(model.model)
    return model


def with_another(layers, part, name, value):
    """The second of the layers is unlike the others."""
    return changed(lambda model: setattr(getattr(model.model.layers[1], part), name, value), layers=layers)


def with_hook(model, layer):
    model.model.layers[layer].mlp.register_forward_hook(lambda module, given, output: output * 1.1)


class Adapter(nn.Module):
    """A layer that gives a little more, and the name of its weight."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, getattr(base, "bias", None)

    def forward(self, x):
        return 1.001 * self.base(x)


def with_adapter(model, parent="model.layers.0.self_attn", name="q_proj"):
    part = model.bfloat16().get_submodule(parent)
    setattr(part, name, Adapter(getattr(part, name)))


def narrowed(model):
    part = model.model.layers[1].mlp
    for name in "gate_proj", "up_proj", "down_proj":
        weight = getattr(part, name).weight
        weight.data = weight.data[:, :8].clone() if name == "down_proj" else weight.data[:8].clone()


def with_half_of_its_heads(model):
    for attention in (layer.self_attn for layer in model.model.layers):
        for part in attention.q_proj, attention.k_proj, attention.v_proj:
            part.weight.data = part.weight.data[: len(part.weight) // 2].clone()
        attention.o_proj.weight.data = attention.o_proj.weight.data[:, : attention.o_proj.weight.shape[1] // 2].clone()


ALTERED = "hooks or replaced forwards change what it computes"
PARTS = "parts of it are not those of its class"
UNLIKE = "its layers compute something that the kernels do not"
REFUSED = {
    "float64": (lambda: changed(lambda model: model.double()), "no kernels for torch.float64"),
    "an architecture": (lambda: helpers.tiny("cohere"), "nothing is known of the layers of cohere, only of Llama"),
    "norms of each head": (lambda: helpers.tiny("stablelm", qk_layernorm=True, rope_parameters=PARTIAL), UNLIKE),
    "norms": (lambda: helpers.tiny("opt", do_layer_norm_before=False), "its norms come after its layers"),
    "no last norm": (lambda: helpers.tiny("opt", _remove_final_layer_norm=True), "its norms come after its layers"),
    "narrow embeddings": (lambda: helpers.tiny("opt", word_embed_proj_dim=16), "its embeddings are narrower"),
    "an activation": (lambda: helpers.tiny(hidden_act="quick_gelu"), "no kernels for the activation quick_gelu"),
    "wide heads": (lambda: helpers.tiny("llama", head_dim=258), "no kernels for heads of 258 numbers"),
    "odd heads": (lambda: helpers.tiny("gpt2", hidden_size=20), "no kernels for heads of 5 numbers"),
    "a scale": (lambda: helpers.tiny("gpt2", scale_attn_weights=False), UNLIKE),
    "a scale of each layer": (lambda: helpers.tiny("gpt2", scale_attn_by_inverse_layer_idx=True), UNLIKE),
    "a scale that 16 bits hide": (
        lambda: changed(lambda model: model.bfloat16(), "gpt2", scale_attn_by_inverse_layer_idx=True, layers=4),
        UNLIKE,
    ),
    "a hook": (lambda: changed(lambda model: with_hook(model, 0)), ALTERED),
    "a hook in the last layer": (lambda: changed(lambda model: with_hook(model, -1)), ALTERED),
    "a function": (lambda: with_another(4, "mlp", "act_fn", nn.ReLU()), PARTS),
    "a scale of one layer": (lambda: with_another(5, "self_attn", "scaling", 1.0), UNLIKE),
    "a number of one norm": (lambda: with_another(5, "input_layernorm", "variance_epsilon", 1e-2), "several eps"),
    "an adapter": (lambda: changed(with_adapter), PARTS),
    "an adapter of the output layer": (lambda: changed(partial(with_adapter, parent="", name="lm_head")), PARTS),
    "an adapter of the embedding": (lambda: changed(partial(with_adapter, parent="model", name="embed_tokens")), PARTS),
    "an output layer in parts": (
        lambda: changed(lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head, nn.Identity()))),
        PARTS,
    ),
    "fewer heads": (lambda: changed(with_half_of_its_heads), "its heads are not those of its configuration"),
    "a narrower layer": (lambda: changed(narrowed, layers=4), "its layers have several sizes"),
    "a norm": (lambda: changed(lambda model: setattr(model.model.norm, "forward", lambda x: x)), ALTERED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_compute_stays_eager_and_one_line_says_why(name, capsys):
    make, reason = REFUSED[name]
    model, tokens = make(), torch.arange(20)[None]
    wanted = model.score(tokens)
    capsys.readouterr()
    assert compiled(model) is model and not is_compiled(model)
    said = capsys.readouterr().err
    assert said.startswith(f"{model.name} stays eager: ") and said.count("\n") == 1 and reason in said
    assert torch.equal(model.score(tokens), wanted)


SHORT = LONG | {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("rope", [SHORT, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}], ids=str)
def test_rotary_embeddings_that_depend_on_the_length_are_read_up_to_the_original_one(rope):
    """The slots of a tree's nodes may lie beyond it."""
    eager, model = (helpers.tiny("llama", rope_parameters=dict(rope)) for _ in range(2))
    model = compiled(model)
    assert is_compiled(model) and model.context == eager.context == rope.get("original_max_position_embeddings", 128)
    tokens, positions = torch.randint(0, 61, (1, model.context)), torch.arange(model.context)[None]
    wanted = eager.score(tokens)
    for each in (eager, model):
        each.reserve(1, model.context + 9)
        torch.testing.assert_close(each.forward(tokens, positions), wanted, atol=1e-3, rtol=1e-3)
        with refused("exceed the context"):
            regrSampling([[5, 9]], each, model.context - 1, GREEDY)


def test_a_llama_of_another_type_is_compiled_as_what_it_is():
    class Renamed(type(helpers.tiny("llama").model.config)):
        model_type = "internlm3"

    model = helpers.tiny("llama")
    model.model.config.__class__ = Renamed
    assert is_compiled(compiled(model))


def test_a_row_that_is_looked_up_beside_one_whose_guesses_stop_early(monkeypatch):
    """Two tokens are found for the first row; the second row's draft stops after its first guesses, of ten."""
    prompts, length = [[5, 9, 2, 7], [1, 3, 8, 30, 2]], DraftConfidence(10, 1.0)
    monkeypatch.setattr(LookupDrafter, "find", lambda drafter, rows, gammas: [[3, 4], *[[]] * (rows.size - 1)])
    target, draft = compiled(helpers.tiny()), compiled(helpers.tiny(seed=1))
    drafter = LookupFirst(LookupDrafter(61), ModelDrafter(draft))
    texts, records = specSampling(prompts, target, drafter, 30, length, FREE)
    assert list(map(len, texts)) == [30, 30] and all(sum(record.drafted) for record in records)


def test_more_tokens_than_a_model_knows_are_refused():
    with refused("gpt_neox-0 has the tokens 0 to 60, not all"):
        RestrictedModel(helpers.tiny(), torch.tensor([5, 61]))
    with refused("t knows 61 tokens, fewer than the 62 that are asked for"):
        CachedModel(helpers.tiny().model, 62, "t")
    narrow = helpers.tiny().model
    narrow.set_output_embeddings(nn.Linear(narrow.config.hidden_size, 50, bias=False))
    with refused("t knows 50 tokens, fewer than the 61 that are asked for"):
        CachedModel(narrow, 61, "t")
    eager, packed = CachedModel(narrow), compiled(CachedModel(copy.deepcopy(narrow)))
    assert eager.vocabulary == 50
    prompts = [[1, 2, 3], [4, 5]]
    assert regrSampling(prompts, eager, 20, GREEDY)[0] == regrSampling(prompts, packed, 20, GREEDY)[0]


def test_where_memory_ends_the_model_is_not_called_eager(monkeypatch):
    """Some of its layers are packed by then."""
    parts = Description.parts

    def fail(self, layer):
        if any(isinstance(part, PackedLayer) for part in self.model.modules()):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return parts(self, layer)

    monkeypatch.setattr(Description, "parts", fail)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        compiled(helpers.tiny())


def test_without_a_compiler_one_line_says_so_and_all_stays_eager(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    loader.load.cache_clear()
    eager, target = helpers.tiny(), helpers.tiny()
    assert compiled(target) is target
    said = capsys.readouterr().err
    loader.load.cache_clear()
    assert said.startswith("gpt_neox-0 stays eager") and said.count("\n") == 1
    assert regrSampling(PROMPTS, target, 20, GREEDY)[0] == regrSampling(PROMPTS, eager, 20, GREEDY)[0]
