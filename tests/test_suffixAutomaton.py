"""The automaton against a naive search through the text."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.suffixAutomaton import Match, SuffixAutomaton

TEXTS = st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds - 1), min_size=1, max_size=40))


def ends(text, part):
    """Where `part` ends in `text`."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def longest_match(text, known):
    return next(n for n in range(len(text), -1, -1) if not n or ends(known, text[len(text) - n :]))


def longest_repeat(text):
    return next(n for n in range(len(text) - 1, -1, -1) if not n or len(ends(text, text[len(text) - n :])) > 1)


def most_frequent(text, part):
    """What followed `part` most often, of several the latest."""
    followed = [text[end] for end in ends(text, part) if end < len(text)]
    most = max(Counter(followed).values())
    return next(token for token in reversed(followed) if followed.count(token) == most)


def check(text, tail=()):
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.append(token)
        known, match = text[: i + 1], automaton.continued(automaton.whole())
        assert match.length == longest_repeat(known)
        if i:
            assert automaton.continuation(match) == most_frequent(known, known[i + 1 - match.length :])
    match, whole = automaton.whole(), list(text)
    for token in tail:
        match, whole = automaton.follow(match, token), [*whole, token]
        assert match.length == longest_match(whole, text)
    assert len(automaton.next) <= 2 * len(text)
    return automaton


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 4), max_size=8))
def test_matches_and_continuations_are_those_of_a_naive_search(text, tail):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SuffixAutomaton, "COUNTED", 1000)
        check(text, tail)


@given(TEXTS)
def test_a_continuation_that_is_not_counted_is_still_one_of_the_match(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SuffixAutomaton, "COUNTED", 1)
        automaton = SuffixAutomaton(text)
    match = automaton.continued(automaton.whole())
    if len(text) > 1:
        found = [text[end] for end in ends(text, text[len(text) - match.length :]) if end < len(text)]
        assert automaton.continuation(match) in found


def test_parts_that_end_at_the_same_places_share_a_state():
    """The automaton of "abbb" of Blumer et al. has states for "", a, ab, abb, abbb, and b, bb."""
    automaton = SuffixAutomaton([0, 1, 1, 1])
    assert len(automaton.next) == 7 and automaton.whole() == Match(automaton.last, 4)
    assert automaton.follow(automaton.whole(), 0) == Match(automaton.next[0][0], 1)
    assert automaton.follow(automaton.whole(), 9) == Match(0, 0)


@pytest.mark.parametrize("mistake", ["shared", "uncounted"])
def test_mistakes_in_a_split_are_caught(mistake, monkeypatch):
    split = SuffixAutomaton.split

    def wrong(self, state, token):
        if mistake == "shared":  # shorter parts stay in the state of longer ones
            return self.next[state][token]
        new = split(self, state, token)
        self.count[new] = 0  # what occurred before is forgotten
        return new

    monkeypatch.setattr(SuffixAutomaton, "split", wrong)
    with pytest.raises(AssertionError):
        for text in ([0, 1, 1, 0, 1], [1, 0, 1, 1, 0, 2, 0, 2, 1, 1, 0]):
            check(text)
            check([0, 1, 2, 0, 1, 3, 1, 2, 4, 1, 3, 4, 1])


@pytest.mark.parametrize("text", [[1] * 4000, [i % 7 for i in range(4000)], list(range(4000))])
def test_a_token_costs_the_same_however_long_the_text_is(text):
    """Counted in states that are added or visited, not in seconds."""
    visits = Counter()

    class Counted(list):
        def __getitem__(self, at):
            visits["links"] += 1
            return list.__getitem__(self, at)

    automaton = SuffixAutomaton()
    automaton.link = Counted(automaton.link)
    for token in text:
        automaton.append(token)
    assert visits["links"] < (SuffixAutomaton.COUNTED + 4) * len(text)
