"""A draft that guesses only some tokens: what it shares, what it gives, and that the output does not show it."""

import helpers
import pytest
import torch
from outcomes import speculative_error

from decoding.drafter import Fixed, Guesses
from decoding.rows import Rows
from decoding.verification import block_rule
from engine.sharedWeights import RestrictedModel
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from utils import GREEDY, Sampling, probabilities


@pytest.mark.parametrize("family", [*helpers.FAMILIES, "gemma2"])  # Gemma 2 caps its logits, also those of -inf.
def test_its_logits_are_the_drafts_and_the_draft_is_as_before(family):
    draft, tokens = helpers.tiny(family, attn_implementation="eager"), torch.tensor([0, 3, 17, 60])
    if family == "gpt2":
        draft.model.config.tie_word_embeddings = True
        draft.model.tie_weights()
        assert draft.model.get_output_embeddings().weight is draft.model.get_input_embeddings().weight
    rows = Rows([[5, 60, 2], [11]], 4, [draft])
    before, layer = draft.prefill(rows), draft.model.get_output_embeddings()
    weights = {name: weight.clone() for name, weight in draft.model.state_dict().items()}
    small = RestrictedModel(draft, tokens)
    found = small.prefill(rows)
    assert (small.score(torch.tensor([[5, 60, 2]])) > -torch.inf).sum(-1).tolist() == [[4, 4, 4]]
    torch.testing.assert_close(found[:, tokens], before[:, tokens], atol=1e-5, rtol=1e-5)
    assert (found > -torch.inf).sum(1).tolist() == [4, 4]
    own = small.model.get_output_embeddings().weight
    assert len(own) == 4 and own.is_leaf and not own.requires_grad  # It keeps nothing of the whole weight alive.
    assert small.model.get_input_embeddings() is draft.model.get_input_embeddings()
    assert draft.model.get_output_embeddings() is layer and torch.equal(draft.prefill(rows), before)
    assert all(torch.equal(weight, weights[name]) for name, weight in draft.model.state_dict().items())


def error(cascade=False, kind=ModelDrafter, length=3, **options):
    """The largest difference between the probability of a text and the target's."""

    def drafter(_, mid, draft):
        drafter = kind(RestrictedModel(draft, torch.tensor([0, 2])))
        drafter.whole = draft
        return CascadeDrafter(mid, drafter, Fixed(1)) if cascade else drafter

    return speculative_error(drafter, length=length, prefixes=[[1, 2, 0, 1]], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"length": 4},
        {"verify": block_rule},
        {"cascade": True},
        {"sampling": GREEDY},
        {"sampling": Sampling(0.9, 0, 0.9, 1.3)},
    ],
)
def test_texts_have_the_targets_probabilities(options):
    assert error(**options) < 1e-6


class WholeVocabulary(ModelDrafter):
    """The mistake that invites itself: drawn from the small vocabulary, but q is the draft's own over all tokens."""

    def draft(self, rows, gammas, sampling, length=None):
        guesses = super().draft(rows, gammas, sampling, length)
        drafts, q = guesses.drafts, guesses.q
        for i in range(q.shape[1]):
            for end in rows.lengths.unique().tolist():
                own = rows.lengths == end
                text = torch.cat([rows.sequence[own, :end], drafts[own, :i]], 1)
                q[own, i] = probabilities(self.whole.score(text)[:, -1], sampling)
        return Guesses(drafts, q)


def test_a_q_over_the_whole_vocabulary_is_caught():
    assert error(kind=WholeVocabulary) > 1e-3
