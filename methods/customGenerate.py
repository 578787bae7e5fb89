"""`speculative`: this project's sampler inside `generate` of transformers.

    model.generate(**inputs, custom_generate=speculative(draft), max_new_tokens=200, do_sample=True, top_p=0.9)

`generate` prepares its arguments as always. Where its own loop would run, it calls what `speculative` returned. That
reads what `generate` prepared, and raises a ValueError that names what speculative sampling cannot honour.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
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

from decoding.drafter import Drafter
from decoding.lengthRules import LengthRule
from decoding.record import Record
from decoding.verification import RULES, VerificationRule
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


# {model: {bits: its copy}}. A copy keeps no reference to the model.
_COPIES: WeakKeyDictionary[PreTrainedModel, dict[int, PreTrainedModel]] = WeakKeyDictionary()


def speculative(
    draft: PreTrainedModel | str | Path | None = None,
    gamma: int | LengthRule = 4,
    verify: str = "token",
    vocabulary: int | None = None,
    bits: int = 4,
) -> Speculative:
    """Speculative sampling, as a `custom_generate` for `model.generate`.

    draft: a smaller model with the same tokenizer, on the same device. Neither model is changed. None: the model's own
        copy, whose weights have `bits` bits (selfDraft.py); it is made at the first call. A folder: that of a head
        which was trained for the model (scripts/trainHead.py). It is read at each call. Whether the model's weights
        are those that it was trained for is not known here: if they are not, its guesses fail.
    gamma: tokens to guess in a round, or a rule that chooses (decoding/lengthRules.py).
    verify: "token" or "block" (decoding/verification.py).
    vocabulary: the tokenizer's size, to which the logits are cut. Needed if the models pad their vocabularies to
        different sizes.

    Random numbers come from torch's global generator of the model's device: `torch.manual_seed` makes a text
    repeatable. It is not the text that `generate` alone draws with that seed, but it has the same distribution.
    Raises ValueError, here or in `generate`, for what cannot be honoured.
    """
    if not (Path(draft).is_dir() if isinstance(draft, (str, Path)) else isinstance(draft, (PreTrainedModel, NoneType))):
        raise ValueError(f"the draft must be a transformers model or a head's folder, not {draft!r:.60}")
    if verify not in RULES:
        raise ValueError(f"verify must be one of {', '.join(RULES)}, not {verify!r}")
    if isinstance(gamma, int) and gamma < 1:
        raise ValueError(f"gamma must be 1 or more, not {gamma}")
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, not {bits}")
    return Speculative(draft, gamma, RULES[verify], vocabulary, bits)


@dataclass(frozen=True, repr=False)
class Speculative:
    """What `speculative` returns: the decoding loop, called by `generate` with what it prepared."""

    draft: PreTrainedModel | str | Path | None
    gamma: int | LengthRule
    verify: VerificationRule
    vocabulary: int | None
    bits: int

    def drafter(self, target: CachedModel) -> Drafter:
        """What guesses for the target. A copy of the target is made once."""
        if isinstance(self.draft, (str, Path)):
            return ModelDrafter(load_head(Path(self.draft), target))
        if self.draft is not None:
            return ModelDrafter(CachedModel(kept_copy(self.draft), self.vocabulary, "the draft"))
        copies = _COPIES.setdefault(target.model, {})
        if self.bits not in copies:
            copies[self.bits] = copies_of(target, [self.bits]).of(self.bits, target).model
        return ModelDrafter(CachedModel(copies[self.bits], self.vocabulary, "the copy", target))

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
        kept_back = not_handed_on(inspect.currentframe())
        streamer = kept_back if streamer is None else streamer
        check_settings(generation_config, inputs)
        prompts, padding = unpadded(input_ids, inputs)
        sampling = as_sampling(logits_processor, padding, generation_config.do_sample)
        stop = Stop(input_ids, stopping_criteria, generation_config)
        check_models(model, self.draft if isinstance(self.draft, PreTrainedModel) else model, self.vocabulary)
        if streamer is not None and len(prompts) > 1:
            refuse(f"a streamer for a batch of {len(prompts)} rows")

        def stream(row: int, tokens: list[int], guessed: int) -> None:
            for token in tokens:
                streamer.put(torch.tensor([token]))

        try:
            target = CachedModel(kept_copy(model), self.vocabulary, "the model")
            tokens, records = specSampling(
                prompts,
                target=target,
                drafter=self.drafter(target),
                max_len=stop.max_length - input_ids.shape[1],
                gamma=self.gamma,
                sampling=sampling,
                end_of_text=stop.ends,
                callback=None if streamer is None else stream,
                verify=self.verify,
            )
        except UserError as error:
            raise ValueError(str(error).replace("maxLen", "max_new_tokens")) from None
        if streamer is not None:
            streamer.end()
        sequences = stop.padded(tokens)
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(sequences=sequences, records=records)
        return sequences


def not_handed_on(frame: Any) -> Any:
    """The streamer given to the `generate` that made the call of `frame`, or None.

    transformers (5.17 to 5.23) hands neither `streamer`, `assistant_model` nor `synced_gpus` on to a callable. If the
    streamer were ignored, whoever reads from it would wait forever. So they are looked up where they are: among the
    variables of `generate`. The other two are refused.
    """
    arguments = frame.f_back.f_locals if frame.f_back.f_code.co_name == "generate" else {}
    if arguments.get("assistant_model") is not None:
        refuse("assistant_model beside the draft given to `speculative`")
    if arguments.get("synced_gpus"):
        refuse("synced_gpus")
    return arguments.get("streamer")


# What `generate` prepared, read in this project's terms.

# Settings of `generate`, and the values that are honoured. Others ask for another loop, for another cache, or for
# tensors that this loop does not keep.
HONOURED: dict[str, Sequence[object]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "min_new_tokens": (None, 0),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
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
    """Raise the ValueError for what cannot be honoured."""
    raise ValueError(f"speculative sampling does not support {what}")


def check_settings(config: GenerationConfig, inputs: dict[str, Any]) -> None:
    """Refuse settings of `generate`, and inputs of the model, that would be ignored."""
    for name, values in HONOURED.items():
        value = getattr(config, name, None)
        if value not in values:
            refuse(f"{name}={value!r}")
    for name, value in inputs.items():
        if name not in INPUTS and value is not None and value is not False:
            refuse(f"the input {name}")
    cache = inputs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        refuse("past_key_values of your own")


def unpadded(input_ids: Tensor, inputs: dict[str, Any]) -> tuple[list[list[int]], Tensor]:
    """The prompts of `input_ids[B, L]` without their padding, and how many tokens of padding each has, int64 `[B]`."""
    mask = inputs.get("attention_mask")
    held = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device) != 0
    if held.shape != input_ids.shape:
        refuse(f"an attention_mask of shape {list(held.shape)} for input_ids of shape {list(input_ids.shape)}")
    padding = (~held).sum(1)
    if (held != (torch.arange(held.shape[1], device=held.device) >= padding[:, None])).any():
        refuse("an attention_mask with zeros after ones: pad on the left")
    positions = inputs.get("position_ids")
    if positions is not None and ((positions.to(held.device) != held.cumsum(1) - 1) & held).any():
        refuse("position_ids of your own")
    return [row[is_held].tolist() for row, is_held in zip(input_ids, held)], padding


def as_sampling(processors: Iterable[Any], padding: Tensor, do_sample: bool) -> Sampling:
    """The `Sampling` of the logits processors that `generate` prepared. padding: that of each row, int64 `[B]`."""
    order, last = list(FILTERS), -1
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for processor in processors:
        kind = type(processor)
        if kind not in FILTERS:
            refuse(f"the logits processor {kind.__name__}")
        if order.index(kind) <= last:
            refuse(f"{kind.__name__} after {order[last].__name__}")
        last, (name, attribute) = order.index(kind), FILTERS[kind]
        options[name] = getattr(processor, attribute)
        if (
            getattr(processor, "min_tokens_to_keep", 1) != 1
            or getattr(processor, "filter_value", -torch.inf) != -torch.inf
        ):
            refuse(f"{kind.__name__} with a min_tokens_to_keep or a filter_value")
        ignored = getattr(processor, "prompt_ignore_length", None)  # Padding is never penalised here.
        if ignored is not None and (torch.as_tensor(ignored).to(padding.device) != padding).any():
            refuse("prompt_ignore_length")
    if not do_sample:
        options["temperature"] = 0.0
    try:
        return Sampling(**options)
    except UserError as error:
        raise ValueError(str(error)) from None


def check_models(model: PreTrainedModel, draft: PreTrainedModel, vocabulary: int | None) -> None:
    """Refuse models that do not fit together."""
    for role, decoder in (("model", model), ("draft", draft)):
        if getattr(decoder, "peft_config", None):
            refuse(f"a {role} with adapters: merge them into its weights first")
    if model.device != draft.device:
        refuse(f"a draft on {draft.device} for a model on {model.device}")
    sizes = [decoder.config.get_text_config().vocab_size for decoder in (model, draft)]
    if vocabulary is None and sizes[0] != sizes[1]:
        raise ValueError(
            f"the model's vocabulary has {sizes[0]} entries and the draft's {sizes[1]}: they must share one tokenizer. "
            "If they do and pad its vocabulary differently, call speculative(draft, vocabulary=len(tokenizer))"
        )
    if vocabulary is not None and not 0 < vocabulary <= min(sizes):
        raise ValueError(f"vocabulary must lie in [1, {min(sizes)}], the entries that both models have: {vocabulary}")


class Stop:
    """When rows end: at an end-of-text id, at `max_length` tokens (prompt and padding included), or by other criteria.

    A criterion is asked after each new token of a row, with the `[1, n]` tokens of that row alone, padding included.
    """

    def __init__(self, input_ids: Tensor, criteria: StoppingCriteriaList, config: GenerationConfig) -> None:
        lengths = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
        self.input_ids, self.max_length = input_ids, min([*lengths, config.max_length])
        ends = [criterion.eos_token_id.tolist() for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
        self.ids = {token for ids in ends for token in ids}
        self.others = [
            criterion for criterion in criteria if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria))
        ]
        self.texts = input_ids.tolist()
        self.pad = getattr(config, "_pad_token_tensor", None)
        if self.others and self.pad is None and len(input_ids) > 1:
            refuse("stopping_criteria for a batch without a pad_token_id: its rows end at different lengths")

    def ends(self, row: int, token: int) -> bool:
        """Whether a row ends at its new `token`."""
        if not self.others:
            return token in self.ids
        self.texts[row].append(token)
        text = torch.tensor([self.texts[row]], device=self.input_ids.device)
        ends = [bool(torch.as_tensor(criterion(text, None)).any()) for criterion in self.others]
        return token in self.ids or any(ends)

    def padded(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """`input_ids[B, L]` with the new tokens of each row, `[B, L + n]`; shorter rows are padded at the right."""
        longest, device = max(map(len, tokens)), self.input_ids.device
        pad = 0 if self.pad is None else int(self.pad)
        new = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in tokens], device=device)
        return torch.cat([self.input_ids, new.to(self.input_ids.dtype)], 1)
