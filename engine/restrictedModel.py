"""A draft that guesses only frequent tokens: its output layer has their rows alone (FR-Spec, Zhao et al., arXiv
2502.14856).

More than half of Pythia-70m's weights are the two layers that know every token, and each guess reads all of the one
that puts out. Text is mostly frequent tokens; a rarer one is left to the target, for q is 0 there: the output stays
exactly the target's.
"""

import copy

import torch
from torch import nn

from engine.cachedModel import CachedModel
from inputs.texts import load_corpora
from utils import UserError


def most_frequent(count, tokenizer):
    """The `count` most frequent tokens of the sample texts, int64 `[count]` in ascending order: the end of text among
    them, equally frequent and unseen ones by id (a byte-pair encoding numbers its tokens roughly by frequency). Raises
    UserError where the tokenizer has fewer."""
    if count > len(tokenizer):
        raise UserError(f"--draftVocab {count} is more than the {len(tokenizer)} tokens there are")
    counts = torch.zeros(len(tokenizer), dtype=torch.long)
    for corpus in load_corpora("sample"):
        for document in corpus.documents:
            counts += torch.bincount(
                torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.long),
                minlength=len(tokenizer),
            )
    if tokenizer.eos_token_id is not None:
        counts[tokenizer.eos_token_id] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values


class Few(nn.Module):
    """An output layer for `tokens[N]` alone, of a whole one; the logits of all others are -inf."""

    def __init__(self, whole, tokens):
        super().__init__()
        self.inner = nn.Linear(whole.weight.shape[1], len(tokens), whole.bias is not None, dtype=whole.weight.dtype)
        self.inner.requires_grad_(False).to(whole.weight.device)
        self.inner.weight.copy_(whole.weight[tokens])
        if whole.bias is not None:
            self.inner.bias.copy_(whole.bias[tokens])
        self.register_buffer("tokens", tokens, persistent=False)
        self.vocabulary = len(whole.weight)

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        logits = x.new_full((*x.shape[:-1], self.vocabulary), -torch.inf)
        logits[..., self.tokens] = self.inner(x)
        return logits


class RestrictedModel(CachedModel):
    """A draft (`CachedModel`) that gives logits for `tokens[N]` alone, and reads every token.

    All but the output layer are the draft's own weights, and the draft stays as it was: what else it is asked for is
    of its whole vocabulary. To be made before the draft is compiled."""

    def __init__(self, draft, tokens):
        model = copy.copy(draft.model)  # the modules are shared, the dictionary of their names is not
        model._modules = dict(draft.model._modules)
        whole = draft.model.get_output_embeddings()
        self.tokens = tokens.to(draft.device)
        model.set_output_embeddings(Few(whole, self.tokens))
        if draft.model.get_output_embeddings() is not whole:
            draft.model.set_output_embeddings(whole)
            raise UserError(f"the output layer of {draft.name} cannot be restricted; leave out --draftVocab")
        super().__init__(model, draft.vocabulary, f"{draft.name} ({len(tokens)} tokens)")
