"""Models and tokenizers from `models/` or any folder, with one clear line where one cannot be used.

Only safetensors are read, and no code that comes with a model is ever run.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from engine.cachedModel import CachedModel, context_of
from inputs import folders
from inputs.devices import all_devices, available_memory
from inputs.escape import visible
from inputs.hub import MANIFEST, UNFINISHED, gigabytes, one_line, read_manifest
from utils import UserError, out_of_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORKING_MEMORY = 300 << 20  # bytes left over for activations and the cache when memory is checked

logging.set_verbosity_error()
logging.disable_progress_bar()


def find_model(name):
    """The folder of a model named by a folder under `models/` or by any path."""
    for folder in (folders.MODELS / name, Path(os.path.abspath(os.path.expanduser(name)))):
        if os.path.isdir(folder) and folder != folders.MODELS:  # as it is for "."
            break
    else:
        if os.path.isdir(folders.MODELS / (name + UNFINISHED)):
            raise UserError(f"the download of {name} is not finished; run downloadModel.py again to finish it")
        there = sorted(f.name for f in folders.MODELS.iterdir() if f.is_dir()) if folders.MODELS.is_dir() else []
        raise UserError(
            f"no model folder {str(name)!r}, neither under {folders.MODELS.name}/ nor as a path; "
            f"there are: {', '.join(there) or 'none'}. downloadModel.py gets models; a hub id is "
            "owner/name"
        )
    if folder.name.endswith(UNFINISHED):
        raise UserError(f"{folder} is an unfinished download; run downloadModel.py again to finish it")
    if not os.path.isfile(folder / "config.json"):
        raise UserError(
            f"{folder} is not a model folder: it has no config.json; download the model again, or name another"
        )
    if not isinstance(read_json(folder / "config.json"), dict):
        raise UserError(f"{folder / 'config.json'} does not describe a model; download it again")
    weight_files(folder)
    return folder


def weight_files(folder):
    """The safetensors files a model folder's weights are in."""
    index = folder / "model.safetensors.index.json"
    if os.path.isfile(folder / "model.safetensors"):
        return [folder / "model.safetensors"]
    if not os.path.isfile(index):
        raise UserError(
            f"{folder} holds no .safetensors weights, and no other format is loaded; "
            "download the model again with its safetensors files"
        )
    try:
        files = set(read_json(index)["weight_map"].values())
        elsewhere = [file for file in files if Path(file).name != file]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{index} does not list any weights; download it again") from None
    if elsewhere:
        raise UserError(f"{index} names {elsewhere[0]!r}, which is not in its folder; download it again")
    return sorted(folder / file for file in files)


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); download it again") from None


def default_pair():
    """(target, draft) when none is named: Pythia where it was downloaded, otherwise the bundled pair."""
    pythia = ("pythia-2.8b", "pythia-70m")
    return pythia if all((folders.MODELS / name).is_dir() for name in pythia) else ("bundled-target", "bundled-draft")


def default_mid(pair):
    """The model between the two of `default_pair`, or None where it is not there."""
    name = "pythia-410m" if pair[0].startswith("pythia") else "bundled-mid"
    return name if (folders.MODELS / name).is_dir() else None


def weight_bytes(folder, dtype):
    """Bytes the weights of a model folder will take in `dtype`. Reads the files' headers only; a file shorter than its
    header says is refused."""
    count = 0
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - the file is no dict
                    shape = tensors.get_slice(key).get_shape()
                    count += torch.Size(shape).numel()
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read as safetensors ({one_line(error)}); download it again") from None
    return count * dtype.itemsize


def working_bytes(config, tokens):
    """Bytes a model of this config needs beside its weights to read `tokens` tokens at once: float32 logits and what
    is made of them, keys and values, and a little for activations."""
    hidden = config.hidden_size
    return WORKING_MEMORY + tokens * (
        3 * 4 * config.vocab_size + 2 * 4 * hidden * config.num_hidden_layers + 16 * 4 * hidden
    )


@dataclass(frozen=True)
class Outline:
    """What `rows.check_room` asks of a model, known before its weights are loaded."""

    name: str
    vocabulary: int
    context: int


def outline(folder, tokenizer):
    """The `Outline` of the model in a folder."""
    config = read_config(folder).get_text_config()
    return Outline(folder.name, len(tokenizer), context_of(config))


def read_config(folder):
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as for the weights, see `load_model`
        raise UserError(unusable(folder, error)) from None


def unusable(folder, error):
    return (
        f"{folder} cannot be loaded ({one_line(error)}); download it again, or use a causal language model that "
        "transformers knows: code that comes with a model is never run"
    )


def load_model(name, tokenizer, dtype, device, tokens=1024, spread=False):
    """A `CachedModel` of the folder `name` with its logits cut to the tokenizer's vocabulary.

    dtype: a key of DTYPES; the files are mapped, and each weight goes to its dtype and device by itself. Memory is
    checked before anything is loaded: the weights' and, from the config, that of reading `tokens` tokens.
    spread: a model too large for the device is laid out over all GPUs, and the processor's memory, by accelerate.
    """
    folder, torch_dtype = find_model(name), DTYPES[dtype]
    config = read_config(folder)
    try:
        weights, free = weight_bytes(folder, torch_dtype), available_memory(device)
        text = config.get_text_config()
        needed, size = weights + working_bytes(text, min(tokens, context_of(text))), text.vocab_size
        wide = spread and needed > free
        if wide:
            free = sum(available_memory(each) for each in all_devices())
        if needed > free:
            raise UserError(
                f"{folder.name} needs about {gigabytes(needed)} in {dtype} and {device} has "
                f"{gigabytes(free)} free{' with all others' if wide else ''}; use a smaller dtype (--dtype "
                "bfloat16) or a smaller model"
            )
        if size < len(tokenizer):
            raise UserError(
                f"{folder.name} has {size} tokens and its tokenizer {len(tokenizer)}: they do not belong "
                "together; download both again from one place"
            )
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch_dtype,
            device_map="auto" if wide else {"": device},
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",  # CachedModel sets its own; a config may name one that is code from the hub
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except UserError:
        raise
    except Exception as error:  # a broken folder can raise nearly anything; a user should see none of it as a traceback
        if out_of_memory(error):
            raise UserError(
                f"{folder.name} does not fit into the memory of {device}; use a smaller dtype or model"
            ) from None
        raise UserError(unusable(folder, error)) from None
    # The library would go on, with random weights or fewer layers. Buffers nobody asks for are common and harmless.
    wrong = (
        sorted(info["missing_keys"])
        + sorted(key for key, *_ in info["mismatched_keys"])
        + sorted(key for key in info["unexpected_keys"] if key.endswith(".weight"))
    )
    if wrong:
        raise UserError(
            f"{folder}: config.json and the weights do not match ({wrong[0]} is missing, left over or of "
            "another shape); download both again from one place"
        )
    return CachedModel(model, len(tokenizer), visible(folder.name, ""))


def model_version(name):
    """What identifies the weights of a model folder: the hub's commit where downloadModel.py recorded one and they have
    not been touched since, else 'sha256:' and 16 digits over the safetensors files."""
    folder = find_model(name)
    files, manifest = weight_files(folder), read_manifest(folder)
    if manifest and all(file.stat().st_mtime <= (folder / MANIFEST).stat().st_mtime for file in files):
        return manifest["commit"]
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"
