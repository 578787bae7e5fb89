"""A folder that cannot be used is refused with one line that names the remedy; a good one loads as it is."""

import gc
import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import CONTEXT, PADDED, VOCABULARY, refused
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from engine.compiling import compiled
from inputs import files, models
from inputs.devices import pick_dtype
from inputs.hub import MANIFEST, Manifest, files_of
from inputs.models import default_pair, find_model, load_model, load_tokenizer, model_version, weight_bytes
from methods.drafters import ModelDrafter
from specSampling import specSampling
from utils import GREEDY


def load(folder, tokenizer=None, dtype="float32"):
    return load_model(folder, tokenizer or load_tokenizer(folder), dtype, "cpu")


def configure(folder, name="config.json", /, **changes):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_model_is_named_by_a_folder_under_models_or_by_any_path(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MODELS", tmp_path)
    assert find_model("model") == find_model(str(model_folder)) == find_model(model_folder) == model_folder
    monkeypatch.chdir(model_folder)
    assert find_model(".").name == "model"  # what results call it
    for name in "line\nbreak", "~nobody-of-this-name/x", "pythia-1b":
        with refused(name.replace("\n", "\\n"), "available: model", "downloadModel.py"):
            find_model(name)
    monkeypatch.setattr(files, "MODELS", tmp_path / "none")
    with refused("pythia-1b", "available: none"):
        find_model("pythia-1b")


def test_pythia_is_the_default_once_both_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MODELS", tmp_path)
    (tmp_path / "pythia-2.8b").mkdir()
    assert default_pair() == ("bundled-target", "bundled-draft")
    (tmp_path / "pythia-70m").mkdir()
    assert default_pair() == ("pythia-2.8b", "pythia-70m")


def replaced(folder, files):
    """Give files of a folder this content; None: remove them."""
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)


