"""Small twins: the class and the configuration of a model, with small sizes."""

from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from engine.cachedModel import context_of
from engine.smallTwin import small_twin


def test_windows_of_a_twin_are_small_and_its_context_is_not():
    config = small_twin(MistralConfig(sliding_window=4096), MistralForCausalLM).config
    assert config.sliding_window == 16 and config.max_position_embeddings == context_of(config) == 128


def test_a_twin_has_layers_of_each_kind():
    config = small_twin(Gemma3TextConfig(), Gemma3ForCausalLM).config
    assert set(config.layer_types) == {"sliding_attention", "full_attention"} and config.num_hidden_layers <= 8


def test_heads_of_keys_are_shared_as_they_were():
    for heads, groups, of_twin in ((32, 32, 4), (32, 8, 2), (32, 1, 1), (3, 3, 4)):
        sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 16 * heads}
        assert small_twin(LlamaConfig(**sizes), LlamaForCausalLM).config.num_key_value_heads == of_twin


def test_the_configuration_stays_as_it_was_and_a_twin_is_always_the_same():
    config = LlamaConfig()
    before = config.to_dict()
    one, other = (small_twin(config, LlamaForCausalLM).lm_head.weight for _ in range(2))
    assert config.to_dict() == before and bool((one == other).all())
