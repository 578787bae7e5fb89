"""Models and their tokenizers, from `models/` or any folder: found, checked and loaded.

Only safetensors are read, and code that comes with a model is never run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE, SAFETENSORS_SINGLE_FILE
from safetensors import safe_open
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from engine.cachedModel import CachedModel, check_kind, context_of
from engine.decoderLayers import NAMES
from inputs import files
from inputs.commandLine import did_you_mean, visible
from inputs.devices import available_memory
from inputs.files import gigabytes, library_errors
from inputs.hub import UNFINISHED, Manifest
from inputs.texts import ModelLimits, load_corpora
from utils import UserError, out_of_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NEVER_RUN = "code that comes with a model is never run"
OTHER_MODEL = f"download it again, or use a causal language model that transformers knows: {NEVER_RUN}"
NOT_MODELS = "self", "head", "lookup"  # what --draft may name instead of a model
COMPANIONS = {
    ("pythia-2.8b", "mid"): "pythia-410m",
    ("bundled-target", "mid"): "bundled-mid",
    ("bundled-target", "head"): "bundled-head",
}
# Buffers of older checkpoints, whose values a model computes by itself.
BUFFERS = r"(inv_freq|masked_bias|attn\.bias|attention\.bias|causal_mask|position_ids|embed_positions|alibi)$"
WORKING_MEMORY = 300 << 20  # bytes left for activations when memory is checked

logging.set_verbosity_error()
logging.disable_progress_bar()
getLogger("accelerate").setLevel("ERROR")


def find_model(name: str | Path) -> Path:
    """The folder of a model, named by a folder under `models/` or by any path. Raises UserError if there is none."""
    for folder in files.MODELS / name, Path(os.path.abspath(os.path.expanduser(name))):
        if os.path.isdir(folder) and folder != files.MODELS:  # `models/` itself is found for "."
            break
    else:
        if os.path.isdir(files.MODELS / f"{name}{UNFINISHED}"):
            raise UserError(f"the download of {name} is not finished; run downloadModel.py again to finish it")
        names = sorted(path.name for path in files.MODELS.glob("*") if path.is_dir())
        remedy = "download one with downloadModel.py (a hub id is owner/name)"
        where = f"neither in {files.MODELS.name}/ nor as a path; {remedy}; available: {', '.join(names) or 'none'}"
        raise UserError(f"there is no model {str(name)!r}, {where}{did_you_mean(str(name), (*names, *NOT_MODELS))}")
    if folder.name.endswith(UNFINISHED):
        raise UserError(f"{folder} is an unfinished download; run downloadModel.py again to finish it")
    if os.path.isfile(folder / "adapter_config.json"):
        remedy = "merge the adapter first (model.merge_and_unload()) and name a folder of the merged model alone"
        raise UserError(f"{folder} has an adapter (adapter_config.json), and adapters are not loaded; {remedy}")
    if not os.path.isfile(folder / "config.json"):
        raise UserError(f"{folder} is no model folder: it has no config.json; download the model again")
    if not isinstance(read_json(folder / "config.json"), dict):
        raise UserError(f"{folder / 'config.json'} does not describe a model; download it again")
    weight_files(folder)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's weights. Raises UserError if there are no such files."""
    index = folder / SAFETENSORS_INDEX_FILE
    if os.path.isfile(folder / SAFETENSORS_SINGLE_FILE):
        return [folder / SAFETENSORS_SINGLE_FILE]
    if not os.path.isfile(index):
        remedy = "download the model again with its safetensors files"
        raise UserError(f"{folder} has no .safetensors weights, and no other format is loaded; {remedy}")
    with library_errors(f"{index} does not list any weights", "download it again"):
        names = set(read_json(index)["weight_map"].values())
        outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UserError(f"{index} refers to {outside[0]!r}, which is outside its folder; download it again")
    return sorted(folder / name for name in names)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises UserError if it cannot be read."""
    with library_errors(f"{path} cannot be read", "download it again"):
        return json.loads(path.read_text(encoding="utf-8"))


def holds_head(folder: Path) -> bool:
    """Whether a folder holds a trained head (engine/head.py), not a model."""
    return "head" in read_json(folder / "config.json")


def default_pair() -> tuple[str, str]:
    """(target, draft) if no model is named: Pythia if both were downloaded, else the bundled pair."""
    pythia = ("pythia-2.8b", "pythia-70m")
    return pythia if all((files.MODELS / name).is_dir() for name in pythia) else ("bundled-target", "bundled-draft")


def default_for(target: str, role: str) -> str | None:
    """The "mid" model or the "head" of a target that has a default, or None if it does not exist."""
    name = COMPANIONS.get((target, role))
    return name if name and (files.MODELS / name).is_dir() else None


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in `dtype`, by the headers of its files, without buffers. Raises UserError for a file
    that is cut off."""
    count = 0
    for file in weight_files(folder):
        errors = library_errors(f"{file} cannot be read as safetensors", "download it again")
        with errors, safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - the file is no dict
                weight, buffer = tensors.get_slice(key), re.search(BUFFERS, key)
                if not buffer and "F" not in weight.get_dtype():  # transformers would load the codes of such weights.
                    what = f"{key} in {weight.get_dtype()}; only weights in floating point are loaded"
                    raise UserError(f"{file} has {what}")
                count += 0 if buffer else math.prod(weight.get_shape())
    return count * dtype.itemsize