def cut(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


def without_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_a_weight(folder, name, dtype=torch.float32):
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.ones(2, dtype=dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GARBLED = b"", b'{"model_type": "gpt', b"[]", b"[" * 100_000, b"{}", b"\xff\xfe\0", b'{"model_type": "none"}'
INDICES = b"{}", b"[]", b'{"weight_map": 3}', b"{", b'{"weight_map": {"a": "lost.safetensors"}}'
MISMATCH = ["do not match", "download"]  # transformers would go on, with random weights or without some layers.
REFUSED = [
    (partial(replaced, files={"config.json": None}), ["no config.json", "download"]),
    (partial(replaced, files={"adapter_config.json": b"{}"}), ["has an adapter", "merge_and_unload"]),
    (partial(replaced, files={"adapter_config.json": b"{}", "config.json": None}), ["has an adapter"]),
    (partial(replaced, files={WEIGHTS: None, "pytorch_model.bin": b""}), ["no .safetensors", "download"]),
    *((partial(cut, size=size), [WEIGHTS, "download it again"]) for size in (0, 7, -1)),
    *((partial(replaced, files={"config.json": text}), ["/model", "download"]) for text in GARBLED),
    (partial(configure, hidden_size="x"), ["/model", "download"]),
    (partial(configure, num_attention_heads=0), ["/model", "download"]),
    (partial(configure, vocab_size=10**9), ["needs about", "smaller"]),
    *((partial(configure, num_hidden_layers=count), [*MISMATCH, "layers."]) for count in (4, 1, -1)),
    (partial(configure, hidden_size=64), [*MISMATCH, ".weight"]),
    (partial(configure, vocab_size=PADDED + 1), [*MISMATCH, ".weight"]),
    *((partial(with_a_weight, name=f"gpt_neox.layers.0.{end}"), [*MISMATCH, end]) for end in ("mlp.b", "x.bias")),
    (
        partial(with_a_weight, name="gpt_neox.embed_in.weight", dtype=torch.int8),
        ["embed_in.weight in I8; only weights"],
    ),
    (without_a_weight, ["gpt_neox.layers.1.mlp.dense_h_to_4h.weight", "download"]),
    *((partial(replaced, files={WEIGHTS: None, INDEX: text}), ["/model", "download it again"]) for text in INDICES),
    *(  # Refused before their weights are read. More kinds are in test_gate.py.
        (partial(replaced, files={"config.json": b'{"model_type": "%s"}' % kind, WEIGHTS: b""}), [words])
        for kind, words in {
            b"vit": "is not a causal language model",
            b"bart": "models of type bart are not supported: it is an encoder with a decoder",
            b"bert": "its tokens attend to those after them, as is_decoder is false",
            b"mamba": "keep a state that positions cannot address",
            b"musicgen": "cannot be loaded",
        }.items()
    ),
]


@pytest.mark.parametrize("change, words", REFUSED, ids=range(len(REFUSED)))
def test_a_folder_that_cannot_be_used_is_refused(model_folder, change, words):
    tokenizer = load_tokenizer(model_folder)
    change(model_folder)
    with refused(*words):
        load(find_model(model_folder), tokenizer)


def test_a_tokenizer_larger_than_the_model_and_too_little_memory_are_refused(model_folder, monkeypatch):
    tokenizer = load_tokenizer(model_folder)
    tokenizer.add_tokens([f"more {i}" for i in range(PADDED - VOCABULARY)])
    tokenizer.add_tokens([AddedToken("<image>", special=True)])  # As of Gemma 3, which has no logits for it.
    assert load(model_folder, tokenizer).vocabulary == PADDED
    tokenizer.add_tokens(["one more"])
    with refused(f"model has {PADDED} tokens and its tokenizer {PADDED + 2}", "do not belong together", "download"):
        load(model_folder, tokenizer)
    needed = weight_bytes(model_folder, torch.float32) + models.WORKING_MEMORY
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    monkeypatch.setattr(models, "available_memory", lambda device: needed - 1)
    with refused("needs about 3", " MB in float32 and cpu has 3", "smaller dtype"):
        load(model_folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_good_folder_loads_in_every_dtype_with_logits_cut_to_the_tokenizer(model_folder, dtype):
    assert pick_dtype("cpu") in models.DTYPES
    model = load(model_folder, dtype=dtype)
    logits = model.score(torch.tensor([[1, 2, 3]]))
    assert model.dtype == models.DTYPES[dtype] and model.context == CONTEXT and model.name == "model"
    assert model.model.config.vocab_size == PADDED
    assert logits.shape == (1, 3, VOCABULARY) and logits.dtype == torch.float32 and bool(logits.isfinite().all())
    weights = sum(weight.nbytes for weight in model.model.parameters())
    assert weight_bytes(model_folder, model.dtype) == weights
    for old in ("attention.masked_bias", "attention.rotary_emb.inv_freq"):  # Buffers that older versions wrote.
        with_a_weight(model_folder, f"gpt_neox.layers.0.{old}")
    assert weight_bytes(model_folder, model.dtype) == weights
    content = json.loads((model_folder / "tokenizer.json").read_text())
    token = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"][token] = PADDED - 2  # Ids with a gap
    (model_folder / "tokenizer.json").write_text(json.dumps(content))
    assert load(model_folder, dtype=dtype).vocabulary == PADDED - 1


def test_weights_in_several_files_load_to_the_same_model(pair_folder, model_folder):
    (model_folder / WEIGHTS).unlink()
    AutoModelForCausalLM.from_pretrained(pair_folder / "target").save_pretrained(model_folder, max_shard_size=60_000)
    assert len(sorted(model_folder.glob("*.safetensors"))) > 1
    (model_folder / "consolidated.safetensors").write_bytes(b"another layout, which is not loaded")
    assert weight_bytes(model_folder, torch.float32) == weight_bytes(pair_folder / "target", torch.float32)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(load(model_folder).score(tokens), load(pair_folder / "target").score(tokens))


def test_the_version_is_the_downloads_commit_while_its_weights_have_their_hashes(model_folder):
    """A copy of other weights that keeps their time (cp -p) has another version."""
    weights, hashed = model_folder / WEIGHTS, model_version(model_folder)
    assert hashed.startswith("sha256:") and len(hashed) == 23
    content = weights.read_bytes()
    Manifest("some/model", "0123456789abcdef", files=files_of(model_folder)).write(model_folder)
    assert model_version(model_folder) == "0123456789abcdef"
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, (0, 0))
    assert model_version(model_folder).startswith("sha256:") and model_version(model_folder) != hashed
    weights.write_bytes(content)
    assert model_version(model_folder) == "0123456789abcdef"
    (model_folder / MANIFEST).write_text("garbled")
    assert model_version(model_folder) == hashed


@pytest.mark.parametrize("model_type", ["gpt_neox", "unheard_of"])
def test_code_that_comes_with_a_model_is_never_run(pair_folder, model_folder, tmp_path, model_type):
    marker = tmp_path / "marker"
    (model_folder / "evil.py").write_text(
        f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    )
    maps = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    configure(model_folder, model_type=model_type, auto_map=maps)
    tokenizer = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    configure(model_folder, "tokenizer_config.json", **tokenizer)
    if model_type == "gpt_neox":
        load(model_folder)
    else:
        for attempt in load_tokenizer, lambda folder: load(folder, load_tokenizer(pair_folder / "target")):
            with refused("custom code", "never run"):
                attempt(model_folder)
    assert not marker.exists()


def test_a_model_too_large_for_the_device_is_spread_over_all_there_are_and_not_compiled(monkeypatch, tmp_path, capsys):
    """The disk serves as a second device: weights that the CPU has no room for are fetched layer by layer."""
    tokenizer = load_tokenizer("bundled-target")
    whole, draft = (load(name, tokenizer, "bfloat16") for name in ("bundled-target", "bundled-draft"))
    seen, from_pretrained = [], AutoModelForCausalLM.from_pretrained

    def in_two_places(*args, max_memory, **kwargs):
        seen.append(max_memory)
        return from_pretrained(*args, max_memory={"cpu": 6_000_000}, offload_folder=tmp_path, **kwargs)

    monkeypatch.setattr(models, "available_memory", lambda device: {"cpu": 100, "cuda:1": 10**12}[device])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", in_two_places)
    spread = load_model("bundled-target", tokenizer, "bfloat16", "cpu", spread=["cuda:1", "cpu"])
    assert seen == [{1: 10**12, "cpu": 0}] and set(spread.model.hf_device_map.values()) == {"cpu", "disk"}
    prompts, drafter = [[5, 9, 2], [11, 30, 4, 8]], ModelDrafter(draft)
    one, other = (specSampling(prompts, target, drafter, 12, 3, GREEDY)[0] for target in (whole, spread))
    assert one == other
    assert compiled(spread) is spread and "spread over several devices" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux what memory is used")
def test_weights_are_mapped_and_copied_once_at_most(pair_folder, tmp_path):
    config = GPTNeoXConfig(vocab_size=8192, hidden_size=1024, num_hidden_layers=2, num_attention_heads=8)
    with torch.device("meta"):
        model = GPTNeoXForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(tmp_path)  # Initialising its weights would take seconds.
    tokenizer = load_tokenizer(pair_folder / "target")
    del model

    def anonymous_bytes():
        """Memory of this process that is not a mapped file."""
        gc.collect()
        return 1024 * int(re.search(r"RssAnon:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    for dtype, copies in ("bfloat16", 0), ("float32", 1):
        before = anonymous_bytes()
        model = load(tmp_path, tokenizer, dtype)
        size = sum(weight.nbytes for weight in model.model.parameters())
        assert size > 80e6 and anonymous_bytes() - before < (copies + 0.2) * size
        del model
