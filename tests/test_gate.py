"""The gate: kinds of models that are decoded right, those that are refused, and mistakes that it must see. The small
twins that it reads have the class and the configuration of a model."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import helpers
import pytest
import torch
import transformers
import zoo
from conftest import refused
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    FalconConfig,
    FalconForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.mistral.modeling_mistral import MistralAttention

from decoding.tree import Places
from engine import cachedModel, gate, kvCache
from engine.cachedModel import CachedModel, Ungated, check_kind, context_of
from engine.compiling import compiled
from engine.sharedWeights import RestrictedModel
from engine.smallTwin import small_twin

RIGHT = ["gemma3_text", "gpt_oss", "gptj", "deepseek_v3"]
RIGHT += ["gemma2", "phi3", "falcon", "roberta"] * helpers.FULL
REFUSED = {
    "llama4_text": "its logits are off by",
    "big_bird": "its tokens attend to those after them",
    "bart": "its forward takes no position_ids",
    "gpt_neo": "its logits are off by",
    "mamba": "keep a state that positions cannot address",
    "rwkv": "its layers keep a state",
    "jamba": "its layers of type",
    "doge": "its tokens attend to those after them",
}


def twin_of(config):
    return small_twin(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def windowed():
    return twin_of(MistralConfig(sliding_window=4096))


def test_a_twin_has_small_windows_layers_of_each_kind_and_shared_heads():
    config = windowed().config
    assert config.sliding_window == 16 and config.max_position_embeddings == context_of(config) == 128
    config = twin_of(Gemma3TextConfig()).config
    assert set(config.layer_types) == {"sliding_attention", "full_attention"} and config.num_hidden_layers <= 8
    late = Qwen2Config(num_hidden_layers=28, use_sliding_window=True, max_window_layers=21)
    assert twin_of(late).config.layer_types == 7 * ["full_attention"] + ["sliding_attention"]
    for heads, groups, of_twin in ((32, 32, 4), (32, 8, 2), (32, 1, 1), (3, 3, 4)):
        sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 16 * heads}
        assert twin_of(LlamaConfig(**sizes)).config.num_key_value_heads == of_twin


def test_the_configuration_stays_as_it_was_and_a_twin_is_always_the_same():
    config = LlamaConfig()
    before = config.to_dict()
    one, other = (twin_of(config).lm_head.weight for _ in range(2))
    assert config.to_dict() == before and bool((one == other).all())


@pytest.mark.parametrize("name", RIGHT)
def test_a_kind_is_decoded_as_its_own_forward_says_beyond_its_window_too(name):
    assert zoo.verdict(CONFIG_MAPPING[name]) == ("right", "")


@pytest.mark.parametrize("name", ["mpt", "whisper"])
def test_biases_and_learned_positions_end_where_texts_do(name):
    model = CachedModel(twin_of(zoo.config_of(CONFIG_MAPPING[name])))
    assert model.context == 128
    tokens = torch.randint(3, model.vocabulary, (1, model.context))
    assert model.score(tokens).shape[1] == model.context
    with pytest.raises((RuntimeError, IndexError)):
        model.score(torch.cat([tokens, tokens[:, :1]], 1))


def test_where_alibi_counts_slots_trees_alone_are_refused():
    assert zoo.verdict(CONFIG_MAPPING["bloom"]) == ("right", "no trees")
    model = CachedModel(twin_of(zoo.config_of(CONFIG_MAPPING["bloom"])), name="bloom")
    model.reserve(1, 9)
    with refused("bloom cannot verify trees"):
        model.forward(torch.tensor([[5]]), torch.tensor([[0]]), Places.at(torch.tensor([0]), gate.TREE))


@pytest.mark.parametrize("name", REFUSED)
def test_another_kind_is_refused_in_one_line_that_names_it_and_the_reason(name):
    config = zoo.config_of(CONFIG_MAPPING[name])
    with refused(f"models of type {name} are not supported: ", REFUSED[name]):
        check_kind(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


@pytest.mark.parametrize("name, field, value", [
    ("llama4_text", "attn_temperature_tuning", False), ("big_bird", "attention_type", "original_full"),
])  # fmt: skip
def test_what_long_texts_alone_use_is_refused_only_where_a_configuration_has_it(name, field, value):
    config = zoo.config_of(CONFIG_MAPPING[name])
    setattr(config, field, value)
    if name == "big_bird" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("older versions of its code attend to later tokens, and are refused")
    check_kind(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


class Shifted(Ungated):
    """Positions that are wrong beyond the twentieth."""

    def forward(self, tokens, positions, *more, **how):
        return super().forward(tokens, positions + (positions > 20), *more, **how)


class Stateful(Ungated):
    """A state that survives a rollback."""

    total = 0.0

    def forward(self, tokens, *more, **how):
        self.total = 0.9 * self.total + 0.01 * tokens.float().sum()
        return super().forward(tokens, *more, **how) + self.total * torch.arange(self.vocabulary)


MISTAKES = {  # what is replaced, and by what
    "a mask without windows": (kvCache.Block, "mask", lambda block, kind: block.seen[:, None]),
    "a mask that shows a stale slot": (
        cachedModel,
        "Block",
        lambda positions, seen, places: kvCache.Block(positions, seen | seen.roll(1, -1), places),
    ),
    "slots for positions in a tree": (
        Places,
        "key_positions",
        lambda places, reach: torch.arange(reach).expand(len(places.root), len(places.ancestors), -1) + 3,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_seen(mistake, monkeypatch):
    assert max(gate.errors_of(windowed(), Ungated).values()) < 1e-5
    monkeypatch.setattr(*MISTAKES[mistake])
    assert max(gate.errors_of(windowed(), Ungated).values()) > 1e-2


@pytest.mark.parametrize("low", [None, -1e4, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("flawed", [Shifted, Stateful])
def test_a_model_that_computes_a_block_otherwise_is_seen(flawed, low, monkeypatch):
    model = windowed()
    if low is not None:
        model.lm_head.__class__ = helpers.Excluding
        monkeypatch.setattr(helpers.Excluding, "low", low)
        assert max(gate.errors_of(model, Ungated).values()) < 1e-5
    assert gate.errors_of(model, flawed)[gate.BLOCKS] > 1e-2


def test_what_the_user_has_switched_on_does_not_matter(stored, monkeypatch):
    """Hidden states, which leave hooks of transformers; autocast, in which the twin's products would be rounded; and a
    seed: a GPU's generators are not seeded."""
    model = windowed()
    model(input_ids=torch.tensor([[5, 9]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules()) and not gate.is_altered(model)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all GPUs are seeded"))
    torch.default_generator.manual_seed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        CachedModel(model)
    assert torch.default_generator.initial_seed() == 7 and list(stored.iterdir())


def test_another_default_device_is_refused():
    model = windowed()
    with torch.device("meta"), refused("default device is meta", "torch.set_default_device('cpu')"):
        CachedModel(model)


def test_what_a_hook_does_with_the_end_of_a_block_is_refused_and_what_it_does_with_each_token_is_not():
    model = helpers.tiny(seed=31).model
    hook = model.gpt_neox.layers[1].register_forward_hook(lambda module, given, output: output + torch.arange(32) / 9)
    steered = CachedModel(model)
    assert steered.score(torch.tensor([[5, 9]])) is not None
    RestrictedModel(steered, torch.tensor([5, 9]))  # Its other logits are -inf.
    hook.remove()

    def last_alone(module, given, output):
        output = output.clone()
        output[:, -1] += torch.arange(32) / 9
        return output

    hook = model.gpt_neox.layers[1].register_forward_hook(last_alone)
    with refused("hooks, modules or a forward", "remove them"):
        CachedModel(model)
    hook.remove()
    inner = model.gpt_neox.layers[1].mlp
    for change, is_right in ((lambda output: 2 * output, True), (lambda output: last_alone(None, None, output), False)):
        model.gpt_neox.layers[1].mlp = Changed(inner, change)  # The same as modules, as steering is often written.
        with contextlib.nullcontext() if is_right else refused("hooks, modules or a forward"):
            CachedModel(model)


class Changed(torch.nn.Module):
    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x):
        return self.change(self.inner(x))


def test_the_reference_is_computed_with_the_attention_that_the_model_had():
    """Falcon's own attention adds alibi twice, torch's once: over slots it would be another model."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = FalconForCausalLM(FalconConfig(**sizes, alibi=True, multi_query=False, new_decoder_architecture=False))
    for _ in range(2):
        with refused("models of type falcon are not supported: its logits are off by"):
            CachedModel(model)


def test_an_attention_that_other_code_registered_is_refused(monkeypatch):
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    AttentionInterface.register(
        "mine", lambda module, q, *rest, **how: sdpa_attention_forward(module, 3 * q, *rest, **how)
    )
    model = windowed()
    model.set_attn_implementation("mine")
    with refused("its attention 'mine' is not one of transformers; choose eager or sdpa"):
        CachedModel(model)
    model.set_attn_implementation("eager")
    CachedModel(model)


def test_a_class_whose_forward_was_replaced_after_its_verdict_is_tested_itself(monkeypatch, stored):
    model, own = windowed(), MistralAttention.forward
    CachedModel(model)
    (file,) = stored.iterdir()
    for factor, is_right in ((1, True), (2, False)):

        def replaced(self, hidden_states, factor=factor, **how):
            out, *weights = own(self, hidden_states, **how)
            return out + (factor - 1) * hidden_states[:, -1:], *weights

        monkeypatch.setattr(MistralAttention, "forward", replaced)
        with contextlib.nullcontext() if is_right else refused("hooks, modules or a forward"):
            CachedModel(model)
    file.unlink()
    gate.VERDICTS.clear()
    monkeypatch.setattr(MistralAttention, "forward", lambda *given, **how: own(*given, **how))
    CachedModel(model)
    assert not list(stored.iterdir())  # Another process may have the class as it is.


def test_a_class_that_is_defined_anew_is_tested_anew(monkeypatch):
    def define(weight):
        class Mine(MistralForCausalLM):
            def forward(self, input_ids, **how):
                found = super().forward(input_ids=input_ids, **how)
                found.logits = found.logits + weight * input_ids[:, -1:, None]
                return found

        return Mine

    check_kind(MistralConfig(), define(0))
    with refused("models of type mistral are not supported"):
        check_kind(MistralConfig(), define(1))


# What is stored from one process to the next.


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The folder of verdicts, which is not there yet."""
    monkeypatch.setattr(gate, "cache_folder", lambda: tmp_path / "new")
    monkeypatch.setattr(gate, "VERDICTS", {})
    return tmp_path / "new" / "decodedRight"


def test_twins_of_several_threads_leave_the_generator_and_the_number_of_threads_alone(stored):
    before, threads, all_are_here = torch.random.get_rng_state(), torch.get_num_threads(), Barrier(4)

    def check(number):
        all_are_here.wait()
        for width in range(1 + number, 21, 4):
            check_kind(MistralConfig(intermediate_size=width), MistralForCausalLM)
        all_are_here.wait()
        return torch.get_num_threads()

    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert {*pool.map(check, range(4)), torch.get_num_threads()} == {2}
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_kind_is_computed_once_for_a_configuration_and_in_one_thread(stored, monkeypatch):
    config, count, threads = MistralConfig(), [], []
    computed, set_threads = gate.errors_of, torch.set_num_threads
    monkeypatch.setattr(gate, "errors_of", lambda *given: count.append(1) or computed(*given))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.append(n) or set_threads(n))

    def check(config, new_process=False):
        if new_process:
            gate.VERDICTS.clear()
        check_kind(config, MistralForCausalLM)
        return len(count)

    assert check(config) == check(config) == check(config, new_process=True) == 1
    config.name_or_path = "elsewhere"
    (file,) = stored.iterdir()
    assert check(config) == 1 and file.read_text() == "trees" and threads == [1, torch.get_num_threads()]
    for number, text in enumerate(("tre", "", "\0"), 2):  # What was cut short is computed again.
        file.write_text(text)
        assert check(config, new_process=True) == number and file.read_text() == "trees"
    assert check(MistralConfig(sliding_window=8)) == number + 1 and len(list(stored.iterdir())) == 2


