"""The grid over the draft's temperature and top-p: its two figures, and the command."""

import pytest
import torch

from experiments.theory import expected_tokens, overlap
from scripts.draftSampling import TEMPERATURES, TOP_PS, main, tokens_of_round
from utils import draw


@pytest.mark.parametrize("gamma", [1, 4])
def test_the_tokens_of_a_round_are_those_of_the_paper_where_every_context_is_alike(gamma):
    p, q = torch.tensor([0.6, 0.3, 0.1, 0.0]), torch.tensor([0.2, 0.3, 0.3, 0.2])
    p, q = p.expand(100_000, -1), q.expand(100_000, -1)
    tokens = draw(p, torch.Generator().manual_seed(0))
    alpha = float(overlap(p[0], q[0]))
    assert tokens_of_round(p, q, tokens, gamma) == pytest.approx(expected_tokens(alpha, gamma), abs=0.01)
    # Where acceptance follows the context, it is not enough to know alpha: of two contexts in turn one accepts nothing.
    q = torch.where(torch.arange(len(q))[:, None] % 2 == 0, p, torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert tokens_of_round(p, q, tokens, gamma) == pytest.approx(1.5, abs=0.01)


def test_the_grid_is_printed_beside_the_targets_own(pair_folder, text_file, capsys):
    pair = [f"--{role}={pair_folder / role}" for role in ("target", "draft")]
    given = [*pair, f"--dataset={text_file}", "--sentenceLimit=50", "--sentences=2", "--promptLen=8", "--maxLen=6"]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()[-len(TEMPERATURES) * len(TOP_PS) :]
    cells = {tuple(map(float, line.split()[:2])): line.split()[2:] for line in lines}
    assert set(cells) == {(t, p) for t in TEMPERATURES for p in TOP_PS}
    assert cells[0.85, 0.9][2] == cells[0.85, 0.9][5] == "+0.0000"
    assert all(0 <= float(each[0]) <= 1 <= float(each[1]) <= 5 for each in cells.values())
    assert main([*given, "--draftTop_p=2"]) == main([*given, "--draft=lookup"]) == 2
