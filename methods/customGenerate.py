"""`speculative`: this project's sampler inside `generate` of transformers.

    model.generate(**inputs, custom_generate=speculative(draft), max_new_tokens=200, do_sample=True, top_p=0.9)

`generate` prepares its arguments as always. Where its own loop would run, it calls the `speculative` object. That reads
what `generate` prepared, and raises a ValueError that names settings that speculative sampling does not support.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import utils as library

from decoding.drafter import Drafter, LengthRule
from decoding.rows import Record
from decoding.verification import RULES
from engine.cachedModel import CachedModel
from engine.head import load_head
from engine.quantised import BITS
from engine.sharedWeights import kept_copy
from methods.drafters import ModelDrafter
from methods.selfDraft import copies_of
from specSampling import specSampling
from utils import Sampling, UserError


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: `sequences`, and a `Record` of each row."""

    records: list[Record] | None = None


GENERATE = "transformers.generation.utils"  # where `generate` is
# {model: {bits: its copy}}. A copy keeps no reference to the model.
_COPIES: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, torch.device], PreTrainedModel]] = WeakKeyDictionary()


@dataclass(frozen=True, repr=False)
class speculative:  # called like a function, as `torch.no_grad` is
    """Speculative sampling, as a `custom_generate` for `model.generate`.

    draft: a smaller model with the same tokenizer. Neither model is changed. None: the model's own copy, whose weights
        have `bits` bits (selfDraft.py); it is computed at the first call. A folder: that of a head which was trained
        for the model (scripts/trainHead.py). It is read at each call. Whether the model's weights are those that it was
        trained for is not known here: if they are not, its guesses fail.
    gamma: tokens to guess in a round, or a rule that chooses (decoding/lengthRules.py).
    verify: "token" or "block" (decoding/verification.py).
    vocabulary: the tokenizer's size, to which the logits are cut. Needed if the models pad their vocabularies to
        different sizes.

    Random numbers come from torch's global generator of the model's device: `torch.manual_seed` makes a text
    repeatable. It is not the text that `generate` alone draws with that seed, but it has the same distribution.
    Raises ValueError, here or in `generate`, for unsupported settings.
    """

    draft: PreTrainedModel | str | Path | None = None
    gamma: int | LengthRule = 4
    verify: str = "token"
    vocabulary: int | None = None
    bits: int = 4

    def __post_init__(self) -> None:
        is_folder = isinstance(self.draft, (str, Path)) and Path(self.draft).is_dir()
        if not is_folder and not isinstance(self.draft, (PreTrainedModel, NoneType)):
            raise ValueError(f"the draft must be a transformers model or a head's folder, not {self.draft!r:.60}")
        if not isinstance(self.gamma, (int, LengthRule)):
            raise ValueError(f"gamma must be a whole number or a rule of lengthRules.py, not {self.gamma!r:.60}")
        if self.verify not in RULES:
            raise ValueError(f"verify must be one of {', '.join(RULES)}, not {self.verify!r}")
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, not {self.bits}")

    def drafter(self, target: CachedModel) -> Drafter:
        """The drafter for the target. A copy of the target is created once."""
        if isinstance(self.draft, (str, Path)):
            return ModelDrafter(load_head(Path(self.draft), target))
        if self.draft is not None:
            return ModelDrafter(from_position_0(CachedModel(kept_copy(self.draft), self.vocabulary, "the draft")))
        copies = _COPIES.setdefault(target.model, {})
        if (key := (self.bits, target.device)) not in copies:
            copies[key] = copies_of(target, [self.bits]).of(self.bits, target).model
        return ModelDrafter(CachedModel(copies[key], self.vocabulary, "the copy", target))

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **inputs: Any,
    ) -> Tensor | SpeculativeOutput:
        """`input_ids[B, L]` and the new tokens of each row, `[B, L + n]`, padded at the right."""
        # transformers (5.17 to 5.23, `_extract_generation_mode_kwargs`) hands none of these on to a callable: they are
        # only in the frame of `generate`. If the streamer were ignored, whoever reads from it would wait forever.
        caller: Any = inspect.currentframe()
        while caller and (caller.f_code.co_name, caller.f_globals.get("__name__")) != ("generate", GENERATE):
            caller = caller.f_back
        if caller is None:
            refuse("a call from another thread than that of `generate`, whose streamer would be ignored")
        arguments = caller.f_locals
        streamer = arguments.get("streamer") if streamer is None else streamer
        mode = generation_config.get_generation_mode(arguments.get("assistant_model"))
        if mode not in ("greedy_search", "sample"):
            refuse(f"the generation mode {mode.value}")
        synced = arguments.get("synced_gpus")
        if synced is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            # As the library decides by itself.
            shared = library.is_deepspeed_zero3_enabled() or library.is_fsdp_managed_module(model)
            synced = shared and torch.distributed.get_world_size() > 1
        if synced:
            refuse("synced_gpus")
        check_settings(model, self.draft, self.vocabulary, generation_config, inputs)
        prompts, padding = unpadded(input_ids, inputs)
        sampling = as_sampling(logits_processor, padding, generation_config.do_sample)
        stop = Stop(input_ids, stopping_criteria, generation_config)
        if streamer is not None and len(prompts) > 1:
            refuse(f"a streamer for a batch of {len(prompts)} rows")

        def stream(row: int, tokens: list[int], guessed: int) -> None:
            streamer.put(torch.tensor(tokens))  # a round at once, as the library's own assisted decoding

        try:
            target = from_position_0(CachedModel(kept_copy(model), self.vocabulary, "the model"))
            tokens, records = specSampling(
                prompts,
                target=target,
                drafter=self.drafter(target),
                max_len=stop.max_length - input_ids.shape[1],
                gamma=copy.copy(self.gamma),  # Each call has its own rows. What a rule has learnt is shared.
                sampling=sampling,
                end_of_text=stop.ends,
                callback=None if streamer is None else stream,
                verify=RULES[self.verify],
            )
        except UserError as error:
            raise ValueError(str(error).replace("maxLen", "max_new_tokens")) from None
        if streamer is not None:
            streamer.end()
        sequences = stop.padded(tokens)
        return SpeculativeOutput(sequences, records=records) if generation_config.return_dict_in_generate else sequences


