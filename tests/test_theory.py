"""The paper's formulas at the paper's values."""

import pytest
import torch

from experiments.theory import best_gamma, expected_chain, expected_tokens, improvement, overlap


def test_theory_has_the_papers_values():
    assert improvement(0.8, 5, 0.0) == pytest.approx(3.69, abs=5e-3)  # the paper's table 1 counts operations: at c = 0
    assert improvement(1.0, 4, 0.25) == pytest.approx(2.5)
    assert improvement(0.0, 3, 0.1) == pytest.approx(1 / 1.3)


def test_expected_tokens_is_the_sum_of_the_chances_to_reach_each():
    for alpha in 0.0, 0.3, 0.9, 1.0:
        assert expected_tokens(alpha, 4) == pytest.approx(sum(alpha**i for i in range(5)))


def test_a_chain_is_expected_to_go_on_as_its_positions_allow():
    assert expected_chain([]) == 1 and expected_chain([0.5, 0.0, 1.0]) == 1.5
    assert expected_chain([0.5, 0.8, 0.25]) == pytest.approx(1 + 0.5 + 0.4 + 0.1)
    assert expected_chain([0.7] * 6) == pytest.approx(expected_tokens(0.7, 6))


def test_the_best_gamma_grows_with_alpha_and_is_0_where_guessing_does_not_pay():
    assert best_gamma(0.1, 0.2) == 0
    assert [best_gamma(alpha, 0.05) for alpha in (0.5, 0.7, 0.9)] == sorted(
        {best_gamma(a, 0.05) for a in (0.5, 0.7, 0.9)}
    )
    assert best_gamma(1.0, 0.01, longest=6) == 6


def test_the_overlap_of_a_distribution_with_itself_is_1_and_with_a_disjoint_one_0():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.25, 0.75])
    assert [overlap(p, p).item(), overlap(p, q).item(), overlap(p, p.flip(0)).item()] == [1, 0.25, 0.5]
