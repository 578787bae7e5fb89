"""`Record`: what happened while one row was generated, and the figures that follow from it."""

from dataclasses import dataclass, field


@dataclass
class Record:
    """One row's history. A round is one forward of the target; the first is the reading of the prompt.

    times: seconds from the call to the moment each round's tokens were on the host.
    committed: tokens each round added (its sum is the length of the output).
    drafted, accepted: tokens guessed in each round, and how many of them verification took.
    """

    times: list = field(default_factory=list)
    committed: list = field(default_factory=list)
    drafted: list = field(default_factory=list)
    accepted: list = field(default_factory=list)

    @property
    def tokens(self):
        return sum(self.committed)

    @property
    def ttft(self):
        """Time to the first token, in seconds."""
        return self.times[0]

    @property
    def tpot(self):
        """Time per output token after the first, in seconds; nan for a single token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else float("nan")

    @property
    def throughput(self):
        """Tokens per second, the reading of the prompt included."""
        return self.tokens / self.times[-1]

    @property
    def tokens_per_round(self):
        """Mean tokens committed by a round of drafting and scoring (the reading of the prompt is not one)."""
        rounds = self.committed[1:]
        return sum(rounds) / len(rounds) if rounds else float("nan")

    @property
    def acceptance_by_position(self):
        """[(tested, passed), ...]: how often the i-th guess of a round was put to the test (all before it had passed),
        and how often it passed."""
        counts = [[0, 0] for _ in range(max(self.drafted, default=0))]
        for drafted, accepted in zip(self.drafted, self.accepted):
            for i in range(min(accepted + 1, drafted)):
                counts[i][0] += 1
                counts[i][1] += i < accepted
        return [tuple(c) for c in counts]

    @property
    def alpha(self):
        """Acceptance rate: guesses that passed over guesses tested (the paper's alpha under its assumption that guesses
        pass independently); nan where nothing was guessed."""
        tested, passed = (sum(column) for column in zip(*self.acceptance_by_position or [(0, 0)]))
        return passed / tested if tested else float("nan")