# Translation of the arguments that `generate` prepared.

# Settings of `generate`, and the only supported value beside None. Others require another cache, or
# tensors that this loop does not store.
HONOURED = {
    "use_cache": True,
    "cache_implementation": "dynamic",
    "prefill_chunk_size": None,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
# The filters of `utils.probabilities` in its order: the argument of `Sampling`, and the attribute of the processor.
FILTERS = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
}


def refuse(what: str) -> NoReturn:
    raise ValueError(f"speculative sampling does not support {what}")


def check_settings(
    model: PreTrainedModel, draft: Any, vocabulary: int | None, config: GenerationConfig, inputs: dict[str, Any]
) -> None:
    """Refuse settings of `generate`, and inputs of the model, that would be ignored, and models that do not fit
    together. A draft that is not a model guesses in the target's vocabulary."""
    for name, honoured in HONOURED.items():
        if getattr(config, name) not in (None, honoured):
            refuse(f"{name}={getattr(config, name)!r}: give {name}={honoured!r}")
    for name, value in inputs.items():
        empty = value is None or value is False or (isinstance(value, dict) and not value)
        if name not in INPUTS and not empty:
            refuse(f"the input {name}")
    cache = inputs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        refuse("past_key_values of your own")
    prepare = model.prepare_inputs_for_generation  # Its inputs are prepared by `CachedModel` instead.
    if not getattr(prepare, "__func__", prepare).__module__.startswith("transformers."):
        refuse("a model that prepares its inputs in its own way, as one with a trained prompt does")
    models = {"model": model, "draft": draft if isinstance(draft, PreTrainedModel) else model}
    for role, decoder in models.items():
        if getattr(decoder, "peft_config", None):
            refuse(f"a {role} with adapters: merge them into its weights first")
    sizes = [decoder.config.get_text_config().vocab_size for decoder in models.values()]
    if vocabulary is None and sizes[0] != sizes[1]:
        raise ValueError(
            f"the model's vocabulary has {sizes[0]} entries and the draft's {sizes[1]}: they must share one tokenizer. "
            "If they do and pad its vocabulary differently, call speculative(draft, vocabulary=len(tokenizer))"
        )
    logits = getattr(model.get_output_embeddings(), "out_features", sizes[0])
    if vocabulary is None and logits > sizes[0]:
        remedy = "give both the same size with model.resize_token_embeddings"
        raise ValueError(f"the model gives {logits} logits, and its configuration has {sizes[0]} tokens: {remedy}")
    if vocabulary is not None and not 0 < vocabulary <= min(sizes):
        raise ValueError(f"vocabulary must lie in [1, {min(sizes)}], the entries that both models have: {vocabulary}")


