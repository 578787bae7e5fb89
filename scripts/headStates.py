"""What a head is trained on: the texts that its target writes, and the target's hidden states for them.

The target reads the texts once. What it has computed is kept on disk, in parts that are made once.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.cachedModel import CachedModel
from inputs.commandLine import one_line
from inputs.devices import pick_dtype
from inputs.files import gigabytes, replace_file
from inputs.models import load_model, model_version, read_config, read_json
from inputs.progress import Bar
from inputs.tokenizers import load_tokenizer
from scripts.headTexts import LENGTH, Text, Writer, prompts_of
from scripts.training import AT_A_TIME, SAMPLING
from utils import UserError, probabilities

WRITTEN = 2_000_000  # tokens of text that the target writes and reads
TEXTS = 128  # texts in a part, which is kept or made again as a whole
HELD_OUT = 32  # texts that are not trained on: the first part
READ = 4  # texts that are read at a time
LAYERS = {"last": (1.0,), "three": (1 / 6, 1 / 2, 1.0)}  # where in the target a feature comes from


class OutputLayer(NamedTuple):
    """The target's output layer for some of its tokens. tokens: int64 `[V]`, ascending. weight `[V, d]`. bias: `[V]` or
    None."""

    tokens: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: Tensor) -> OutputLayer:
        """The rows of a model's output layer for `tokens`."""
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        tokens = tokens.to(layer.weight.device)
        return cls(tokens, layer.weight.detach()[tokens], None if bias is None else bias.detach()[tokens])

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits of last hidden states `[..., d]`, float32 `[..., V]`."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float()


def tapped(config: Any, layers: str) -> list[int]:
    """The layers of the target whose hidden states make a feature, as transformers counts `hidden_states`."""
    return [round(share * config.num_hidden_layers) for share in LAYERS[layers]]


class Reader:
    """Reads texts with the target: gives what a part keeps of them."""

    def __init__(self, folder: Path, device: str) -> None:
        tokenizer = load_tokenizer(folder)
        target = load_model(folder, tokenizer, pick_dtype(device), device)
        self.model, self.device = target.model, target.device
        self.output = OutputLayer.of(self.model, torch.arange(target.vocabulary))
        self.layers = tapped(self.model.config.get_text_config(), "three")
        self.check(target)

    @torch.inference_mode()
    def check(self, target: CachedModel) -> None:
        """Raise UserError if the output layer alone does not give the target's logits, as where they are scaled."""
        tokens = torch.arange(8)[None] % target.vocabulary
        states = self.hidden_states(tokens)
        logits = self.output(states[:, :, -self.output.weight.shape[1] :].to(self.device)).cpu()
        if not torch.allclose(logits.log_softmax(-1), target.score(tokens).log_softmax(-1), atol=0.1, rtol=0.1):
            raise UserError(
                f"{target.name} changes its logits after its output layer (or norms its last hidden states itself); "
                "no head is trained for such a model"
            )

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """The hidden states of the tapped layers for `tokens[B, n]`, side by side, `[B, n, layers * d]`."""
        states = self.model.base_model(tokens.to(self.device), use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self.layers], -1)

    @torch.inference_mode()
    def read(self, texts: Sequence[Text], bar: Bar) -> dict[str, Tensor]:
        """The tokens of the texts one after the other, and for each of them:

        text: which text it is of. drawn: whether the target drew it with SAMPLING. states: the hidden states of the
        tapped layers, `[N, layers * d]`. sums: what makes probabilities of the logits l after the token, `[N, 3]`
        (`Labels`): log sum exp l; log sum exp l / temperature, over the nucleus; and the least l in the nucleus.
        """
        texts = sorted(texts, key=lambda text: len(text.tokens))  # Little of a block is padding then.
        states, sums = [], []
        for at in range(0, len(texts), READ):
            block = [torch.tensor(text.tokens) for text in texts[at : at + READ]]
            padded = nn.utils.rnn.pad_sequence(block, batch_first=True)  # What comes after a text does not change it.
            for tokens, rows in zip(block, self.hidden_states(padded)):
                states.append(rows[: len(tokens)].to(torch.bfloat16).cpu())
                last = rows[: len(tokens), -self.output.weight.shape[1] :]
                sums += [sums_of(self.output, few).cpu() for few in last.split(at_a_time(self.device))]
                bar.update(len(tokens))
        return {
            "tokens": torch.cat([torch.tensor(text.tokens, dtype=torch.int32) for text in texts]),
            "text": torch.cat([torch.full((len(text.tokens),), i, dtype=torch.int32) for i, text in enumerate(texts)]),
            "drawn": torch.cat([torch.tensor(text.drawn) for text in texts]),
            "states": torch.cat(states),
            "sums": torch.cat(sums),
        }


