"""How far a long piece of work is: a bar on a terminal, a state of it now and then elsewhere."""

import itertools

import pytest

from inputs import progress


@pytest.mark.parametrize("terminal, pause, rank, shown", [
    (False, 0, "0", True), (False, 30, "0", False), (True, 30, "0", True), (True, 0, "1", False),
])  # fmt: skip
def test_a_bar_is_shown_on_a_terminal_and_rarely_in_a_log(monkeypatch, capsys, terminal, pause, rank, shown):
    monkeypatch.setattr(progress, "PAUSE", pause)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(RuntimeError, match="lost"), progress.Bar("work", 2_000, " tokens") as bar:
        bar.update(1_000)
        bar.refresh() if shown else None
        raise RuntimeError("lost")
    items = progress.followed("abc", "letters", 3)
    assert [*itertools.islice(items, 2), *items] == ["a", "b", "c"]
    said = capsys.readouterr().err
    assert ("work:  50%" in said and "1.00k/2.00k" in said and "letters:   0%" in said) == shown == bool(said)
