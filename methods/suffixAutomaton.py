"""`SuffixAutomaton`: all parts of a text, as paths of a small automaton (Blumer et al., "The smallest automaton
recognizing the subwords of a text", 1985; for guessing as in SAM-decoding, arXiv 2411.10666)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """The longest ending of some text that is a part of the automaton's text: the state it leads to, its tokens."""

    state: int
    length: int


class SuffixAutomaton:
    """The automaton of a text that grows at its end, in amortised constant time per token.

    Each part of the text leads from state 0 to one state; parts that end at the same places share it. `link` leads from
    a state to that of their longest ending that also ends elsewhere. So the links from `last`, the state of the whole
    text, pass all endings of the text, the longest first.

    size: tokens of the text. Of each state:
    next: its transitions, {token: state}. link, length: its link, and the tokens of its longest part.
    count, latest: how often its parts occurred, and where they ended last. Each token updates them for the COUNTED
        longest endings only. There are more only where a text repeats itself over and over.
    """

    COUNTED = 16

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.latest = [0], [0], [0], [0]
        self.last = self.size = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self.size += 1
        state, self.last = self.last, self.add({}, 0, self.size, 0)
        while token not in self.next[state]:  # The endings that this token never followed.
            self.next[state][token] = self.last
            if state == 0:
                break
            state = self.link[state]
        else:
            self.link[self.last] = self.split(state, token)
        state = self.last
        for _ in range(self.COUNTED):
            self.count[state] += 1
            self.latest[state] = self.size
            state = self.link[state]
            if state == 0:
                break

    def add(self, transitions: dict[int, int], link: int, length: int, count: int) -> int:
        """Add a state; returns its number."""
        self.next.append(transitions)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(0)
        return len(self.next) - 1

    def split(self, state: int, token: int) -> int:
        """The state of the longest part of `state` with `token` after it. If longer parts share it, which have not
        occurred again, they keep it, and the others get a new one."""
        old, length = self.next[state][token], self.length[state] + 1
        if self.length[old] == length:
            return old
        new = self.add(self.next[old].copy(), self.link[old], length, self.count[old])
        self.latest[new] = self.latest[old]
        self.link[old] = new
        while self.next[state].get(token) == old:
            self.next[state][token] = new
            if state == 0:
                break
            state = self.link[state]
        return new

    def whole(self) -> Match:
        """The match of the text itself."""
        return Match(self.last, self.size)

    def follow(self, match: Match, token: int) -> Match:
        """The match of the same text with `token` appended to it. The automaton's own text stays as it is."""
        state, length = match
        while token not in self.next[state]:
            if state == 0:
                return Match(0, 0)
            state = self.link[state]
            length = self.length[state]
        return Match(self.next[state][token], length + 1)

    def continued(self, match: Match) -> Match:
        """The longest ending of the match that some token followed. Only the end of the text itself has none."""
        if self.next[match.state] or match.state == 0:
            return match
        return Match(self.link[match.state], self.length[self.link[match.state]])

    def continuation(self, match: Match) -> int:
        """The token that followed most often, of several such tokens the latest. match: of `continued`."""
        following = self.next[match.state]
        return max(following, key=lambda token: (self.count[following[token]], self.latest[following[token]]))
