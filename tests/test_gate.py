"""The gate: kinds of models that are decoded right, those that are refused, and mistakes that it must see."""

import json

import helpers
import pytest
import torch
import zoo
from conftest import refused
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MistralConfig, MistralForCausalLM

from decoding.tree import Places
from engine import cachedModel, gate, kvCache
from engine.cachedModel import CachedModel, Ungated, check_kind
from engine.compiling import compiled
from engine.smallTwin import small_twin
from regrSampling import regrSampling
from utils import GREEDY

RIGHT = [
    "gemma3_text",
    "gemma2",
    "gpt_oss",
    "phi3",
    "starcoder2",
    "llama4_text",
    "gptj",
    "falcon",
    "roberta",
    "deepseek_v3",
]
REFUSED = {
    "bart": "its forward takes no position_ids",
    "gpt_neo": "its logits are off by",
    "mamba": "keep a state that positions cannot address",
    "rwkv": "its layers keep a state",
    "jamba": "its layers of type",
    "doge": "its tokens attend to those after them",
}


def kind_of(name):
    config = zoo.config_of(CONFIG_MAPPING[name])
    return config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@pytest.mark.parametrize("name", RIGHT)
def test_a_kind_is_decoded_as_its_own_forward_says_beyond_its_window_too(name):
    assert zoo.verdict(CONFIG_MAPPING[name]) == ("right", "")


def test_where_alibi_counts_slots_trees_alone_are_refused():
    assert zoo.verdict(CONFIG_MAPPING["bloom"]) == ("right", "no trees")
    model = CachedModel(small_twin(*kind_of("bloom")), name="bloom")
    model.reserve(1, 9)
    with refused("bloom cannot verify trees"):
        model.forward(torch.tensor([[5]]), torch.tensor([[0]]), Places.at(torch.tensor([0]), gate.TREE))


@pytest.mark.parametrize("name", REFUSED)
def test_another_kind_is_refused_in_one_line_that_names_it_and_the_reason(name):
    with refused(f"models of type {name} are not supported: ", REFUSED[name]):
        check_kind(*kind_of(name))


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


def stale_slot(positions, seen, places):
    return kvCache.Block(positions, seen | seen.roll(1, -1), places)


def slots_for_positions(places, reach):
    return torch.arange(reach).expand(len(places.root), len(places.ancestors), -1) + 3


MISTAKES = {  # what is replaced, and by what
    "a mask without windows": (kvCache.Block, "mask", lambda block, kind: block.seen[:, None]),
    "a mask that shows a stale slot": (cachedModel, "Block", stale_slot),
    "slots for positions in a tree": (Places, "key_positions", slots_for_positions),
}


def windowed():
    return small_twin(MistralConfig(sliding_window=4096), MistralForCausalLM)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen(name, monkeypatch):
    assert max(gate.errors_of(windowed(), Ungated).values()) < 1e-5
    monkeypatch.setattr(*MISTAKES[name])
    assert max(gate.errors_of(windowed(), Ungated).values()) > 1e-2


@pytest.mark.parametrize("kind", [Shifted, Stateful])
def test_a_model_that_is_wrong_is_seen(kind):
    assert gate.errors_of(windowed(), kind)[gate.BLOCKS] > 1e-2


def test_what_a_hook_does_with_the_end_of_a_block_is_refused_and_what_it_does_with_each_token_is_not():
    model = helpers.tiny(seed=31).model
    hook = model.gpt_neox.layers[1].register_forward_hook(lambda module, given, output: output + torch.arange(32) / 9)
    steered = CachedModel(model)
    assert steered.score(torch.tensor([[5, 9]])) is not None
    hook.remove()

    def last_alone(module, given, output):
        output = output.clone()
        output[:, -1] += torch.arange(32) / 9
        return output

    model.gpt_neox.layers[1].register_forward_hook(last_alone)
    with refused("are not supported"):
        CachedModel(model)


# What is kept from one process to the next.


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "cache_folder", lambda: tmp_path / "new")
    gate.kept_verdicts.cache_clear()
    yield tmp_path / "new" / "decodedRight.jsonl"
    gate.kept_verdicts.cache_clear()


def test_a_kind_is_computed_once_for_a_configuration_and_in_one_thread(kept, monkeypatch):
    config, count, threads = MistralConfig(), [], []
    computed, set_threads = gate.errors_of, torch.set_num_threads
    monkeypatch.setattr(gate, "errors_of", lambda *given: count.append(1) or computed(*given))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: threads.append(n) or set_threads(n))
    for _ in range(2):
        check_kind(config, MistralForCausalLM)
    gate.kept_verdicts.cache_clear()  # as in a new process
    check_kind(config, MistralForCausalLM)
    config.name_or_path = "elsewhere"
    check_kind(config, MistralForCausalLM)
    assert len(count) == 1 and len(kept.read_text().splitlines()) == 1 and threads == [1, torch.get_num_threads()]
    check_kind(MistralConfig(sliding_window=8), MistralForCausalLM)
    assert len(count) == 2