def at_a_time(device: torch.device) -> int:
    """How many distributions are computed at a time: on a CPU, those that its cache holds."""
    return AT_A_TIME if device.type == "cpu" else 32 * AT_A_TIME


def sums_of(output: OutputLayer, last: Tensor) -> Tensor:
    """The `sums` of last hidden states `[..., d]`, `[..., 3]`."""
    logits = output(last.to(torch.bfloat16))  # as they are kept
    p = probabilities(logits, SAMPLING)
    most, in_nucleus = logits.amax(-1), p.masked_fill(p == 0, math.inf)
    kept = most / SAMPLING.temperature - p.amax(-1).log()  # as p(x) = exp(l(x) / temperature - kept)
    least = logits.gather(-1, in_nucleus.argmin(-1, keepdim=True))[..., 0]
    whole = most + (logits - most[..., None]).exp_().sum(-1).log()
    return torch.stack([whole, kept, least], -1)


def prepare(args: Namespace) -> list[dict[str, Tensor]]:
    """The parts of `args.data`, memory-mapped. Those that are missing are made first. Part 0 is held out. A part holds
    what `Reader.read` returns, and how many seconds it took to make it."""
    about = {"target": model_version(args.folder), "length": LENGTH, "sampling": asdict(SAMPLING), "seed": args.seed}
    description = args.data / "texts.json"
    args.data.mkdir(parents=True, exist_ok=True)
    if description.exists() and read_json(description) != about:
        raise UserError(f"{args.data} holds texts of another target or seed; name another --data")
    replace_file(description, json.dumps(about))
    parts: list[dict[str, Tensor]] = []
    writer: Writer | None = None
    reader: Reader | None = None
    left = args.written
    with Bar("the target writes and reads", args.written, " tokens") as bar:
        while left > 0:
            file = args.data / f"{len(parts):05}.safetensors"
            if not file.exists():
                check_room(args, left)
                if writer is None or reader is None:
                    writer = Writer(args.folder, args.device, *prompts_of(args), args.seed)
                    reader = Reader(args.folder, args.device)
                count = TEXTS if parts else HELD_OUT
                written = time.monotonic()
                texts = writer.write(len(parts), count)
                read = time.monotonic()
                made = reader.read(texts, bar)
                tokens, now = len(made["tokens"]), time.monotonic()
                save(file, made | {"seconds": torch.tensor(now - written)})
                print(
                    f"part {len(parts)}: {tokens:,} tokens, written at {tokens / (read - written):,.0f} tokens/s, "
                    f"read at {tokens / (now - read):,.0f} tokens/s",
                    file=sys.stderr,
                )
            else:
                tokens = len(load(file)["tokens"])
                bar.update(tokens)
            left -= tokens if parts else 0
            parts.append(load(file))
    return parts


def check_room(args: Namespace, tokens: int) -> None:
    """Raise UserError if the hidden states of so many tokens do not fit on the disk."""
    config = read_config(args.folder).get_text_config()
    each = 2 * len(LAYERS["three"]) * config.hidden_size + 4 + 4 + 1 + 12
    needed, free = tokens * each, disk_usage(args.data).free
    if needed > free:
        raise UserError(
            f"the hidden states of {tokens:,} tokens need {gigabytes(needed)} and {args.data} has {gigabytes(free)} "
            "free; lower --written, or name another --data"
        )


def save(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of tensors in one step: it is there as a whole or not at all."""
    temporary = file.with_name(f".{file.name}")
    save_file(tensors, temporary)
    os.replace(temporary, file)


def load(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, memory-mapped. Raises UserError if it is broken."""
    try:
        return load_file(file)
    except SafetensorError as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}); remove it: it is made again") from None
