"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

import io

import pytest

from inputs import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, with a line every 30 seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress, "PAUSE", 30.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_long_work_prints_a_line_now_and_then(clock, capsys):
    for what in "first", "second":
        for _ in progress.followed(range(4000), what, 4000):
            clock[0] += 1 / 32
    with progress.Bar("tokens of a text", None, " tokens") as bar:
        clock[0] += 100
        bar.update(123_456)
    lines = [f"{what}: {done} of 4,000" for what in ("first", "second") for done in ("960", "1,920", "2,880", "3,840")]
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [*lines, "tokens of a text: 123,456 tokens"] and captured.out == ""


def test_short_work_and_processes_other_than_the_first_print_nothing(clock, capsys, monkeypatch):
    assert list(progress.followed("abc", "short", 3)) == ["a", "b", "c"]
    monkeypatch.setenv("RANK", "1")
    for _ in progress.followed(range(2), "long", 2):
        clock[0] += 100
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_until_the_work_is_done_or_given_up(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := io.StringIO())
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    before = len(progress.tqdm._instances)
    with pytest.raises(RuntimeError, match="lost"), progress.Bar("work", 2) as bar:
        clock[0] += 100
        bar.update()
        bar.refresh()
        assert "work:  50%" in terminal.getvalue() and "1 of 2" not in terminal.getvalue()
        assert len(progress.tqdm._instances) == before + 1
        raise RuntimeError("lost")
    following = progress.followed(range(3), "work", 3)
    assert next(following) == 0 and len(progress.tqdm._instances) == before + 1
    following.close()
    assert len(progress.tqdm._instances) == before
