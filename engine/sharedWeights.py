"""Models that share the weights of another one: `RestrictedModel`, a draft that guesses few tokens, and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.cachedModel import CachedModel
from utils import UserError


class RestrictedHead(nn.Module):
    """An output layer for `tokens[N]` alone, cut from a whole one. The logits of all others, which `absent[V]` marks,
    are -inf: again after a cap on logits, by `cachedModel.logits_of`."""

    @torch.no_grad()  # Otherwise the rows keep the whole weight alive, for gradients.
    def __init__(self, whole: nn.Linear, tokens: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(whole.weight.shape[1], len(tokens), whole.bias is not None, dtype=whole.weight.dtype)
        self.inner.requires_grad_(False).to(whole.weight.device)
        self.inner.weight.copy_(whole.weight[tokens])
        if whole.bias is not None:
            self.inner.bias.copy_(whole.bias[tokens])
        self.register_buffer("tokens", tokens, persistent=False)
        absent = torch.ones(len(whole.weight), dtype=torch.bool, device=tokens.device).index_fill_(0, tokens, False)
        self.register_buffer("absent", absent, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The rows that are left of the weight, `[N, hidden]`."""
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = x.new_full((*x.shape[:-1], len(self.absent)), -torch.inf)
        logits[..., self.tokens] = self.inner(x)
        return logits


# Their modules, and objects that modules keep, hold nothing else that changes a text.
LIBRARIES = "transformers.", "torch.", f"{__package__}.", "accelerate.", "builtins."
PLAIN = (bool, int, float, str, NoneType)  # settings of a module
SHARED = (Tensor, list, dict, set, tuple)  # what a module keeps beside its parts, in whatever state it is
_OF_ANY = {*vars(nn.Module())}  # what every module keeps, its parts among them


class RestrictedModel(CachedModel):
    """A draft that gives logits for `tokens[N]` alone, and reads every token (FR-Spec, Zhao et al., arXiv 2502.14856).

    More than half of Pythia-70m's weights are its input and output embeddings, and each guess reads the whole output
    embedding. Text is mostly frequent tokens. The target draws the rarer ones: q is 0 there, so the text stays
    distributed exactly as the target's.

    It shares all weights but the output layer with `draft`, which is not changed. Create it before `draft` is compiled.
    """

    passes_gate = False  # `draft` has passed it, and differs by the output layer alone.

    def __init__(self, draft: CachedModel, tokens: Tensor) -> None:
        model = copy.copy(draft.model)  # The modules are shared, but not the dictionary of their names.
        model._modules = dict(draft.model._modules)
        whole = draft.model.get_output_embeddings()
        if isinstance(whole, RestrictedHead):
            raise UserError(
                f"{draft.name} already has an output layer of {len(whole.tokens)} tokens; leave out --draftVocab"
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < draft.vocabulary:
            raise UserError(
                f"{draft.name} has the tokens 0 to {draft.vocabulary - 1}, not all of those that it shall guess"
            )
        self.tokens = tokens.to(draft.device)
        model.set_output_embeddings(RestrictedHead(whole, self.tokens))
        if draft.model.get_output_embeddings() is not whole:
            draft.model.set_output_embeddings(whole)
            raise UserError(
                f"the output layer of {draft.name} cannot be restricted to some tokens; leave out --draftVocab, or "
                "name a draft that has the target's tokenizer"
            )
        name = f"{draft.name} ({len(tokens)} tokens)"
        super().__init__(model, draft.vocabulary, name, draft.cache_of, draft.features_of)
        self.reads_trees = draft.reads_trees


# {model: (its copy, what the copy shared when it was made, the settings it had)}
_COPIES: WeakKeyDictionary[PreTrainedModel, tuple[PreTrainedModel, list[Any], list[Any]]] = WeakKeyDictionary()


def sharing_copy(model: PreTrainedModel, kept: Sequence[Any] = ()) -> PreTrainedModel:
    """A second model that shares the weights and the hooks, and of `kept` what is SHARED. Setting or replacing a part
    of one does not change the other."""
    parts = [*model.parameters(), *model.buffers(), *(value for value in kept if isinstance(value, SHARED))]
    parts += [hook for module in model.modules() for hook in hooks_of(module)]
    try:
        return copy.deepcopy(model, {id(part): part for part in parts})
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        raise UserError(f"this {type(model).__name__} has an attribute that cannot be copied ({error})") from error


def library_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares the weights, with `transformers`' own attention."""
    twin = sharing_copy(model)
    twin.set_attn_implementation("sdpa")
    return twin


def kept_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The sharing copy that is kept for `model` as long as the model lives.

    It is created again if a weight was replaced, as by `resize_token_embeddings`, a module or what it keeps, a hook, or
    if a setting changed. What changes in place, as weights in training, changes in both. With a module or an object of
    another library, which may keep anything, each call makes a copy.
    """
    modules = list(model.modules())
    kept = [{name: value for name, value in vars(m).items() if name not in _OF_ANY} for m in modules]
    values = [value for of_module in kept for value in of_module.values()]
    owners = [getattr(each, "__self__", each) for each in (*modules, *values)]  # A method is its object's.
    if not all(f"{type(each).__module__}.".startswith(LIBRARIES) for each in owners):
        return sharing_copy(model, values)
    parts: list[Any] = [*model.parameters(), *model.buffers()]
    for module, of_module in zip(modules, kept):  # In the order of the modules: a hook may move to another one.
        parts += [type(module), *hooks_of(module), *(v for v in of_module.values() if not isinstance(v, PLAIN))]
    settings = [model.config.to_dict(), model.config._attn_implementation]
    settings += [(name, v if isinstance(v, PLAIN) else None) for of_module in kept for name, v in of_module.items()]
    settings += [[*module._forward_hooks_with_kwargs.values()] for module in modules]
    shared, before, had = _COPIES.get(model, (None, [], []))
    same = len(parts) == len(before) and all(a is b for a, b in zip(parts, before))
    if shared is None or not same or settings != had:
        shared = sharing_copy(model, values)
        _COPIES[model] = shared, parts, settings
    return shared


def hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
