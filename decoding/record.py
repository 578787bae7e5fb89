"""What happened while text was generated, and when: `Record` is the history of one row, and `Watch` a stopwatch that
does not synchronise the host with the device."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Record:
    """One row's history. A round is one forward of the target; round 0 is the prefill.

    times: seconds from the call to the moment each round's tokens were on the host.
    committed: tokens each round added; their sum is the length of the output.
    drafted, accepted: tokens guessed in each round, and how many of them verification accepted.
    """

    times: list[float] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, now: float, committed: int, drafted: int, accepted: int) -> None:
        """One more round."""
        self.times.append(now)
        self.committed.append(committed)
        self.drafted.append(drafted)
        self.accepted.append(accepted)

    @property
    def tokens(self) -> int:
        return sum(self.committed)

    @property
    def ttft(self) -> float:
        """Time to the first token, in seconds."""
        return self.times[0]

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds; nan for a single token."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else float("nan")

    @property
    def throughput(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.times[-1]

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


class Watch:
    """Laps of work on a device, the last of which ends with a host sync. On a GPU, events record when the laps before
    it ended: no lap makes the host wait."""

    def __init__(self, device: torch.device | str) -> None:
        modules: dict[str, Any] = {"cuda": torch.cuda, "mps": torch.mps.event}
        self.gpu = modules.get(torch.device(device).type)
        self.events: list[Any] = []
        self.times = [time.perf_counter()]
        if self.gpu:
            self.mark()

    def mark(self) -> None:
        """End a lap."""
        if self.gpu:
            self.events.append(self.gpu.Event(enable_timing=True))
            self.events[-1].record()
        else:
            self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds of each lap; the last one ends now, after the host has read a result of it."""
        times = [*self.times, time.perf_counter()]
        laps = [a.elapsed_time(b) / 1000 for a, b in zip(self.events, self.events[1:])]
        return [*laps, times[-1] - times[0] - sum(laps)] if self.gpu else [b - a for a, b in zip(times, times[1:])]