def from_position_0(model: CachedModel) -> CachedModel:
    """The model with the positions that `generate` gives to all models. By itself RoBERTa counts from another one."""
    model.context, model.first_position = model.context + model.first_position, 0
    return model


def unpadded(input_ids: Tensor, inputs: dict[str, Any]) -> tuple[list[list[int]], Tensor]:
    """The prompts of `input_ids[B, L]` without their padding, and how many tokens of padding each has, int64 `[B]`."""
    if input_ids.is_floating_point():
        refuse(f"input_ids in {input_ids.dtype}")
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else (mask != 0).long().to(input_ids.device)
    if mask.shape != input_ids.shape or (mask.diff() < 0).any():
        refuse("an attention_mask of another shape, or with zeros after ones: pad on the left")
    positions = inputs.get("position_ids")
    if positions is not None and (
        positions.shape[1:] != mask.shape[1:] or ((positions.to(mask.device) - mask.cumsum(1) + 1) * mask).any()
    ):
        refuse("position_ids of your own")
    return [row[held].tolist() for row, held in zip(input_ids, mask.bool())], (mask == 0).sum(1)


def as_sampling(processors: Sequence[Any], padding: Tensor, do_sample: bool) -> Sampling:
    """The `Sampling` of the logits processors that `generate` prepared. padding: that of each row, int64 `[B]`."""
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    kinds = [type(processor) for processor in processors]
    for kind, processor in zip(kinds, processors):
        if kind not in FILTERS:
            refuse(f"the logits processor {kind.__name__}")
        name, attribute = FILTERS[kind]
        options[name] = getattr(processor, attribute)
        least, filled = getattr(processor, "min_tokens_to_keep", 1), getattr(processor, "filter_value", -torch.inf)
        if (least, filled) != (1, -torch.inf):
            refuse(f"{kind.__name__} with a min_tokens_to_keep or a filter_value")
        ignored = getattr(processor, "prompt_ignore_length", None)  # Padding is never penalised here.
        ignored = 0 if ignored is None else ignored
        if kind is RepetitionPenaltyLogitsProcessor and (torch.as_tensor(ignored).to(padding.device) != padding).any():
            refuse("a prompt_ignore_length other than the padding; give generate a repetition_penalty instead")
    if kinds != sorted(set(kinds), key=list(FILTERS).index):
        refuse(f"logits processors in the order {', '.join(kind.__name__ for kind in kinds)}")
    try:
        return Sampling(**options if do_sample else options | {"temperature": 0.0})
    except UserError as error:
        raise ValueError(str(error)) from None


class Stop:
    """When rows end: at an end-of-text id, at `max_length` tokens (prompt and padding included), or by other criteria.

    A criterion is called after each new token of a row, with the `[1, n]` tokens of that row alone, padding included.
    """

    def __init__(self, input_ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig) -> None:
        self.input_ids, self.texts = input_ids, input_ids.tolist()
        self.max_length = min((each.max_length for each in criteria if type(each) is MaxLengthCriteria), default=0)
        self.ids = {
            id for each in criteria if type(each) is EosTokenCriteria for id in each.eos_token_id.flatten().tolist()
        }
        self.others = [each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.pad = config._pad_token_tensor
        if self.others and self.pad is None and len(input_ids) > 1:
            refuse("stopping_criteria for a batch without a pad_token_id: its rows end at different lengths")

    def ends(self, row: int, token: int) -> bool:
        if not self.others:
            return token in self.ids
        self.texts[row].append(token)
        text = torch.tensor([self.texts[row]], device=self.input_ids.device)
        ends = [bool(torch.as_tensor(criterion(text, None)).any()) for criterion in self.others]
        return token in self.ids or any(ends)

    def padded(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """`input_ids[B, L]` with the new tokens of each row, `[B, L + n]`; shorter rows are padded at the right."""
        pad = 0 if self.pad is None else int(self.pad)
        new = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True, padding_value=pad)
        return torch.cat([self.input_ids, new.to(self.input_ids)], 1)
