"""Twins: models that share the weights of another one, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import zip_longest
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

_TWINS: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model that shares the weights. What is set or replaced in one of the two does not change the other."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in weights(model)})


def kept_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The twin that is kept for `model` as long as the model lives.

    It is made anew if a weight of the model is another tensor than it was, as after `resize_token_embeddings`. A weight
    that changes in place, as in training, changes in both.
    """
    kept = _TWINS.get(model)
    if kept is None or any(ours is not theirs for ours, theirs in zip_longest(weights(model), weights(kept))):
        kept = _TWINS[model] = twin(model)
    return kept


def weights(model: PreTrainedModel) -> Iterator[Tensor]:
    """The parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()
