"""Blocks filled up to the widths there are graphs for."""

import torch

from engine.graphs import BlockWidths


def test_a_block_is_filled_up_with_its_last_token_to_the_next_width():
    widths = BlockWidths()
    for width in 4, 2, 4:
        widths.add(1, width)
    assert widths.widths == {1: [2, 4]}
    tokens = torch.tensor([[5, 6, 7]])
    filled, at = widths.fill(tokens, tokens + 10)
    assert filled.tolist() == [[5, 6, 7, 7]] and at.tolist() == [[15, 16, 17, 17]]
    assert filled.is_contiguous() and at.is_contiguous()
    assert widths.fill(tokens[:, :2], tokens[:, :2])[0].tolist() == [[5, 6]]
    assert widths.used == 2


def test_wider_blocks_and_other_numbers_of_rows_do_not_fit():
    widths = BlockWidths()
    widths.add(2, 3)
    fits = {(rows, n): widths.fits(torch.zeros(rows, n)) for rows in (1, 2) for n in (1, 3, 4)}
    assert fits == {(1, 1): False, (1, 3): False, (1, 4): False, (2, 1): True, (2, 3): True, (2, 4): False}
