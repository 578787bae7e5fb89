"""downloadModel.py --gguf: a tiny GGUF file, written here, becomes a model folder; what cannot is refused."""

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from downloads import assert_error, download, limit_disk
from safetensors import SafetensorError
from tokenizerKinds import byte_level, sentence_piece
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

import downloadModel
from inputs.manifest import Manifest
from inputs.models import find_model, load_model
from inputs.tokenizers import load_tokenizer

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping", reason="transformers is older than 5.18")
from inputs import gguf as converter  # noqa: E402

HEADS, GROUPS, SIZE, VOCABULARY, LAYERS, WIDTH, INNER = 4, 2, 16, 300, 2, 64, 96
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
NAMES = {f"model.layers.{i}.{name}": f"blk.{i}.{part}" for i in range(LAYERS) for part, name in PARTS.items()}
NAMES |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64, "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "initializer_range": 0.3,
}  # fmt: skip
METADATA = {
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": GROUPS,
    "llama.attention.layer_norm_rms_epsilon": 1e-4,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": SIZE,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}


@pytest.fixture(scope="module")
def model():
    """A random model of Llama's kind with grouped heads, in float32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """A function that writes the model as a GGUF file, with changes: `metadata` (None removes an entry), `tensors`
    (`{name: function of the array}`; None leaves it out), the kind of the matrices, another model. Returns the file."""
    tokenizer = byte_level(VOCABULARY - 2, end=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    vocabulary = tokenizer.get_vocab()
    order = sorted(vocabulary, key=lambda token: (token not in SPECIAL, vocabulary[token]))
    path = tmp_path_factory.mktemp("backend") / "tokenizer.json"
    tokenizer.backend_tokenizer.save(str(path))
    merges = [" ".join(pair) for pair in json.loads(path.read_text())["model"]["merges"]]

    def write(path, metadata=None, tensors=None, kind="Q8_0", architecture="llama", model=model):
        writer = gguf.GGUFWriter(path, architecture)
        entries = {"tokenizer.ggml.tokens": order, "tokenizer.ggml.merges": merges}
        entries["tokenizer.ggml.token_type"] = [3 if token in SPECIAL else 1 for token in order]
        for key, value in (METADATA | entries | (metadata or {})).items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
            if value is not None:
                add[type(value)](key.replace("llama.", f"{architecture}."), value)
        for source, weight in model.state_dict().items():
            (source, suffix), values = source.rsplit(".", 1), weight.numpy()
            name = NAMES[source]
            if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
                heads = values.shape[0] // SIZE
                values = values.reshape(heads, 2, SIZE // 2, WIDTH).swapaxes(1, 2).reshape(values.shape)
            values = (tensors or {}).get(name, np.ascontiguousarray)(values)
            if values is not None:
                stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
                content = gguf.quants.quantize(np.ascontiguousarray(values), stored)
                writer.add_tensor(f"{name}.{suffix}", content, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


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


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_the_folder_has_the_weights_of_the_file_in_bfloat16(model, written, models_folder, tmp_path, capsys, kind):
    file = written(tmp_path / "tiny.gguf", kind=kind)
    assert download("tiny", "--gguf", str(file)) == 0
    assert f"tiny: {kind} (100%), written as bfloat16" in capsys.readouterr().out
    assert folders(models_folder) == ["tiny"]
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    assert copy.dtype == torch.bfloat16 and copy.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(logits_of(copy.float()), logits_of(rounded(model, kind)))


@pytest.mark.parametrize(
    "architecture, kind, heads", [("qwen2", Qwen2ForCausalLM, SIZE), ("qwen3", Qwen3ForCausalLM, 24)]
)
def test_biases_and_norms_of_heads_have_their_places(written, models_folder, tmp_path, architecture, kind, heads):
    """Qwen2's queries, keys and values have biases; Qwen3's heads have norms, and a size that is not width / heads."""
    torch.manual_seed(1)
    model = kind(kind.config_class(**CONFIG, **({"head_dim": heads} if architecture == "qwen3" else {}))).eval()
    for weight in model.parameters():  # Norms of 1 and biases of 0 would hide that one is in the other's place.
        if weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    metadata = {"llama.attention.key_length": heads, "llama.rope.dimension_count": heads}
    file = written(tmp_path / "tiny.gguf", metadata, architecture=architecture, model=model)
    assert download("tiny", "--gguf", str(file)) == 0
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    assert type(copy) is kind and torch.equal(logits_of(copy.float()), logits_of(rounded(model, "Q8_0")))


def test_heads_in_the_order_of_llama_cpp_would_be_seen(model, file, models_folder, monkeypatch):
    monkeypatch.setattr("transformers.modeling_gguf_pytorch_utils.TENSOR_PROCESSORS", {})
    assert download("tiny", "--gguf", str(file)) == 0
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    assert not torch.allclose(logits_of(copy.float()), logits_of(rounded(model, "Q8_0")), atol=0.1)


def test_the_tokenizer_its_template_and_the_ends_of_a_text_are_those_of_the_file(file, models_folder):
    assert download("tiny", "--gguf", str(file)) == 0
    folder = find_model("tiny")
    tokenizer = load_tokenizer(folder)
    text = "The lamp was lit in 1987,  and\nnobody had heard."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < VOCABULARY and len(tokenizer) == VOCABULARY
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1987")] == list("1987")  # as SmolLM's
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>Hi<|im_end|>\n" and tokenizer.encode(chat)[0] == 1
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [0, 2]
    assert load_model(folder, tokenizer, "float32", "cpu").score(torch.tensor([ids])).isfinite().all()


def test_a_sentencepiece_tokenizer_is_read(written, models_folder, tmp_path):
    vocabulary = sentence_piece(VOCABULARY).get_vocab()
    tokens = [token for token in sorted(vocabulary, key=vocabulary.get) if token[:4] not in ("<0x8", "<0x9")]
    types = [2, 3, 3, *(6 if token.startswith("<0x") else 1 for token in tokens[3:])]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.chat_template": None,
        "tokenizer.ggml.merges": None, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    assert download("tiny", "--gguf", str(written(tmp_path / "tiny.gguf", metadata))) == 0
    tokenizer = AutoTokenizer.from_pretrained(models_folder / "tiny")
    ids = tokenizer.encode("the lamp")
    assert ids[0] == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "the lamp"


def test_unknown_rules_of_words_are_said(written, models_folder, tmp_path, capsys):
    file = written(tmp_path / "tiny.gguf", {"tokenizer.ggml.pre": "new\x1b[31m"})
    assert download("tiny", "--gguf", str(file)) == 0
    assert "new\\x1b[31m is unknown" in capsys.readouterr().out


def test_keys_that_change_nothing_are_taken(written, models_folder, tmp_path):
    harmless = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0, "attention.sliding_window": 64}
    file = written(tmp_path / "tiny.gguf", {f"llama.{key}": value for key, value in harmless.items()})
    assert download("tiny", "--gguf", str(file)) == 0


def test_rules_of_words_of_another_architecture_are_said(written, models_folder, tmp_path, capsys):
    about = {"general.architecture": "qwen2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}
    tokenizer = byte_level(VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converter.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
        converter.read_tokenizer(tmp_path, about)
        assert "llama-bpe is unknown for such a model" in capsys.readouterr().out
        converter.read_tokenizer(tmp_path, about | {"tokenizer.ggml.pre": "qwen2"})
        assert capsys.readouterr().out == ""


def test_a_chat_models_text_ends_at_the_end_of_a_text_too():
    tokenizer = byte_level(VOCABULARY, end="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    text, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    for eos, ends in (turn, [turn, text]), (text, [text]):
        about = {"tokenizer.ggml.eos_token_id": eos}
        assert converter.generation_config(LlamaConfig(), tokenizer, about).eos_token_id == ends


def test_tied_embeddings_and_several_kinds(written, models_folder, tmp_path, capsys):
    assert download("tiny", "--gguf", str(written(tmp_path / "tiny.gguf", tensors={"output": lambda _: None}))) == 0
    copy = AutoModelForCausalLM.from_pretrained(models_folder / "tiny")
    assert copy.config.tie_word_embeddings and copy.lm_head.weight is copy.model.embed_tokens.weight


def test_the_manifest_says_where_it_came_from_and_a_second_run_writes_nothing(file, models_folder, capsys):
    assert download("tiny", "--gguf", str(file)) == 0
    manifest = Manifest.read(models_folder / "tiny")
    assert manifest.repo == "tiny.gguf" and manifest.revision == "Q8_0 (100%)"
    assert {path.stat().st_mode & 0o777 for path in (models_folder / "tiny").iterdir()} == {0o644}
    capsys.readouterr()
    assert download("tiny", "--gguf", str(file)) == 0 and "nothing to convert" in capsys.readouterr().out
    assert download("--list") == 0
    assert "whole        tiny.gguf at Q8_0 (100%)" in capsys.readouterr().out


# What is refused.


def transposed(values):
    return values.T


REFUSED = {
    "another architecture": ({"architecture": "gpt2"}, ("'gpt2'", "llama", "qwen2")),
    "no number of heads": ({"metadata": {"llama.attention.head_count": None}}, ("llama.attention.head_count",)),
    "scaled embeddings": ({"metadata": {"llama.rope.scaling.type": "linear"}}, ("rope.scaling.type (linear)",)),
    "a factor without a type": ({"metadata": {"llama.rope.scaling.factor": 4.0}}, ("rope.scaling.factor (4.0)",)),
    "a window": ({"metadata": {"llama.attention.sliding_window": 16}}, ("attention.sliding_window (16)",)),
    "another scale of attention": ({"metadata": {"llama.attention.scale": 0.5}}, ("attention.scale (0.5)",)),
    "scaled logits": ({"metadata": {"llama.logit_scale": 0.1}}, ("logit_scale (0.1",)),
    "heads rotated in part": ({"metadata": {"llama.rope.dimension_count": 8}}, ("rope.dimension_count (8)",)),
    "no tokens": ({"metadata": {"tokenizer.ggml.tokens": None}}, ("tokenizer", "cannot be read")),
    "no merges": ({"metadata": {"tokenizer.ggml.merges": None}}, ("tokenizer", "cannot be read")),
    "an unknown tokenizer": ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, ("tokenizer", "cannot be read")),
    "fewer layers": ({"metadata": {"llama.block_count": 1}}, ("has 21 weights", "its configuration 12")),
    "more layers": ({"metadata": {"llama.block_count": 3}}, ("has no model.layers.2",)),
    "a wrong shape": ({"tensors": {"blk.1.ffn_down": transposed}}, ("layers.1.mlp.down_proj", "[96, 64]", "[64, 96]")),
    "a missing matrix": ({"tensors": {"blk.0.attn_v": lambda _: None}}, ("has no model.layers.0.self_attn.v_proj",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_no_model_is_refused_and_leaves_nothing(written, models_folder, tmp_path, capsys, case):
    changes, words = REFUSED[case]
    file = written(tmp_path / "tiny.gguf", **changes)
    assert_error(capsys, *words, arguments=("tiny", "--gguf", str(file)))
    assert folders(models_folder) == []


@pytest.mark.parametrize("kept", [10, 200, 20_000, -100])
def test_a_file_that_was_cut_short_is_refused(file, models_folder, capsys, kept):
    file.write_bytes(file.read_bytes()[:kept])
    assert_error(capsys, "is not a complete GGUF file", "again", arguments=("tiny", "--gguf", str(file)))
    assert folders(models_folder) == []


def test_what_is_no_gguf_file_is_refused(models_folder, tmp_path, capsys):
    (tmp_path / "model.gguf").write_text("GGML or something else")
    assert_error(capsys, "is not a GGUF file", arguments=("tiny", "--gguf", str(tmp_path / "model.gguf")))
    for name in "missing.gguf", str(tmp_path / "missing"), str(tmp_path):
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


def test_a_folder_that_is_there_stays(file, written, models_folder, tmp_path, capsys):
    (models_folder / "tiny").mkdir(parents=True)
    (models_folder / "tiny" / "mine").write_text("mine")
    assert_error(capsys, "move it away", arguments=("tiny", "--gguf", str(file)))
    assert (models_folder / "tiny" / "mine").read_text() == "mine" and folders(models_folder) == ["tiny"]
    shutil.rmtree(models_folder / "tiny")
    assert download("tiny", "--gguf", str(file)) == 0
    written(file, kind="Q4_0")
    assert_error(capsys, "move it away", arguments=("tiny", "--gguf", str(file)))
    written(file)
    (models_folder / "tiny" / "config.json").write_text("{}")
    assert_error(capsys, "not a complete", arguments=("tiny", "--gguf", str(file)))


@pytest.mark.parametrize("name", ["../tiny", "owner/tiny", ".tiny", "tiny.incomplete", "a b"])
def test_a_name_that_would_leave_the_folder_is_refused(file, models_folder, capsys, name):
    assert_error(capsys, name, "SmolLM2-135M-Instruct", arguments=(name, "--gguf", str(file)))
    assert folders(models_folder) == []


@pytest.mark.parametrize("more", [[], ["a", "b"], ["a", "--list"], ["a", "--revision", "x"]])
def test_flags_that_do_not_fit_are_refused(file, models_folder, capsys, more):
    assert_error(capsys, "takes one name", arguments=(*more, "--gguf", str(file)))


def test_an_older_transformers_is_named(file, models_folder, capsys, monkeypatch):
    monkeypatch.setattr(converter, "GGUFReader", None)
    assert_error(capsys, "transformers 5.18", "pip install", arguments=("tiny", "--gguf", str(file)))


# Packages.


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, which pip takes for the package index. Returns a function that adds one with some files."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)

    def add(name, *contents):
        about = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
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


def test_a_package_without_one_file_is_refused(file, index, models_folder, tmp_path, capsys):
    index("empty")
    index("two", file, file)
    (tmp_path / "text").write_text("text")
    index("text", tmp_path / "text")
    (tmp_path / "wheels" / "broken-1.0-py3-none-any.whl").write_bytes(b"PK")
    for name, words in {
        "empty": ("0 GGUF files",),
        "two": ("2 GGUF files",),
        "text": ("is not a GGUF file",),
        "broken": ("broken",),
        "nowhere": ("No matching distribution found for nowhere", "package index"),
    }.items():
        assert_error(capsys, *words, arguments=("tiny", "--gguf", name))
        assert folders(models_folder) == []


# A real file.


@pytest.mark.skipif("SPECDEC_GGUF" not in os.environ, reason="SPECDEC_GGUF names no GGUF file")
def test_a_real_file_writes_the_texts_that_transformers_writes_from_it(models_folder):
    """Greedy texts of 20 questions in float32, with the weights rounded to bfloat16 as the folder has them."""
    file = Path(os.environ["SPECDEC_GGUF"]).resolve()
    assert downloadModel.main(["real", "--gguf", str(file)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(models_folder / "real")
    ours = AutoModelForCausalLM.from_pretrained(models_folder / "real", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16().float()
    topics = "tea rain bread iron Paris chess sea bees salt music trees glass maps wine stars ships gold snow time ink"
    same = 0
    for topic in topics.split():
        messages = [{"role": "user", "content": f"Tell me about {topic}."}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        texts = [model.generate(**prompt, max_new_tokens=30, do_sample=False).tolist() for model in (ours, theirs)]
        same += texts[0] == texts[1]
    assert same == len(topics.split()) == 20
