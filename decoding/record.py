"""`Record`: the history of one text, from which all measures of its speed are computed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Record:
    """One text's history. A round is one forward of the target; round 0 is the prefill.

    times: seconds from the call to the moment each round's tokens were on the host.
    committed: tokens each round added; their sum is the length of the output.
    drafted, accepted: tokens guessed in each round, and how many of them verification accepted; without guesses after
        the end of the text.
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
        passed; and how often it passed."""
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