def working_bytes(config: PretrainedConfig, tokens: int) -> int:
    """Bytes that a model needs in addition to its weights to read `tokens` tokens in one forward: float32 logits and
    the tensors computed from them, keys and values, and activations."""
    hidden = config.hidden_size
    floats = 3 * config.vocab_size + 2 * hidden * config.num_hidden_layers + 16 * hidden
    return WORKING_MEMORY + 4 * tokens * floats


def vocabulary_of(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many logits of a model are those of tokens. Ids may have gaps, so that the largest one counts."""
    return min(config.get_text_config().vocab_size, 1 + max(tokenizer.get_vocab().values()))


def model_limits(folder: Path, tokenizer: PreTrainedTokenizerBase) -> ModelLimits:
    config = read_config(folder)
    return ModelLimits(folder.name, vocabulary_of(config, tokenizer), context_of(config.get_text_config()))


def read_config(folder: Path) -> PretrainedConfig:
    with library_errors(f"{folder} cannot be loaded", OTHER_MODEL):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.get_text_config()  # Raises ValueError for a model that reads and writes texts of two kinds (MusicGen).
        return config


def reads_no_trees(folder: Path) -> bool:
    """Whether it is known that the model in `folder` reads no trees of guesses. Raises UserError as `check_kind`."""
    config = read_config(folder)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return kind is not None and check_kind(config, kind) is False


def has_no_copy(folder: Path) -> bool:
    """Whether nothing is known of the layers of the model in `folder`, so that it has no copy in few bits."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(read_config(folder)), object)
    return not any(each.__name__ in NAMES for each in kind.__mro__)


def load_model(
    name: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    device: str,
    tokens: int = 1024,
    spread: Sequence[str] = (),
    caches: int = 0,
) -> CachedModel:
    """Load the model `name` as a `CachedModel` whose logits are cut to the tokenizer's vocabulary.

    dtype: a key of DTYPES. The files are memory-mapped, and each weight is converted and moved by itself.
    tokens: the most tokens it reads at once. Memory is checked for that before anything is loaded.
    caches: bytes that the KV caches of a batch will take on the device, those of all models.
    spread: see `choose_devices`.
    """
    folder = find_model(name)
    config = read_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = f"a model of type {config.model_type}, which is not a causal language model in transformers"
        raise UserError(f"{folder} is {kind}; name another model")
    check_kind(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    size, added = config.get_text_config().vocab_size, tokenizer.added_tokens_decoder
    beyond = {index for index in tokenizer.get_vocab().values() if index >= size}
    if any(index not in added or not added[index].special for index in beyond):  # Gemma 3 lacks that of an image.
        counts = f"{folder.name} has {size} tokens and its tokenizer {1 + max(beyond)}"
        raise UserError(f"{counts}: they do not belong together; download both again from one place")
    with memory_errors(folder, device), library_errors(f"{folder} cannot be loaded", OTHER_MODEL):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[dtype],
            **choose_devices(folder, config, dtype, device, tokens, spread, caches),
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="eager",  # `CachedModel` sets its own. A config may name code of the hub.
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # transformers would continue with random weights, or without those that its class lacks. Unused buffers are
    # harmless: masks, and frequencies that are computed anew.
    wrong = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    wrong += [key for key in info["unexpected_keys"] if not re.search(BUFFERS, key)]
    if wrong:
        why = f"{min(wrong)} is missing, unexpected or has another shape"
        remedy = "download both again from the same source"
        raise UserError(f"{folder}: config.json and the weights do not match ({why}); {remedy}")
    loaded = CachedModel(model, vocabulary_of(config, tokenizer), visible(folder.name, ""))
    if loaded.is_spread or loaded.device.type != torch.device(device).type:
        places = {f"cuda:{at}" if isinstance(at, int) else str(at) for at in model.hf_device_map.values()}
        layers = f"its layers are on {' and '.join(sorted(places))}, and are computed where there is a GPU"
        print(f"{loaded.name} is too large for {device} in {dtype}: {layers}", file=sys.stderr)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    if loaded.context + loaded.first_position < positions:
        why = "beyond that its rotary embeddings (longrope) depend on the longest text of a batch"
        limited = f"is limited to {loaded.context} tokens instead of {positions}"
        print(f"{loaded.name} {limited}: {why}", file=sys.stderr)
    return loaded


@contextmanager
def memory_errors(folder: Path, device: str) -> Iterator[None]:
    """Raise an error of a full memory, which reading and loading the model in a folder may meet, as a UserError."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        remedy = "use a smaller dtype or model"
        raise UserError(f"{folder.name} does not fit into the memory of {device}; {remedy}") from None


def choose_devices(
    folder: Path,
    config: PretrainedConfig,
    dtype: str,
    device: str,
    tokens: int,
    spread: Sequence[str] = (),
    caches: int = 0,
    taken: int = 0,
) -> dict[str, Any]:
    """Where the weights go, as options of `from_pretrained`. Raises UserError if memory is short.

    spread: the devices that a model too large for `device` may use. accelerate puts as many layers on each as fit, and
    computes a layer that is in the CPU's memory on the GPU: its weights are copied there each time.
    taken: bytes that other models will take on `device`.
    """
    text = config.get_text_config()
    with memory_errors(folder, device):
        weights = weight_bytes(folder, DTYPES[dtype])
    working = working_bytes(text, min(tokens, context_of(text))) + caches
    free = available_memory(device) - taken
    if weights + working <= free:
        return {"device_map": {"": device}}
    room = {
        name: max(0, available_memory(name) - (working + taken if numbered(name) == numbered(device) else 0))
        for name in spread
    }
    if weights <= sum(room.values()):
        return {"device_map": "auto", "max_memory": {numbered(name): size for name, size in room.items()}}
    of_batch = f", with {gigabytes(caches)} for the KV caches of the batch," if caches else ""
    room_left = f"{device} has {gigabytes(free)} free{' and others too little' if spread else ''}"
    needs = f"{folder.name} needs about {gigabytes(weights + working)} in {dtype}{of_batch} and {room_left}"
    batch = "a smaller --batch, " if caches else ""
    raise UserError(f"{needs}; use {batch}a smaller dtype (--dtype bfloat16) or a smaller model")


def numbered(device: str) -> int | str:
    """A device as accelerate names it: a GPU by its number."""
    return torch.device(device).index or 0 if device.startswith("cuda") else device


def model_version(name: str | Path) -> str:
    """Identifies the weights of a model: the hub's commit if downloadModel.py recorded one and these are its files,
    else 'sha256:' and 16 digits of a hash of the safetensors files."""
    folder = find_model(name)
    weights, manifest = weight_files(folder), Manifest.read(folder)
    if manifest and manifest.commit:
        listed = {folder / file.path: file for file in manifest.files}
        if all(path in listed and listed[path].matches(path) for path in weights):
            return manifest.commit
    digest = hashlib.sha256()
    for path in weights:
        with open(path, "rb") as file:
            while block := file.read(1 << 22):  # `hashlib.file_digest` needs Python 3.11.
                digest.update(block)
    return f"sha256:{digest.hexdigest()[:16]}"


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises UserError if it cannot be used."""
    folder = find_model(name)
    remedy = f"download its tokenizer.json and config.json again ({NEVER_RUN})"
    with library_errors(f"{folder} has no usable tokenizer", remedy):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):  # What transformers makes of no files.
        raise UserError(f"{folder} has no tokenizer files; download its tokenizer.json")
    # A token that is added after a text would end it before it is continued.
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if tokenizer.is_fast and whole[-len(plain) :] != plain:
        first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        added = list(zip(tokenizer.convert_ids_to_tokens(whole[:first]), whole[:first]))
        single = [*(token for token, _ in added), "$A"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=added)
    return tokenizer


def check_tokenizers(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, names: tuple[str, str] = ("target", "draft")
) -> None:
    """Raise UserError unless both give every token the same id, for models that must read the same ids."""
    vocab, draft_vocab = target.get_vocab().items(), draft.get_vocab().items()
    if vocab == draft_vocab:
        return
    token, index = min(vocab - draft_vocab or draft_vocab - vocab, key=lambda item: item[1])
    both = f"{names[0]} ({len(vocab)} tokens) and {names[1]} ({len(draft_vocab)})"
    first = f"first at id {index} ({token!r})"
    raise UserError(f"the tokenizers of {both} differ, {first}; name two models that share one tokenizer")


def end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a text of the model in a folder: those that transformers' `generate` stops at, which are in
    generation_config.json or else in config.json, and the tokenizer's own. Raises UserError if a file names something
    that is not a token id."""
    named: object = None
    for file in folder / "generation_config.json", folder / "config.json":
        if named is None and file.is_file():
            content = read_json(file)
            named = content.get("eos_token_id") if isinstance(content, dict) else content
            ids = named if isinstance(named, list) else [named]
            if not all(token is None or type(token) is int for token in ids):
                raise UserError(f"{file} does not say which tokens end a text (eos_token_id); download it again")
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def most_frequent(count: int, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> Tensor:
    """The `count` most frequent tokens of the sample texts among `vocabulary`, int64 `[count]` in ascending order.

    ends: tokens that are always among them. Equally frequent and unseen tokens are taken by id: a byte-pair encoding
    numbers its tokens roughly by frequency. Raises UserError if there are fewer tokens.
    """
    if count > vocabulary:
        raise UserError(f"--draftVocab {count} exceeds the vocabulary of {vocabulary} tokens")
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for corpus in load_corpora("sample"):
        for document in corpus.documents:
            ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.long)
            counts += torch.bincount(ids, minlength=vocabulary)
    counts[[token for token in ends if token < vocabulary]] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values
