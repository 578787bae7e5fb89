"""`speculative`: this project's sampler inside `generate` of transformers.

    model.generate(**inputs, custom_generate=speculative(draft), max_new_tokens=200, do_sample=True, top_p=0.9)

`generate` prepares its arguments as always. Where its own loop would run, it calls what `speculative`
returned. generateArguments.py reads what `generate` prepared, and refuses what this sampler cannot honour.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from decoding.lengthRules import LengthRule
from decoding.rows import Record
from decoding.verification import RULES, VerificationRule
from engine.cachedModel import CachedModel
from methods.drafters import ModelDrafter
from methods.generateArguments import Stop, as_sampling, check_models, check_settings, refuse, unpadded
from specSampling import specSampling
from utils import UserError


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: `sequences`, and a `Record` of each row."""

    records: list[Record] | None = None


def speculative(
    draft: PreTrainedModel, gamma: int | LengthRule = 4, verify: str = "token", vocabulary: int | None = None
) -> Speculative:
    """Speculative sampling, as a `custom_generate` for `model.generate`.

    draft: a smaller model with the same tokenizer, on the same device. Neither model is changed.
    gamma: tokens to guess in a round, or a rule that chooses (decoding/lengthRules.py).
    verify: "token" or "block" (decoding/verification.py).
    vocabulary: the tokenizer's size, to which the logits are cut. Needed if the models pad their vocabularies to
        different sizes.

    Random numbers come from torch's global generator of the model's device: `torch.manual_seed` makes a text
    repeatable. It is not the text that `generate` alone draws with that seed, but it has the same distribution.
    Raises ValueError, here or in `generate`, for what cannot be honoured.
    """
    if not isinstance(draft, PreTrainedModel):
        raise ValueError(f"the draft must be a transformers model, not a {type(draft).__name__}")
    if verify not in RULES:
        raise ValueError(f"verify must be one of {', '.join(RULES)}, not {verify!r}")
    if isinstance(gamma, int) and gamma < 1:
        raise ValueError(f"gamma must be 1 or more, not {gamma}")
    return Speculative(draft, gamma, RULES[verify], vocabulary)


@dataclass(frozen=True, repr=False)
class Speculative:
    """What `speculative` returns: the decoding loop, called by `generate` with what it prepared."""

    draft: PreTrainedModel
    gamma: int | LengthRule
    verify: VerificationRule
    vocabulary: int | None

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
        check_models(model, self.draft, stop.max_length, self.vocabulary)
        if streamer is not None and len(prompts) > 1:
            refuse(f"a streamer for a batch of {len(prompts)} rows")

        def stream(row: int, tokens: list[int], guessed: int) -> None:
            for token in tokens:
                streamer.put(torch.tensor([token]))

        try:
            tokens, records = specSampling(
                prompts,
                target=CachedModel(kept_copy(model), self.vocabulary, "the model"),
                drafter=ModelDrafter(CachedModel(kept_copy(self.draft), self.vocabulary, "the draft")),
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
    given = frame.f_back.f_locals if frame.f_back.f_code.co_name == "generate" else {}
    if given.get("assistant_model") is not None:
        refuse("assistant_model beside the draft given to `speculative`")
    if given.get("synced_gpus"):
        refuse("synced_gpus")
    return given.get("streamer")


# Copies of a model that share its weights, and nothing else.

_COPIES: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A second model that shares the weights. What is set or replaced in one of the two does not change the other."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in weights(model)})


def kept_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The sharing copy that is kept for `model` as long as the model lives.

    It is made anew if a weight of the model is another tensor than it was, as after `resize_token_embeddings`. A weight
    that changes in place, as in training, changes in both.
    """
    kept = _COPIES.get(model)
    if kept is None or any(a is not b for a, b in zip_longest(weights(model), weights(kept))):
        kept = _COPIES[model] = sharing_copy(model)
    return kept


def weights(model: PreTrainedModel) -> Iterator[Tensor]:
    """The parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()
