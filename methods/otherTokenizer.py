"""`OtherTokenizerDrafter`: a draft model whose tokenizer is not the target's guesses tokens that both have (token-level
intersection; Timor et al., arXiv 2502.05202, algorithm 4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafter import Drafter, Guesses, no_guesses
from decoding.lengthRules import LengthRule
from decoding.model import Model
from decoding.rows import Rows, upload
from methods.drafters import guess
from methods.translation import GrowingText, Translation
from utils import Sampling

READ = 4  # Tokens that the draft reads at least before it guesses: few shapes serve most rounds.
GROWTH = 4  # Capacity in the draft's tokens for each token of the target.


class OtherTokenizerDrafter(Drafter):
    """A model with its own tokenizer guesses. It reads the committed text in its own tokens, and draws only tokens that
    both tokenizers have: `model` gives all others no probability (`engine.sharedWeights.RestrictedModel`).

    Its q, renormalised over these tokens, is carried over to the target's ids; elsewhere q is 0. So verification
    uses the q that a guess was drawn from, and the text stays the target's. In each round the end of the text is
    encoded anew, because its last tokens may have merged with what came after. The KV cache keeps what is still the
    same, and the model reads on from there. A row that outgrows the draft's room gets no more guesses.

    temperature, top_p: as in `ModelDrafter`.
    """

    def __init__(
        self, model: Model, translation: Translation, temperature: float | None = None, top_p: float | None = None
    ) -> None:
        self.model, self.translation, self.temperature, self.top_p = model, translation, temperature, top_p
        self.targets, self.drafts = translation.target.to(model.device), translation.draft.to(model.device)
        self.to_target = torch.zeros(model.vocabulary, dtype=torch.long, device=model.device)
        self.to_target[self.drafts] = self.targets
        reader = copy.copy(model)  # Rows of the target hold its tokens; the draft reads a translation.
        reader.vocabulary = translation.vocabulary
        self.models = [reader]

    def begin(self, rows: Rows) -> None:
        """Raises UserError if a prompt does not fit into the draft's context."""
        self.texts = [GrowingText(self.translation) for _ in rows.prompts]
        self.held = [text.row(prompt) for text, prompt in zip(self.texts, rows.prompts)]
        left, longest = rows.capacity - max(map(len, rows.prompts)), max(map(len, self.held))
        most = max(left, min(GROWTH * left, self.model.context - longest))
        self.rows = Rows(self.held, most, [self.model], batch=rows.batch)
        self.guessed: dict[int, list[int]] = {}  # {text: guesses that the cache holds after `held`}

    def read_prompts(self, rows: Rows) -> None:
        self.rows.numbers, self.rows.fresh = rows.numbers, rows.fresh
        self.model.prefill(self.rows)

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """At most `gammas[i]` guesses for row i, in the target's tokens."""
        if max(gammas) == 0:
            return no_guesses(rows, self.translation.vocabulary)
        tokens, positions, going = self.unread(rows, max(gammas))
        seen = rows.seen(self.translation.vocabulary, sampling)
        if seen is not None:  # The tokens that the target has seen, of those that the draft can guess.
            shared = seen.to(self.model.device)[:, self.targets]
            seen = shared.new_zeros(len(shared), self.model.vocabulary).index_copy_(1, self.drafts, shared)
        draft_sampling, stop = sampling.but(self.temperature, self.top_p), length.stop if length else None
        u = rows.uniform(gammas).T.to(self.model.device)
        drafts, draft_q = guess(self.model, tokens, positions, going, u, draft_sampling, stop, seen)
        self.guessed |= zip(rows.numbers, drafts[:, :-1].tolist())
        # 0, or nan where the draft's q is: a distribution is nan everywhere or nowhere.
        q = (draft_q[..., :1] * 0).repeat(1, 1, self.translation.vocabulary)
        q.index_copy_(-1, self.targets, draft_q.index_select(-1, self.drafts)).masked_fill_(~going[:, None, None], 0)
        return Guesses(self.to_target[drafts].to(rows.device), q.to(rows.device))

    def unread(self, rows: Rows, gamma: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last tokens of each row, `[B, w]`: READ, or as many as some row has not read. The positions of these and
        of all guesses but the last, `[B, w + gamma - 1]`. And which rows guess at all, bool `[B]`."""
        fits: list[bool] = []
        unread: list[int] = []
        for number, tokens, ended in zip(*rows.of_rows()):
            known = self.held[number] + self.guessed.get(number, [])
            text = self.held[number][:1] if ended else self.texts[number].row(tokens)
            fits.append(len(text) + gamma <= self.rows.capacity and not ended)
            self.held[number] = text = text if fits[-1] else text[:1]
            unread.append(len(text) - min(agreement(text, known), len(text) - 1))
        width = max(READ, *unread)
        block: list[list[int]] = []
        positions: list[list[int]] = []
        for number in rows.numbers:
            text = self.held[number]
            places = range(len(text) - width, len(text) + gamma - 1)
            positions.append([max(0, place) for place in places])
            block.append([text[place] for place in positions[-1][:width]])
        device = self.model.device
        return upload(block, device), upload(positions, device), upload(fits, device)


def agreement(text: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
