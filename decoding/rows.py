"""`Rows`: the committed tokens of a ragged batch, whose rows grow by different amounts.

A batch may be smaller than the number of texts. Then the texts are a queue: when one ends, its row goes to the next
prompt, while the other rows continue (continuous batching; Yu et al., Orca, OSDI 2022).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Generator, Tensor

from utils import Sampling, UserError, not_finite, upload

if TYPE_CHECKING:
    from decoding.model import Model

HOLDING = threading.Lock()  # of `Model.holds`

# callback(text, tokens, guessed): a text has grown by `tokens`; the first `guessed` of them are accepted guesses.
Callback = Callable[[int, list[int], int], None]
# The id that ends a text, several ids, or ends(text, token): whether it ends at its new token. Called once for each.
EndOfText = int | Iterable[int] | Callable[[int, int], bool] | None
# For all texts, or one for each: then a text does not depend on which others are decoded with it.
Generators: TypeAlias = Generator | Sequence[Generator] | None


def check_vocabularies(*models: Any) -> None:
    """Raise UserError unless all models have one vocabulary."""
    least, *others = sorted({model.vocabulary for model in models})
    if others:
        raise UserError(f"the models' vocabularies of {least} and {others[0]} tokens differ: cut them to one size")


def check_room(prefixes: Sequence[Sequence[int]], max_len: int, models: Sequence[Any]) -> None:
    """Raise UserError unless `models` can read every prefix (token ids) and `max_len` tokens more. Of a model only
    `name`, `vocabulary` and `context` are read, which `inputs.texts.ModelLimits` has too."""
    if not isinstance(max_len, Integral) or max_len < 1:
        raise UserError(f"maxLen must be a whole number of at least 1, not {max_len}")
    if not prefixes or not all(prefixes):
        raise UserError("the prompt is empty: give at least one token")
    vocabulary = min(model.vocabulary for model in models)
    if not all(0 <= token < vocabulary for prefix in prefixes for token in prefix):
        raise UserError(f"the prompt contains a token id outside the models' vocabulary of {vocabulary}")
    longest, least = max(map(len, prefixes)), min(models, key=lambda model: model.context)
    if longest + max_len > least.context:
        raise UserError(
            f"the prompt's {longest} tokens and maxLen {max_len} exceed the context of {least.name} "
            f"({least.context} tokens): shorten the prompt or lower maxLen"
        )


def ids_of(ends: Any) -> set[int]:
    """The ids that end a text, of one, several or None. Raises TypeError for what is no id."""
    if isinstance(ends, Iterable) and getattr(ends, "ndim", None) != 0:  # An array may be a single number.
        return set(map(index, ends))
    return set() if ends is None else {index(ends)}


def check_caches(target: Model, *drafts: Model) -> None:
    """Raise UserError for a draft that finds the committed tokens in the KV cache or features of a model which does not
    read them in this call."""
    sources = [(draft, draft.cache_of or draft.features_of) for draft in drafts]
    alone = [draft for draft, source in sources if source is None]
    read = {id(getattr(keeper, "store", keeper)) for model in (target, *alone) for keeper in model.keepers}
    for draft, source in sources:
        if source is not None and id(getattr(source, "store", source)) not in read:
            unread = f"{draft.name} reads the keys or features of {source.name}, which has read nothing in this call"
            raise UserError(f"{unread}: create it from a model of this call, or prepare both as docs/library.md shows")


def uniform(*shape: int, device: torch.device, generator: Generator | None = None) -> Tensor:
    """Uniform numbers in [0, 1), float32, drawn on the generator's device: it may be another than `device`."""
    drawn = torch.rand(
        *shape, device=device if generator is None else generator.device, generator=generator, dtype=torch.float32
    )
    return drawn.to(device)


