"""The ways to guess what the target will say.

A drafter has `models` (what must read the rows), `begin(rows)` once, and `draft(rows, gamma, sampling, generator)` each
round, which returns the guesses `[B, gamma]` and the distributions `q[B, gamma, V]` each was really drawn from.
"""

import torch

from utils import draw, probabilities, seen_after


class ModelDrafter:
    """A smaller model of the same vocabulary guesses, one token at a time."""

    def __init__(self, model):
        self.model = model
        self.models = [model]

    def begin(self, rows):
        """Read the prompts."""
        self.model.read_prompt(rows)

    def draft(self, rows, gamma, sampling, generator=None):
        """Guess the next `gamma` tokens of each row.

        The last two committed tokens are read again: the draft never saw the round's last token, and after full
        acceptance not its own last guess either. Two tokens cost what one costs.
        """
        drafts = rows.sequence.new_zeros(len(rows.tokens), gamma)
        q = torch.zeros(*drafts.shape, self.model.vocabulary, device=rows.device)
        tokens, positions = rows.last(2), rows.positions(-2, gamma + 1)
        seen = rows.seen(self.model.vocabulary, sampling)
        for i in range(gamma):
            logits = self.model.forward(tokens, positions[:, :2] if i == 0 else positions[:, i + 1:i + 2])
            q[:, i] = probabilities(logits[:, -1], sampling, seen)
            drafts[:, i] = draw(q[:, i], generator)
            tokens = drafts[:, i:i + 1]
            seen = seen_after(seen, tokens)
            seen = seen if seen is None else seen[:, 0]
        return drafts, q
