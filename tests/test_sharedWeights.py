"""A draft that guesses only some tokens: what it shares, what it gives, and that the output does not show it."""

import helpers
import pytest
import torch
from outcomes import speculative_error
from test_specSampling import PROMPTS, near

from decoding.drafter import Fixed, Guesses
from decoding.rows import Rows
from decoding.verification import block_rule, token_rule
from engine.sharedWeights import RestrictedModel
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling, probabilities


def restricted(draft, tokens):
    return ModelDrafter(RestrictedModel(draft, torch.tensor(tokens)))


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_its_logits_are_the_drafts_and_the_draft_is_as_before(family):
    draft, tokens = helpers.tiny(family), torch.tensor([0, 3, 17, 60])
    if family == "gpt2":
        draft.model.config.tie_word_embeddings = True
        draft.model.tie_weights()
        assert draft.model.get_output_embeddings().weight is draft.model.get_input_embeddings().weight
    rows = Rows([[5, 60, 2], [11]], 4, [draft])
    before, layer = draft.prefill(rows), draft.model.get_output_embeddings()
    weights = {name: weight.clone() for name, weight in draft.model.state_dict().items()}
    small = RestrictedModel(draft, tokens)
    found = small.prefill(rows)
    torch.testing.assert_close(found[:, tokens], before[:, tokens], atol=1e-5, rtol=1e-5)
    assert (found > -torch.inf).sum(1).tolist() == [4, 4]
    own = small.model.get_output_embeddings().weight
    assert len(own) == 4 and own.is_leaf and not own.requires_grad  # It keeps nothing of the whole weight alive.
    assert small.model.get_input_embeddings() is draft.model.get_input_embeddings()
    assert draft.model.get_output_embeddings() is layer and torch.equal(draft.prefill(rows), before)
    assert all(torch.equal(weight, weights[name]) for name, weight in draft.model.state_dict().items())


@pytest.mark.parametrize(
    "sampling", [Sampling(0.85, 0, 0.9), Sampling(0.9, 2, 0.9, 1.4), Sampling(1.0, 50, 1.0), GREEDY]
)
def test_q_is_the_filtered_distribution_over_its_tokens_and_zero_elsewhere(sampling):
    draft, tokens = helpers.tiny(), [0, 3, 5, 17, 60]
    rows, drafter = Rows(PROMPTS, 6, [draft]), restricted(draft, tokens)
    drafter.begin(rows)
    drafter.read_prompts(rows)
    guesses = drafter.draft(rows, [2] * rows.size, sampling)
    drafts, q = guesses.drafts, guesses.q
    logits = draft.prefill(rows)
    elsewhere = torch.ones(61, dtype=torch.bool).index_fill_(0, torch.tensor(tokens), False)
    logits = logits.masked_fill(elsewhere, -torch.inf)
    torch.testing.assert_close(q[:, 0], probabilities(logits, sampling, rows.seen(61, sampling)), atol=1e-5, rtol=1e-4)
    assert (q.gather(-1, drafts[..., None]) > 0).all() and not q[..., elsewhere].any()


@pytest.mark.parametrize("verify, tokens", [(token_rule, list(range(0, 61, 2))), (block_rule, [9])])
def test_greedy_rows_equal_plain_greedy(tokens, verify):
    target = helpers.tiny()
    draft, mid = near(target, 0.08), near(target, 0.05, 3)
    wanted = regrSampling(PROMPTS, target, 24, GREEDY)[0]
    for drafter in restricted(draft, tokens), CascadeDrafter(mid, restricted(draft, tokens), Fixed(2), verify):
        assert specSampling(PROMPTS, target, drafter, 24, 3, GREEDY, verify=verify)[0] == wanted


def error(cascade=False, draft=restricted, length=3, **options):
    """The largest difference between the probability of a text and the target's."""

    def drafter(_, mid, small):
        drafter = draft(small, [0, 2])
        return CascadeDrafter(mid, drafter, Fixed(1)) if cascade else drafter

    return speculative_error(drafter, length=length, prefixes=[[1, 2, 0, 1]], **options)


@pytest.mark.parametrize(
    "options", [{"length": 4}, {"verify": block_rule}, {"cascade": True}, {"sampling": Sampling(0.9, 0, 0.9, 1.3)}]
)
def test_texts_have_the_targets_probabilities(options):
    assert error(**options) < 1e-6


class WholeVocabulary(ModelDrafter):
    """The mistake that invites itself: drawn from the small vocabulary, but q is the draft's own over all tokens."""

    def __init__(self, draft, tokens):
        super().__init__(RestrictedModel(draft, torch.tensor(tokens)))
        self.whole = draft

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
    assert error(draft=WholeVocabulary) > 1e-3