@dataclass
class Record:
    """One text's history. A round is one forward of the target; round 0 is the prefill.

    times: seconds from the call to the moment each round's tokens were on the host.
    committed: tokens each round added; their sum is the length of the output.
    drafted, accepted: tokens guessed in each round (of a tree, its levels), and how many of them verification accepted;
        without guesses after the end of the text.
    begun: seconds from the call to the moment the text got its row of the batch.
    """

    times: list[float] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    begun: float = 0.0

    def add(self, now: float, committed: int, drafted: int, accepted: int) -> None:
        self.times.append(now)
        self.committed.append(committed)
        self.drafted.append(drafted)
        self.accepted.append(accepted)

    @property
    def tokens(self) -> int:
        return sum(self.committed)

    @property
    def ttft(self) -> float:
        """Time to the first token, in seconds. Waiting in a queue does not count."""
        return self.times[0] - self.begun

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the last token."""
        return self.times[-1] - self.begun

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds; nan for a single token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else float("nan")

    @property
    def throughput(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens committed by a round of drafting and scoring; prefill does not count as one."""
        rounds = self.committed[1:]
        return sum(rounds) / len(rounds) if rounds else float("nan")

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """[(tested, passed), ...]: how often the i-th guess of a round was tested, that is, all guesses before it had
        passed; and how often it passed. In a tree the i-th level counts as tested if the level above it was reached,
        also where the accepted guess there has none below it."""
        counts = [[0, 0] for _ in range(max(self.drafted, default=0))]
        for drafted, accepted in zip(self.drafted, self.accepted):
            for i in range(min(accepted + 1, drafted)):
                counts[i][0] += 1
                counts[i][1] += i < accepted
        return [(tested, passed) for tested, passed in counts]

    @property
    def alpha(self) -> float:
        """Acceptance rate: guesses that passed over guesses tested. The paper's alpha, if guesses pass independently.
        nan if nothing was guessed."""
        tested, passed = (sum(column) for column in zip(*self.acceptance_by_position or [(0, 0)]))
        return passed / tested if tested else float("nan")