def test_a_line_that_was_cut_short_is_computed_again(kept):
    check_kind(MistralConfig(), MistralForCausalLM)
    key, trees = json.loads(kept.read_text())
    for line in (f'["{key}"', f'["{key}", 1]', "[]", "{}", "\0"):
        kept.write_text(line + "\n")
        gate.kept_verdicts.cache_clear()
        assert gate.kept_verdicts() == {}
        check_kind(MistralConfig(), MistralForCausalLM)
        assert gate.kept_verdicts() == {key: trees}


def test_where_nothing_can_be_kept_it_is_computed_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(gate, "cache_folder", lambda: tmp_path / "file")
    gate.kept_verdicts.cache_clear()
    check_kind(MistralConfig(), MistralForCausalLM)
    gate.kept_verdicts.cache_clear()


def test_longrope_ends_a_text_at_its_original_length():
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model = helpers.tiny("llama", rope_parameters=rope)
    assert model.context == 32
    with refused("exceed the context"):
        regrSampling([[5, 9]], model, 31, GREEDY)


# Random configurations of the kinds that are compiled: see test_cpuModel.py.


ROPES = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "yarn": {"original_max_position_embeddings": 64},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
ACTIVATIONS = st.sampled_from(["silu", "gelu", "relu", "gelu_new", "quick_gelu"])
WINDOWED = {"sliding_window": st.just(16), "max_window_layers": st.sampled_from([0, 1, 9])}
WINDOWED |= {"use_sliding_window": st.booleans()}
# {kind: {what is drawn of its configuration: from what}}, beside sizes, heads and the rotary embedding.
DRAWN = {
    "llama": {"attention_bias": st.booleans(), "mlp_bias": st.booleans(), "hidden_act": ACTIVATIONS},
    "mistral": {"sliding_window": st.sampled_from([None, 16, 40, 4096]), "hidden_act": ACTIVATIONS},
    "qwen2": WINDOWED,
    "qwen3": WINDOWED,
    "gpt_neox": {"use_parallel_residual": st.booleans(), "attention_bias": st.booleans(), "hidden_act": ACTIVATIONS},
    "gpt2": {"scale_attn_by_inverse_layer_idx": st.booleans(), "scale_attn_weights": st.booleans()},
    "opt": {"do_layer_norm_before": st.booleans(), "enable_bias": st.booleans(), "ffn_dim": st.sampled_from([32, 64])},
}


@st.composite
def configurations(draw):
    """A configuration of a type that compiles: odd numbers of heads, odd widths, windows, every rotary embedding."""
    kind, d, heads = (
        draw(st.sampled_from(sorted(DRAWN))),
        draw(st.sampled_from([8, 10, 16, 40])),
        draw(st.integers(1, 4)),
    )
    rope = draw(st.sampled_from(sorted(ROPES)))
    part = {"partial_rotary_factor": draw(st.sampled_from([0.5, 1.0]))} if kind == "gpt_neox" else {}
    chosen = {
        "rope_parameters": {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, **ROPES[rope], **part},
        "num_key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        "intermediate_size": draw(st.sampled_from([32, 48, 50])),
        "head_dim": d,
    }
    chosen |= {name: draw(values) for name, values in DRAWN[kind].items()}
    sizes = {"hidden_size": heads * d, "num_attention_heads": heads, "num_hidden_layers": draw(st.integers(1, 3))}
    known = CONFIG_MAPPING[kind]().to_dict()
    return CONFIG_MAPPING[kind](
        **{name: value for name, value in chosen.items() if name in known},
        **sizes,
        vocab_size=61,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=draw(st.booleans()),
    )


@drawing(max_examples=1000 if helpers.FULL else 12, deadline=None)
@given(config=configurations())
def test_any_configuration_of_a_compiled_kind_is_right_eager_and_compiled(config):
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
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


EVERY = MODEL_FOR_CAUSAL_LM_MAPPING if helpers.FULL else []  # FULL=1 asks for every kind of transformers: minutes.


@pytest.mark.parametrize("config", EVERY, ids=lambda config: config.model_type)
def test_every_kind_is_right_or_refused(config):
    assert zoo.verdict(config)[0] in ("right", "refused", "unmade")
