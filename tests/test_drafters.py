"""How guesses come about. That no drafter shows in the output is in test_methods.py, what it reads in
test_cachedModel.py."""

import helpers
import pytest
import torch
from conftest import refused

from decoding.draftLength import Fixed
from decoding.rows import Rows
from methods.cascade import CascadeDrafter
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from utils import Sampling

FREE = Sampling(1.0, 0, 1.0)


@pytest.mark.parametrize(
    "text, wanted",
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),  # the longest ending found twice
        ([2, 3, 7, 1, 2, 3, 9, 4, 2, 3], [9, 4, 2, 3]),  # the last time it occurred
        ([5, 3, 8, 3], [8, 3]),  # a shorter one where the longer is new
        ([4, 4, 4], [4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_lookup_guesses_what_followed_the_last_time(text, wanted):
    assert LookupDrafter(61, 3).after(text) == wanted


def test_rows_without_a_guess_have_a_q_of_0_beside_those_with_one():
    drafter = LookupDrafter(10, 2)
    guesses = drafter.draft(Rows([[1, 2, 3, 1, 2], [4, 5]], 6, [helpers.tiny()]), 4, FREE)
    drafts, q = guesses.drafts, guesses.q
    assert drafts[0].tolist() == [3, 1, 2] and q.sum(-1).tolist() == [[1, 1, 1], [0, 0, 0]]
    assert (q[0].argmax(-1) == drafts[0]).all()
    guesses = drafter.draft(Rows([[4, 5]], 6, [helpers.tiny()]), 4, FREE)
    assert guesses.drafts.shape == (1, 0) and guesses.q.shape == (1, 0, 10)
    with refused("n-gram", "1 or more"):
        LookupDrafter(10, 0)


@pytest.mark.parametrize("cascade", [False, True])
def test_guesses_come_from_the_q_they_are_returned_with(cascade):
    """q is what the model says after the tokens committed and guessed, read without a cache."""
    model, drafter = helpers.tiny(seed=1), ModelDrafter(helpers.tiny(seed=1))
    if cascade:
        drafter = CascadeDrafter(model, ModelDrafter(helpers.tiny(seed=2)), Fixed(2))
    prompts = [[5, 9, 2, 7], [11]]
    rows = Rows(prompts, 10, drafter.models)
    drafter.begin(rows)
    guesses = drafter.draft(rows, 4, FREE, torch.Generator().manual_seed(0))
    for prompt, drafts, given in zip(prompts, guesses.drafts.tolist(), guesses.q):
        wanted = model.score(torch.tensor([prompt + drafts]))[0, len(prompt) - 1 : -1].softmax(-1)
        torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-4)
    assert drafter.draft(rows, 0, FREE).drafts.shape == (2, 0)