def test_where_nothing_can_be_stored_it_is_computed_in_each_process(stored):
    stored.parent.write_text("")  # no folder
    check_kind(MistralConfig(), MistralForCausalLM)


# Random configurations of the kinds that are compiled.

STRETCHED = {"original_max_position_embeddings": 64}
ROPES = {"default": {}, "linear": {}, "dynamic": {}, "yarn": STRETCHED}
ROPES["llama3"] = STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ACTIVATIONS = ["silu", "gelu", "relu", "gelu_new", "quick_gelu"]
EITHER = [True, False]
WINDOWED = {"sliding_window": [16], "max_window_layers": [0, 1, 9], "use_sliding_window": EITHER}
KINDS = [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]]
CAPPED = {"final_logit_softcapping": [None, 9.0], "query_pre_attn_scalar": [20, 256], "sliding_window": [16, 40]}
CAPPED |= {"num_hidden_layers": [2], "layer_types": KINDS, "attention_bias": EITHER}
MULTIPLIERS = "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"
# {kind: {what is drawn of its configuration: from what}}, beside sizes, heads and the rotary embedding.
DRAWN = {
    "llama": {"attention_bias": EITHER, "mlp_bias": EITHER, "hidden_act": ACTIVATIONS},
    "mistral": {"sliding_window": [None, 16, 40, 4096], "hidden_act": ACTIVATIONS},
    "qwen2": WINDOWED,
    "qwen3": WINDOWED,
    "gpt_neox": {"use_parallel_residual": EITHER, "attention_bias": EITHER, "hidden_act": ACTIVATIONS},
    "gpt2": {"scale_attn_by_inverse_layer_idx": EITHER, "scale_attn_weights": EITHER},
    "opt": {"do_layer_norm_before": EITHER, "enable_bias": EITHER, "ffn_dim": [32, 64]},
    "gemma2": CAPPED | {"attn_logit_softcapping": [None, 4.0]},
    "gemma3_text": CAPPED | {"rope_parameters": [None]},
    "granite": dict.fromkeys(MULTIPLIERS, [0.2, 1.0, 2.0]),
    "olmo2": {"attention_bias": EITHER},
    "phi3": {"sliding_window": [None, 16, 40], "rope_parameters": [None]},
    "smollm3": WINDOWED | {"no_rope_layer_interval": [1, 2, 4], "mlp_bias": EITHER},
}


