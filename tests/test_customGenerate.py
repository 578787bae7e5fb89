"""Speculative sampling inside `generate` of transformers: the same greedy texts, the same distributions, the same
arguments, or a ValueError that names what is not honoured."""

import copy
import gc
import re
import sys
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import helpers
import pytest
import torch
import zoo
from conftest import ROOT
from localHub import Repository
from mistakes import always_accept
from outcomes import largest_error, small
from test_head import network_for
from test_specSampling import near
from torch.nn.utils import prune
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GPTNeoXForCausalLM,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from decoding.lengthRules import Additive, DraftConfidence
from decoding.verification import RULES
from engine.cachedModel import CachedModel
from engine.copies import Copies
from engine.head import save_head
from engine.sharedWeights import kept_copy
from engine.smallTwin import small_twin
from methods import customGenerate
from methods.customGenerate import speculative
from scripts import packGenerate
from utils import Sampling

ROWS = [[5, 9, 2, 7], [3, 3, 8, 1, 40, 22, 17, 60, 2], [11]]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FREE = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}


def plain(model):
    """A model as a user has it: with the attention of transformers."""
    model.set_attn_implementation("sdpa")
    return model


def tiny(family="gpt_neox", **how):
    return plain(helpers.tiny(family, **how).model)


def greedy(model, custom=None, rows=ROWS, **how):
    """What `generate` returns, by `custom` or by its own loop."""
    inputs = helpers.left_padded(rows) | GREEDY | {"max_new_tokens": 20}
    return model.generate(**inputs | how, custom_generate=custom)


def short(model, custom):
    """The same of two short texts, as lists."""
    return equal(model, custom, rows=ROWS[:2], max_new_tokens=10).sequences.tolist()


def equal(model, custom, **how):
    """What `generate` returns by `custom`: its greedy texts must be those of `generate` alone."""
    ours = greedy(model, custom, **how, return_dict_in_generate=True)
    assert ours.sequences.tolist() == greedy(model, **how).tolist()
    return ours


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def draft():
    """It agrees with the target often, but not always."""
    return plain(near(helpers.tiny()).model)


# Greedy texts.


OTHERS = "gptj", "codegen", "xglm", "falcon", "gemma2", "mistral", "roberta", "gemma3"


