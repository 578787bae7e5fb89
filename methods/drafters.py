"""`ModelDrafter`: a smaller model guesses the target's next tokens. decoding/drafter.py documents its methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoding.drafter import Drafter, Guesses, LengthRule, no_guesses
from decoding.model import Model
from decoding.rows import Rows
from utils import Sampling, seen_after


class DrafterWithModel(Drafter):
    """A drafter with a model that follows the rows.

    The model reads the last two committed tokens of each round. It has not seen the last one, and after full acceptance
    it has not read its own last guess either. Two tokens cost what one costs. A round without guesses leaves it one
    token further behind. A model that shares the target's KV cache is never behind. One that reads the target's
    features reads all tokens of the last round again: the target had not read them when they were guessed.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.models = [model]

    def begin(self, rows: Rows) -> None:
        self.behind = 1

    def read_prompts(self, rows: Rows) -> None:
        if self.model.cache_of is None:
            self.model.prefill(rows)

    def rewind(self, count: int) -> None:
        self.behind += count

    def unread(self, guesses: int) -> int:
        """Begin a round in which at most `guesses` guesses are accepted. Returns how many tokens before the last one
        the model has to read."""
        unread, self.behind = self.behind, guesses if self.model.reads_features else 1
        return unread if self.model.cache_of is None else 0


class ModelDrafter(DrafterWithModel):
    """A smaller model with the target's vocabulary guesses, one token after the other.

    temperature, top_p: of the draft alone; None: the target's. Any value is lossless, because verification uses the q
    that the guess was drawn from. How many guesses are accepted depends on them: sum min(p, q).
    The draft may be on a device of its own. Then tokens travel there, and the guesses and their q back.
    """

    def __init__(self, model: Model, temperature: float | None = None, top_p: float | None = None) -> None:
        super().__init__(model)
        self.temperature, self.top_p = temperature, top_p

    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        if max(gammas) == 0:
            self.behind += 1
            return no_guesses(rows, self.model.vocabulary)
        model, draft_sampling = self.model, sampling.but(self.temperature, self.top_p)
        tokens, positions = (x.to(model.device) for x in rows.last(1 + self.unread(max(gammas)), max(gammas) - 1))
        seen, stop = rows.seen(model.vocabulary, sampling), length.stop if length else None
        seen = None if seen is None else seen.to(model.device)
        u, going = rows.uniform(gammas).T.to(model.device), rows.going.to(model.device)
        # A row that guesses nothing now draws one token all the same: so the model reads what is committed.
        counts = [max(1, gamma) for gamma in gammas]
        ragged = counts if min(counts) < max(gammas) else None
        drafts, q = guess(model, tokens, positions, going, u, draft_sampling, stop, seen, ragged)
        return Guesses(drafts.to(rows.device), q.to(rows.device))


def guess(
    model: Model,
    tokens: Tensor,
    positions: Tensor,
    going: Tensor,
    u: Tensor,
    sampling: Sampling,
    stop: Callable[[Tensor], Tensor] | None = None,
    seen: Tensor | None = None,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Guesses of a draft model after a block, at most one for each row of `u[n, B]`: int64 `[B, n]`, and their q,
    float32 `[B, n, V]`.

    going: bool `[B]`, the rows that guess at all. stop: `LengthRule.stop`. Where a row has stopped, its q is 0, and no
    more tokens are drawn once it has stopped every row. The other arguments are those of `Model.draw`; all tensors are
    on the model's device.
    """
    if stop is None:
        drafts, laws = model.draw(tokens, positions, u, sampling, seen, counts)
        return drafts.clamp_(max=model.vocabulary - 1), laws  # A guess from nan is no token: the round reports it.
    drawn: list[Tensor] = []
    q: list[Tensor] = []
    # Whether all rows have stopped is a host sync, so on a GPU it is checked only after every second token. Drawing all
    # tokens would need no sync at all, but most of them would lie past the stop: that is far slower.
    piece = 1 if tokens.device.type == "cpu" else 2
    for start in range(0, len(u), piece):
        if drawn and not going.any():
            break
        numbers = u[start : start + piece]
        reach = tokens.shape[1] + len(numbers) - 1
        x, laws = model.draw(tokens, positions[:, :reach], numbers, sampling, seen)
        x = x.clamp(max=laws.shape[-1] - 1)
        for token, law in zip(x.unbind(1), laws.unbind(1)):
            q.append(law * going[:, None])
            going = going & ~stop(q[-1].gather(1, token[:, None])[:, 0])
        after = seen_after(seen, x)
        seen = None if after is None else after[:, -1]
        drawn.append(x)
        tokens, positions = x[:, -1:], positions[:, reach:]
    return torch.cat(drawn, 1), torch.stack(q, 1)