def configuration(kind, one):
    """A configuration of a type that compiles: odd numbers of heads, odd widths, windows, every rotary embedding. one:
    chooses from a sequence."""
    rope, width, heads = one([*ROPES]), one([8, 10, 16, 40]), one(range(1, 5))
    part = {"partial_rotary_factor": one([0.5, 1.0])} if kind == "gpt_neox" else {}
    chosen = {
        "rope_parameters": {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, **ROPES[rope], **part},
        "num_key_value_heads": one([n for n in range(1, heads + 1) if heads % n == 0]),
        "intermediate_size": one([32, 48, 50]),
        "head_dim": width,
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_hidden_layers": one([1, 2, 3]),
        "tie_word_embeddings": one(EITHER),
        "vocab_size": 61,
        "max_position_embeddings": 128,
        "pad_token_id": None,
        "initializer_range": 0.3,
    }
    chosen |= {name: one(values) for name, values in DRAWN[kind].items()}
    has = {*CONFIG_MAPPING[kind]().to_dict(), *CONFIG_MAPPING[kind].attribute_map}
    known = {name: value for name, value in chosen.items() if name in has}
    return CONFIG_MAPPING[kind](attn_implementation="eager", **known)  # Torch's own caps no scores.


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("seed", range(80 if helpers.FULL else 3))
def test_any_configuration_of_a_compiled_kind_is_right_eager_and_compiled(kind, seed):
    torch.manual_seed(seed)
    config = configuration(kind, random.Random(f"{kind} {seed}").choice)
    try:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    except RuntimeError:
        pytest.skip('transformers has no "yarn" for an odd number of rotated dimensions')
    with torch.no_grad():
        for weight in model.parameters():  # Norms and biases are not all ones and zeros: what is left out is seen.
            weight.add_(0.1 * torch.randn_like(weight))
    tokens = torch.randint(config.vocab_size, (2, 100))
    with torch.inference_mode():
        right = model(input_ids=tokens, use_cache=False).logits
    one = CachedModel(model, name="it")
    for make in (lambda eager: eager, compiled):  # Compiling packs the weights: what is eager is read first.
        one = make(one)
        n = min(one.context, 100)
        one.reserve(2, n + 3)
        parts = [one.forward(tokens[:, part], part.expand(2, -1)) for part in torch.arange(n).split(n // 2 + 1)]
        error = (torch.cat(parts, 1) - right[:, :n]).norm(dim=-1) / right[:, :n].norm(dim=-1)
        assert float(error.max()) < 2e-3


@pytest.mark.parametrize("order", [(0, 1, 1, 2), (0, 3), (0, 2, 1, 3)])
def test_layers_in_the_place_of_others_are_refused(order):
    """They write to the slots of the number that they were created with. `CachedModel` asks the gate."""
    model = helpers.tiny("llama", layers=4).model
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in order)
    model.config.num_hidden_layers = len(order)
    if order == (0, 2, 1, 3):  # Each layer still has slots of its own.
        assert CachedModel(model, 61, "a model").reads_trees
    else:
        with refused("modules or a forward that its class does not have"):
            CachedModel(model, 61, "a model")