@pytest.mark.parametrize("kind", [*helpers.FAMILIES, *OTHERS])
def test_greedy_texts_are_those_of_generate_alone(kind):
    """Also of models of other kinds that the gate lets in. RoBERTa counts positions from another one by itself, and of
    Gemma 3 `generate` prepares an empty input for pictures."""
    config = zoo.config_of(CONFIG_MAPPING[kind])
    model = small_twin(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        weight = noisy.get_output_embeddings().weight
        weight.add_(torch.randn_like(weight) / 40)
    equal(model, speculative(noisy), rows=[(torch.arange(3, 40) % 96).tolist()], max_new_tokens=24)
    if kind in helpers.FAMILIES:
        model, guesser = tiny(kind), tiny(kind, seed=1, layers=1)
        equal(model, speculative(guesser, 3, verify="block"), rows=ROWS[:1])
        equal(model, speculative(guesser, 3))


def test_rounds_of_every_kind_take_place_with_a_draft_that_is_often_right(target, draft):
    output = equal(target, speculative(draft), max_new_tokens=40)
    accepted = {count for record in output.records for count in record.accepted}
    assert 0 in accepted and max(accepted) == 4


class AfterSum(StoppingCriteria):
    """A row ends when the sum of its tokens is a multiple of 5: this is decided in the middle of rounds, too."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) % 5 == 0


class AfterOdd(MaxLengthCriteria):
    """One of the user's own, derived from transformers'."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 4 == 3


@pytest.mark.parametrize(
    "how",
    [
        {"max_length": 21},  # of the padded prompt and the new tokens, for all rows
        {"max_length": 10},  # one new token
        {"ends": 1},
        {"ends": 3},
        {"ends": 1, "pad_token_id": 7, "stopping_criteria": [AfterSum()]},
        {"ends": 1, "pad_token_id": 7, "stopping_criteria": [AfterOdd(99)]},
        {"stopping_criteria": [MaxLengthCriteria(25), MaxLengthCriteria(18)]},
        {"repetition_penalty": 1.5},
        {"max_time": 0.0, "max_new_tokens": 1},
        {"num_return_sequences": 1, "max_new_tokens": 7, "temperature": 0.3, "top_k": 7},  # do_sample decides
    ],
    ids=", ".join,
)
def test_rows_end_where_those_of_generate_alone_end(target, draft, how):
    how = {"max_new_tokens": None if "max_length" in how else 30} | how
    if ends := how.pop("ends", 0):  # so many ids that the texts have
        text = greedy(target, max_new_tokens=30)[:, 9:]
        ids = [text[0, 8].item(), text[1, 15].item(), text[2, 3].item()]
        how["eos_token_id"] = ids[:ends] if ends > 1 else ids[0]
    equal(target, speculative(draft), **how)


def test_other_prompts_and_rules(target, draft):
    """A prompt without a mask, whose zeros transformers takes for padding; a rule that chooses the number of guesses;
    a window of attention that texts outgrow; and a draft whose vocabulary is padded to another size."""
    equal(target, speculative(draft), input_ids=torch.tensor([[0, 0, 5, 9], [1, 2, 3, 4]]), attention_mask=None)
    equal(target, speculative(draft, DraftConfidence(6, 0.4)), max_new_tokens=30)
    equal(tiny("mistral", sliding_window=8, layers=1), speculative(draft), rows=ROWS[:1], max_new_tokens=30)
    equal(target, speculative(WIDER, vocabulary=61))


# Distributions.


def error(prefixes=((1, 2, 0, 1, 2), (1,)), sampling=Sampling(1.0, 0, 1.0), length=4, vocabulary=3, **arguments):
    """The largest difference between the probability of a text that `generate` draws and the target's."""
    reference, small_draft = small(2, vocabulary)
    model, guesser = plain(reference.model), plain(small_draft.model)

    def sample(rows):
        inputs = helpers.left_padded(rows) | FREE | {"max_new_tokens": length} | arguments
        texts = model.generate(**inputs, custom_generate=speculative(guesser, 2))
        return texts[:, inputs["input_ids"].shape[1] :].tolist()

    return largest_error(sample, reference, length, sampling, prefixes=prefixes)


def test_texts_have_the_targets_probabilities():
    assert error(vocabulary=2) < 1e-6
    filters = {"repetition_penalty": 1.5, "top_p": 0.95}
    assert error(((1, 0, 0, 1), (1,)), Sampling(1.0, 0, 0.95, 1.5), vocabulary=2, **filters) < 1e-6


@pytest.mark.parametrize("mistake", ["accepts all", "reads padding", "loses a filter"])
def test_a_planted_mistake_is_caught(monkeypatch, mistake):
    if mistake == "accepts all":
        monkeypatch.setitem(RULES, "token", always_accept)
    elif mistake == "reads padding":
        monkeypatch.setattr(customGenerate, "unpadded", lambda ids, inputs: (ids.tolist(), (ids < 0).sum(1)))
    else:
        monkeypatch.setattr(customGenerate, "as_sampling", lambda *given: Sampling(1.0, 0, 1.0))
    filters = {"top_k": 2} if mistake == "loses a filter" else {}
    assert error(sampling=Sampling(1.0, filters.get("top_k", 0), 1.0), length=3, **filters) > 1e-2


@pytest.mark.parametrize("how", [{"verify": "block"}, {"draft": None}], ids=str)
def test_many_texts_of_one_prompt_are_distributed_as_the_targets(how):
    """With the random numbers of a run instead of every outcome. Without a draft the model's own copy guesses."""
    reference, small_draft = small(2, 5)
    torch.manual_seed(0)
    arguments = FREE | {"top_k": 4, "temperature": 0.9, "max_new_tokens": 3, "num_return_sequences": helpers.DRAWS // 2}
    custom = speculative(**{"draft": plain(small_draft.model), "gamma": 3} | how)
    texts = plain(reference.model).generate(torch.tensor([[1, 2]]), **arguments, custom_generate=custom)[:, 2:]
    joint = helpers.joint_distribution(reference, [1, 2], 3, Sampling(0.9, 4, 1.0))
    assert helpers.chi_square(texts, joint, 5) > 1e-4
    texts[: len(texts) // 50, 1] = 1
    assert helpers.chi_square(texts, joint, 5) < 1e-6


def test_a_seed_repeats_a_text(target, draft):
    def texts(seed):
        torch.manual_seed(seed)
        how = FREE | {"max_new_tokens": 12, "num_return_sequences": 4}
        return target.generate(torch.tensor([[5, 9]]), **how, custom_generate=speculative(draft)).tolist()

    assert texts(3) == texts(3) != texts(4)
    assert len(set(map(tuple, texts(3)))) == 4 and len(texts(3)[0]) == 14


# The models of the user.


def counted(monkeypatch):
    """The bits of each set of codes that is loaded from now on."""
    seen, of = [], Copies.of
    monkeypatch.setattr(Copies, "of", lambda self, bits, target: (seen.append(bits), of(self, bits, target))[1])
    return seen


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_no_model_is_changed_and_a_copy_is_made_once(family, monkeypatch, tmp_path):
    models = model, guesser = tiny(family, seed=7), tiny(family, seed=1)
    save_head(network_for(CachedModel(tiny(family, seed=7))), tmp_path, "a version", {})
    made, alone = counted(monkeypatch), greedy(model).tolist()

    def states():
        configs = [(repr(each.config), repr(each.generation_config), set(vars(each))) for each in models]
        return configs, [(id(x), x.requires_grad, x.dtype) for each in models for x in each.parameters()]

    before = states()
    model.train()
    copies = [speculative(), *(speculative(bits=b, verify="block") for b in (4, 6, 6))]
    for custom in (speculative(guesser), speculative(tmp_path), *copies):
        for rows in ROWS, ROWS[1:2]:
            records = equal(model, custom, rows=rows).records
            assert custom.draft or max(record.alpha for record in records) > 0.5
            assert all(sum(record.drafted) > 0 for record in records)
    assert all(module.training for module in model.modules()) and made == [4, 6]
    model.eval()
    assert states() == before and model.config._attn_implementation == guesser.config._attn_implementation == "sdpa"
    assert greedy(model).tolist() == alone
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not a head for the model"):
        greedy(model, speculative(str(tmp_path)))


@pytest.mark.parametrize("own_copy", [False, True])
def test_the_twin_or_copy_of_a_model_is_kept_and_follows_it_and_a_dead_one_leaves_none(draft, monkeypatch, own_copy):
    model, custom, made = tiny(seed=5), speculative(None if own_copy else draft), counted(monkeypatch)
    ours, first = equal(model, custom).sequences, kept_copy(model)
    assert kept_copy(model) is first
    if not own_copy:  # A copy is not computed again where weights change in place.
        with torch.no_grad():
            model.get_output_embeddings().weight.neg_()
        ours, before = equal(model, custom).sequences, ours
        assert not torch.equal(ours, before) and kept_copy(model) is first
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(draft.get_input_embeddings().weight.flip(0)))
    assert not torch.equal(equal(model, custom).sequences, ours)
    assert kept_copy(model) is not first and made == [4, 4] * own_copy
    copies, gone = len(customGenerate._COPIES), weakref.ref(model)
    del model, first
    gc.collect()
    assert gone() is None and (len(customGenerate._COPIES) < copies or not own_copy)


def test_calls_at_the_same_time_do_not_disturb_each_other(target, draft):
    custom, batches = speculative(draft, Additive(4)), [ROWS[:1], ROWS, ROWS[1:2], ROWS]
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(lambda rows: greedy(target, custom, rows=rows, max_new_tokens=30).tolist(), batches))
    assert texts == [greedy(target, rows=rows, max_new_tokens=30).tolist() for rows in batches]


def test_a_call_from_another_thread_than_that_of_generate_is_refused(target, draft):
    """The streamer and the other arguments that transformers hands on to no callable would be ignored."""

    def elsewhere(*given, **how):
        with ThreadPoolExecutor() as pool:
            return pool.submit(speculative(draft), *given, **how).result()

    with pytest.raises(ValueError, match="another thread than that of `generate`"):
        greedy(target, elsewhere, rows=ROWS[:1], streamer=Heard())


def test_an_output_layer_with_more_tokens_than_the_configuration_is_refused(draft):
    model = tiny(seed=5)
    model.set_output_embeddings(torch.nn.Linear(32, 80, bias=False))
    with pytest.raises(ValueError, match="gives 80 logits, and its configuration has 61 tokens"):
        greedy(model, speculative(draft))
    equal(tiny(seed=5), speculative(draft))


def test_hooks_and_replaced_forwards_are_followed_or_refused(draft):
    model, custom = tiny(seed=6), speculative(draft)
    text = lambda: short(model, custom)  # noqa: E731
    vector = torch.linspace(-2, 2, 32)  # that is added to each token's hidden state; it may change between two calls
    plain_text = text()
    hook = model.gpt_neox.layers[0].register_forward_hook(lambda module, given, output: output + vector)
    steered = text()
    vector.neg_()
    assert plain_text != steered != text()
    hook.remove()
    assert text() == plain_text
    change, texts = lambda module, given, *output: (output or given)[0] * 2 - 1, []
    for register in "register_forward_hook", "register_forward_pre_hook":
        for layer in model.gpt_neox.layers:
            hook = getattr(layer.mlp, register)(change)
            texts.append(text())
            hook.remove()
    assert len(set(map(str, texts))) == 4
    layer = model.gpt_neox.layers[1].mlp
    layer.forward = lambda x: 0.5 * type(layer).forward(layer, x)
    assert text() != plain_text
    layer.forward = lambda x: x.flip(1)
    with pytest.raises(ValueError, match="a forward that its class does not have"):
        greedy(model, custom)


def test_a_setting_that_changes_between_two_calls_is_followed(draft):
    model, custom, texts = tiny("llama", seed=6), speculative(tiny("llama", seed=7)), []
    for change in (
        lambda layer: None,
        lambda layer: setattr(layer.mlp, "act_fn", torch.nn.ReLU()),
        lambda layer: setattr(layer.self_attn, "scaling", 3 * layer.self_attn.scaling),
        lambda layer: prune.random_unstructured(layer.mlp.down_proj, "weight", 0.8),
    ):
        for layer in model.model.layers:
            change(layer)
        texts.append(short(model, custom))
    assert texts[0] != texts[1] != texts[2] != texts[3]


class Steerer:
    """An object of the user's, whose method a module keeps."""

    def __init__(self, x):
        self.x = x

    def read(self):
        return self.x


KEPT = {  # {what a module keeps a tensor in: (how it does, how it is read)}
    "itself": (lambda x: x, lambda kept: kept),
    "list": (lambda x: [x], lambda kept: kept[0]),
    "tuple": (lambda x: (1, x), lambda kept: kept[1]),
    "dict": (lambda x: {"x": x}, lambda kept: kept["x"]),
    "object": (lambda x: SimpleNamespace(x=x), lambda kept: kept.x),
    "deque": (lambda x: deque([x]), lambda kept: kept[0]),
    "partial": (lambda x: partial(torch.clone, x), lambda kept: kept()),
    "method": (lambda x: Steerer(x).read, lambda kept: kept()),
}


class Steered(torch.nn.Module):
    """A module of the user's. What it adds is neither a parameter nor a buffer nor a number."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x):
        return self.inner(x) + KEPT[self.kind][1](self.kept)


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_module_keeps_may_change_between_two_calls(draft, kind):
    model, custom, vector, texts = tiny(seed=6), speculative(draft), torch.linspace(-2, 2, 32), set()
    layer = model.gpt_neox.layers[0]
    layer.mlp = Steered(layer.mlp, kind)
    for kept in vector, -vector, (other := vector.square()):
        layer.mlp.kept = KEPT[kind][0](kept)
        texts.add(str(short(model, custom)))
    other.neg_()
    texts.add(str(short(model, custom)))
    assert len(texts) == 4
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match="has an attribute that cannot be copied"):
        short(model, custom)


def test_a_model_that_prepares_its_inputs_itself_is_refused(draft):
    class Prompted(GPTNeoXForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **options):
            return super().prepare_inputs_for_generation(input_ids, attention_mask=attention_mask, **options)

    base = tiny(seed=6)
    model = Prompted(base.config)
    for each in model, base:
        if each is base:  # as PEFT does while a trained prompt is in use
            base.prepare_inputs_for_generation = model.prepare_inputs_for_generation
        with pytest.raises(ValueError, match="prepares its inputs in its own way"):
            greedy(each, speculative(draft))


# Streamers.


class Heard(list):
    """A streamer that keeps what it is given."""

    def put(self, value):
        self.append(value.tolist())

    def end(self):
        self.append("end")


@pytest.mark.parametrize("within", [lambda custom: custom, lambda custom: lambda *given, **how: custom(*given, **how)])
def test_a_streamer_hears_the_prompt_each_round_and_the_end(target, draft, within):
    """Also if a function of the user's calls the sampler."""
    ours, theirs = Heard(), Heard()
    greedy(target, within(speculative(draft)), rows=ROWS[:1], max_new_tokens=12, streamer=ours)
    greedy(target, rows=ROWS[:1], max_new_tokens=12, streamer=theirs)
    (prompt, *rounds, end), (theirs_prompt, *tokens, theirs_end) = ours, theirs
    assert (prompt, end) == (theirs_prompt, theirs_end) and sum(rounds, []) == sum(tokens, [])
    assert len(rounds) < len(tokens) == 12


# What cannot be honoured.

LEFT_PADDED = torch.tensor([[0, 1, 1, 1]])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_beams": 2}, "the generation mode beam_search"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"past_key_values": DynamicCache()}, "past_key_values of your own"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
        ({"min_new_tokens": 3, "eos_token_id": 1}, "MinLengthLogitsProcessor"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper"),
        (
            {"logits_processor": [TopPLogitsWarper(0.9)], "do_sample": True, "temperature": 0.5, "top_k": 0},
            "in the order TopPLogitsWarper, TemperatureLogitsWarper",
        ),
        ({"logits_processor": [TopPLogitsWarper(0.9, min_tokens_to_keep=3)]}, "min_tokens_to_keep"),
        (
            {
                "logits_processor": [RepetitionPenaltyLogitsProcessor(3.0)],
                "attention_mask": torch.tensor([[0, 1, 1, 1]]),
            },
            "a prompt_ignore_length other than the padding",
        ),
        ({"logits_processor": [TemperatureLogitsWarper(1e-6)], "do_sample": True}, "temperature must be 0"),
        ({"position_ids": torch.arange(4)[None] + 3}, "position_ids of your own"),
        ({"attention_mask": torch.ones(1, 9)}, "position_ids of your own"),
        ({"input_ids": torch.tensor([[5.5, 9.0]])}, "input_ids in torch.float32"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "pad on the left"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"assistant_model": tiny()}, "the generation mode assisted_generation"),
        ({"streamer": Heard(), "input_ids": torch.tensor([[5], [9]])}, "a streamer for a batch of 2 rows"),
        (
            {"stopping_criteria": [AfterSum()], "input_ids": torch.tensor([[5], [9]]), "pad_token_id": None},
            "stopping_criteria for a batch without a pad_token_id",
        ),
        ({"max_new_tokens": 200}, "max_new_tokens 200 exceed the context of the"),
        ({"input_ids": torch.tensor([[5, 99]])}, "a token id outside the models' vocabulary of 61"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(target, draft, arguments, words):
    with pytest.raises(ValueError) as refused:
        greedy(target, speculative(draft), **{"input_ids": torch.tensor([ROWS[0]]), "attention_mask": None} | arguments)
    assert words in str(refused.value) and "\n" not in str(refused.value)


T5 = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2)
ADAPTED, WIDER = tiny(), tiny(seed=1, vocabulary=64)
ADAPTED.peft_config = {"default": None}


@pytest.mark.parametrize(
    "how, words",
    [
        ({"gamma": 0}, "gamma must be a whole number of at least 1"),
        ({"gamma": 2.5}, "gamma must be a whole number or a rule"),
        ({"verify": "blocks"}, f"verify must be one of {', '.join(RULES)}, not 'blocks'"),
        ({"draft": "gpt2"}, "a transformers model or a head's folder, not 'gpt2'"),
        ({"bits": 7}, "bits must be one of 4, 5, 6, 8, not 7"),
        ({"vocabulary": 62}, r"vocabulary must lie in \[1, 61\]"),
        ({"draft": T5ForConditionalGeneration(T5)}, "models of type t5 are not supported: it is an encoder with a"),
        ({"draft": ADAPTED}, "a draft with adapters"),
        ({"draft": WIDER}, "61 entries and the draft's 64: they must share one tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_cannot_be_honoured_are_refused(target, draft, how, words):
    with pytest.raises(ValueError, match=words):
        greedy(target, speculative(**{"draft": draft} | how))


# The folder.


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """Where transformers keeps the code that it loads: a folder of this test."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path / "modules"
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def test_the_projects_folder_is_loaded_by_its_path(target, draft, modules):
    loaded = {"custom": str(ROOT), "trust_remote_code": True}
    alone = greedy(target).tolist()
    assert greedy(target, **loaded, assistant_model=draft, gamma=3, verify="block").tolist() == alone
    assert greedy(target, **loaded, bits=8).tolist() == alone
    for name, words in ("assistant_tokenizer", "assistant_tokenizer"), ("num_beams", "the generation mode beam_search"):
        with pytest.raises(ValueError, match=f"does not support {words}"):
            greedy(target, **loaded, assistant_model=draft, **{name: 2})


def test_a_packed_folder_is_loaded_by_its_path_and_from_the_hub(target, draft, modules, hub, tmp_path, monkeypatch):
    assert packGenerate.main([str(tmp_path / "packed")]) == 0
    folder = tmp_path / "packed" / "custom_generate"
    own = {file.stem for file in ROOT.glob("*.py")} | {file.parent.name for file in ROOT.glob("*/__init__.py")}
    for file in folder.glob("*.py"):
        assert not re.search(rf"^ *(import|from) ({'|'.join(own)})\b", file.read_text(), re.M), file
    hub.models["some/speculative"] = Repository(
        {f"custom_generate/{file.name}": file.read_bytes() for file in folder.iterdir()}
    )
    alone = greedy(target, rows=ROWS[:1]).tolist()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "copies"))
    for place in (str(tmp_path / "packed"), "some/speculative"):
        how = {"custom": place, "trust_remote_code": True, "rows": ROWS[:1]}
        assert greedy(target, **how, bits=8).tolist() == alone
        assert [file.name for file in tmp_path.glob("copies/copies-*/*")] == ["8"]
        streamer = Heard()
        assert greedy(target, **how, assistant_model=draft, streamer=streamer).tolist() == alone
        assert streamer[-1] == "end"
    loaded = {str(module.__file__) for name, module in sys.modules.items() if name.endswith(".customGenerate")}
    assert sum(file.startswith(str(modules)) for file in loaded) == 2  # the copies, not the project's own


def test_a_model_that_comes_with_the_folder_uses_it(draft, modules, tmp_path, capsys, monkeypatch):
    tiny().save_pretrained(tmp_path / "model")
    assert packGenerate.main([str(tmp_path / "model")]) == 0
    assert packGenerate.main([str(tmp_path / "model")]) == 2  # It overwrites nothing.
    assert "exists already; name another folder" in capsys.readouterr().err

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packGenerate.shutil, "copy", full)
    assert packGenerate.main([str(tmp_path / "full")]) == 2
    assert "No space left on device. Nothing was written." in capsys.readouterr().err
    assert not (tmp_path / "full" / "custom_generate").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    prompt, how = torch.tensor([ROWS[0]]), GREEDY | {"max_new_tokens": 20}
    ours = model.generate(prompt, **how, assistant_model=draft, return_dict_in_generate=True)
    assert ours.records[0].alpha > 0.2
    assert ours.sequences.tolist() == type(model).generate(model, prompt, **how).tolist()


def test_every_setting_that_is_refused_is_one_of_transformers():
    """A name that transformers has dropped would be checked for nothing."""
    assert set(customGenerate.HONOURED) <= set(vars(GenerationConfig()))