class Rows:
    """A batch of texts: prefixes of different lengths, and the tokens generated after each.

    prefixes: lists of token ids (or an int tensor `[B, L]`). Every text gets at most `max_len` more tokens. It ends
        early at `end_of_text`, which is kept as its last token. That is an id, several ids, or `ends(text, token)`,
        called for each token in order.
    models: the models that will read the rows. The first is the target, whose tokens the rows grow by. The shortest
        context among them is the limit, and they have one vocabulary.
    callback: called as `callback(text, tokens, guessed)` when a text has grown; the first `guessed` tokens are accepted
        guesses, the rest is the target's own.
    spare: slots that the models' caches have beyond the rows' capacity, for the nodes of a tree of guesses.
    generator: of the texts' uniform numbers: one for all, or one for each text.
    batch: how many texts are decoded at a time, the others wait; None: all.
    Raises UserError before any work if a prefix is empty, holds an unknown token or leaves no room for `max_len`.

    tokens, records: of each text, in the order of `prefixes`.
    numbers: the text in each row of the batch. State of a text is stored under its number, not under its row.
    texts, ended: the committed tokens of the text in each row and whether it has ended, on the host.
    lengths, going: int64 and bool `[B]`, committed tokens of each row and whether it continues, on the device.
    fresh: the rows whose prompts the models have not read yet.
    in_callbacks: seconds that `callback` took so far.
    hold: the thread of the call, until it ends.
    unread: how many committed tokens before each row's last one the target has not read yet. Always 0, except in a
        cascade, where other models extend the rows.
    """

    def __init__(
        self,
        prefixes: Sequence[Sequence[int]],
        max_len: int,
        models: Sequence[Model],
        end_of_text: EndOfText = None,
        callback: Callback | None = None,
        spare: int = 0,
        generator: Generators = None,
        batch: int | None = None,
    ) -> None:
        self.start = time.perf_counter()
        try:  # `int` would cut fractions off, and read text.
            self.prompts = [list(map(index, prefix)) for prefix in prefixes]
            ids = set[int]() if callable(end_of_text) else ids_of(end_of_text)
        except TypeError as error:
            raise UserError(f"prompts are lists of token ids, and end_of_text is an id or several ({error})") from None
        check_room(self.prompts, max_len, models)
        check_vocabularies(*models)
        if batch is not None and batch < 1:
            raise UserError(f"a batch has 1 row or more, not {batch}")
        self.max_len, self.callback, self.in_callbacks = max_len, callback, 0.0
        self.ends = end_of_text if callable(end_of_text) else lambda text, token: token in ids
        self.models, self.target, self.device = models, models[0], models[0].device
        self.capacity, self.spare = max(map(len, self.prompts)) + max_len, spare
        self.generator = generator
        if isinstance(generator, Sequence) and len(generator) != len(self.prompts):
            raise ValueError(f"{len(self.prompts)} texts need as many generators, not {len(generator)}")
        self.tokens: list[list[int]] = [[] for _ in self.prompts]
        self.records = [Record() for _ in self.prompts]
        self.batch = min(batch or len(self.prompts), len(self.prompts))
        # One column more than a row can fill. Guesses past a row's end are written there and never read.
        self.sequence = torch.zeros(self.batch, self.capacity + 1, dtype=torch.long, device=self.device)
        self.numbers, self.texts, self.ended = [0] * self.batch, [[0] for _ in range(self.batch)], [True] * self.batch
        self.fresh: list[int] = []
        self.waiting = 0  # the first prompt of the queue
        self.unread = 0
        self.began, self.hold = False, [threading.get_ident()]
        self._offsets: dict[tuple[int, int], Tensor] = {}
        self.take_prompts()

    def refill(self) -> bool:
        """Before each round: rows whose texts have ended go to the next prompts of the queue. Returns whether any text
        has not ended.

        When no prompt waits, rows that have ended are taken out of the batch. Raises UserError if another call has used
        a model's KV cache since the last round, if another thread's call uses it as this one begins, or if a draft
        needs what no model of this call reads.
        """
        goes_on = self.waiting < len(self.prompts) or not all(self.ended)
        remedy = "give each call models of its own, which may share their weights"
        if not self.began:
            check_caches(*self.models)
        with HOLDING:
            for keeper in [keeper for model in self.models for keeper in model.keepers] if goes_on else ():
                if self.began and keeper.holds is not self.hold:
                    raise UserError(f"{keeper.name} began another text before this one ended, in a callback: {remedy}")
                if keeper.holds and keeper.holds[0] != self.hold[0]:
                    raise UserError(f"{keeper.name} is writing another text in another thread: {remedy}")
                keeper.holds = self.hold
        self.began = True
        if not self.fresh or self.tokens[self.numbers[self.fresh[0]]]:  # The models have read the fresh rows.
            self.fresh = []
            if any(self.ended):
                self.take_prompts()
                self.close_ranks()
        return bool(self.fresh) or not all(self.ended)

    def __enter__(self) -> None:
        """`with rows:` around all rounds of a call. Then other threads may use the models."""

    def __exit__(self, *error: object) -> None:
        self.hold.clear()

    def take_prompts(self) -> None:
        """Give the rows whose texts have ended to the next prompts."""
        free = [row for row, ended in enumerate(self.ended) if ended]
        self.fresh = free[: len(self.prompts) - self.waiting]
        now = time.perf_counter() - self.start
        for row in self.fresh:
            self.numbers[row], self.ended[row] = self.waiting, False
            self.texts[row] = list(self.prompts[self.waiting])
            self.records[self.waiting].begun = now if self.waiting >= self.batch else 0.0
            self.waiting += 1
        if self.fresh:
            prompts = self.padded_prompts(self.fresh)
            self.sequence[upload(self.fresh, self.device), : prompts.shape[1]] = prompts
            self.lengths, self.going = self.state()

    def close_ranks(self) -> None:
        """Take rows that have ended out of the batch, if the target is faster with fewer rows. The last rows move to
        the places of others."""
        going = [row for row, ended in enumerate(self.ended) if not ended]
        size = self.target.rows_computed(len(going))
        if not going or size >= len(self.ended):
            return
        sources = list(range(size))  # the row that moves to each place
        for row, last in zip([row for row in sources if self.ended[row]], [row for row in going if row >= size]):
            sources[row] = last
            for model in self.models:
                model.copy_row(last, row)
        self.numbers, self.texts = [self.numbers[row] for row in sources], [self.texts[row] for row in sources]
        self.ended = [self.ended[row] for row in sources]
        self.sequence = self.sequence[upload(sources, self.device)]
        self.lengths, self.going = self.state()

    @property
    def size(self) -> int:
        return len(self.numbers)

    def padded_prompts(self, rows: Sequence[int]) -> Tensor:
        """The prompts of some rows, int64 `[R, L]`; shorter ones are padded with their last token."""
        prompts = [self.prompts[self.numbers[row]] for row in rows]
        longest = max(map(len, prompts))
        return upload([prompt + [prompt[-1]] * (longest - len(prompt)) for prompt in prompts], self.device)

    def of_fresh(self, x: Tensor) -> Tensor:
        """The entries `[F, ...]` of `x[B, ...]` that belong to the fresh rows."""
        return x if len(self.fresh) == self.size else x[upload(self.fresh, x.device)]

    def uniform(self, counts: Sequence[int], width: int | None = None, last: bool = False) -> Tensor:
        """Uniform numbers in [0, 1), float32 `[B, width]`; row i has `counts[i]`.

        They come from the text's own generator, if each has one, and then a row that has ended draws none: its text
        does not depend on other rows. width: None: the most. A row with more numbers drops the last ones.
        last: the last number drawn stands in the last column.
        """
        width = max(counts) if width is None else width
        if not isinstance(self.generator, Sequence):
            return uniform(len(counts), width, device=self.device, generator=self.generator)
        u = torch.zeros(len(counts), width, dtype=torch.float32, device=self.generator[0].device)
        for row, (count, ended) in enumerate(zip(counts, self.ended)):
            if count and not ended:
                drawn = uniform(count, device=u.device, generator=self.generator[self.numbers[row]])
                u[row, :count] = drawn[:width]
                if last:
                    u[row, -1] = drawn[-1]
        return u.to(self.device)

    @property
    def committed_lengths(self) -> list[int]:
        """Committed tokens of each row, on the host. In a cascade the rows of the inner sampler hold more: guesses that
        the outer target may still reject."""
        return list(map(len, self.texts))

    @property
    def left(self) -> list[int]:
        """Tokens each row may still add: 0 if it has ended."""
        return [
            0 if ended else len(self.prompts[number]) + self.max_len - len(text)
            for number, text, ended in zip(self.numbers, self.texts, self.ended)
        ]

    def positions(self, first: int, count: int) -> Tensor:
        """Positions `lengths + first, ..., lengths + first + count - 1`, int64 `[B, count]`.

        They are clamped to the first and the last position a row can have. Reading the first token again does no harm.
        What is read at the last position lies past the row's end: its logits are never used, and no later token attends
        to it.
        """
        return (self.lengths[:, None] + self.offsets(first, count)).clamp_(0, self.capacity - 1)

    def offsets(self, first: int, count: int) -> Tensor:
        """first, ..., first + count - 1, int64 `[count]`, made once."""
        if (first, count) not in self._offsets:
            self._offsets[first, count] = torch.arange(first, first + count, device=self.device)
        return self._offsets[first, count]

    def last(self, count: int, more: int = 0) -> tuple[Tensor, Tensor]:
        """The last `count` committed tokens of each row, `[B, count]`, and the positions of these and of `more` tokens
        after them, `[B, count + more]`. A row with fewer tokens repeats its first one."""
        positions = self.positions(-count, count + more)
        return self.sequence.gather(1, positions[:, :count]), positions

    def seen(self, vocabulary: int, sampling: Sampling) -> Tensor | None:
        """Which tokens each row holds so far: bool `[B, vocabulary]`. None unless `sampling` has a repetition
        penalty."""
        if sampling.repetition_penalty == 1:
            return None
        held = torch.arange(self.capacity + 1, device=self.device) < self.lengths[:, None]
        tokens = self.sequence.where(held, self.sequence[:, :1])
        return torch.zeros(len(tokens), vocabulary, dtype=torch.bool, device=self.device).scatter_(1, tokens, True)

    def commit_first(self, token: Tensor) -> None:
        """Add `token[F]` to the fresh rows, whose prompts were read."""
        values = token.tolist()
        now = time.perf_counter() - self.start
        rows, ends = upload([self.fresh, [len(self.texts[row]) for row in self.fresh]], self.device)
        self.sequence[rows, ends] = token
        for row, value in zip(self.fresh, values):
            self.grow(row, [value], 0, 0, now)
        self.lengths, self.going = self.state()

    def commit_one(self, token: Tensor) -> None:
        """Add `token[B]` to each row that has not ended."""
        self.commit(token[:, None][:, :0], torch.zeros_like(token), token)

    def commit(
        self, drafts: Tensor, accepted: Tensor, token: Tensor, counts: Tensor | None = None, note: Tensor | None = None
    ) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """Add the first `accepted[B]` of `drafts[B, g]` and then `token[B]` to each row that has not ended.

        counts: int64 `[B]`, how many of the drafts are a row's own guesses (None: all). note: `[B]`, other
        results that the host needs, if any. The host reads everything at once: the only host sync of a round.
        Returns {text: count}, {text: accepted}, {text: note} of the texts that had not ended. Raises UserError if there
        is no token because the target's distribution was nan.
        """
        fresh = torch.cat([drafts, token[:, None]], 1).scatter_(1, accepted[:, None], token[:, None])
        where = self.lengths[:, None] + self.offsets(0, fresh.shape[1])
        self.sequence.scatter_(1, where.clamp_(max=self.capacity), fresh)
        self.lengths = self.lengths + (accepted + 1) * self.going
        counts = torch.full_like(accepted, drafts.shape[1]) if counts is None else counts
        columns = [accepted, counts] if note is None else [accepted, counts, note]
        host = torch.cat([fresh, torch.stack(columns, 1)], 1).tolist()
        now, before, width = time.perf_counter() - self.start, sum(self.ended), fresh.shape[1]
        drafted, passed, notes = {}, {}, {}
        for row, values in enumerate(host):
            if not self.ended[row]:
                text = self.numbers[row]
                passed[text], drafted[text] = values[width : width + 2]
                notes[text] = 0 if note is None else values[-1]
                self.grow(row, values[:width], drafted[text], passed[text], now)
        if sum(self.ended) > before:  # A row that ends may keep less than was added.
            self.lengths, self.going = self.state()
        self.unread = 0
        return drafted, passed, notes

    def state(self) -> tuple[Tensor, Tensor]:
        """`lengths` and `going`, from the host's data."""
        state = upload([[len(text) for text in self.texts], [not ended for ended in self.ended]], self.device)
        return state[0], state[1].bool()

    def grow(self, row: int, tokens: list[int], drafted: int, accepted: int, now: float) -> None:
        """Record that a row grew by the first `accepted` of `tokens` and the one after them, `now` seconds after the
        start."""
        if tokens[accepted] >= self.target.vocabulary:
            raise not_finite(self.target.name, self.target.dtype)
        number = self.numbers[row]
        tokens = tokens[: min(accepted + 1, self.max_len - len(self.tokens[number]))]
        end = next((i for i, token in enumerate(tokens) if self.ends(number, token)), None)
        tokens = tokens if end is None else tokens[: end + 1]
        self.tokens[number] += tokens
        self.texts[row] += tokens
        self.ended[row] = len(self.tokens[number]) == self.max_len or end is not None
        if accepted >= len(tokens):  # The text ends at a guess; later guesses are not part of it.
            drafted = accepted = len(tokens)
        self.records[number].add(now, len(tokens), drafted, accepted)
        if self.callback:
            start = time.perf_counter()
            self.callback(number, tokens, accepted)
            self.in_callbacks += time.perf_counter() - start
