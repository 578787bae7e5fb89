"""`BlockWidths`: the few shapes that blocks of tokens are read in, so that a few graphs serve all of them."""

import torch


class BlockWidths:
    """What the forwards made of graphs share. used: how many blocks were read by one."""

    def __init__(self):
        self.widths, self.used = {}, 0  # of each number of rows

    def add(self, rows, width):
        """Blocks `[rows, width]` have a graph, from now on or from the first of them on."""
        self.widths[rows] = sorted({*self.widths.get(rows, ()), width})

    def fits(self, tokens):
        """Whether there is a graph for blocks like `tokens[B, n]`."""
        return len(tokens) in self.widths and tokens.shape[1] <= self.widths[len(tokens)][-1]

    def fill(self, tokens, positions, slots, mask):
        """The block filled up to the next width with its last token, written where that is; all four contiguous.

        tokens, positions, slots: `[B, n]`; mask: `[B, 1, n, capacity]`."""
        self.used += 1
        n = tokens.shape[1]
        width = next(width for width in self.widths[len(tokens)] if width >= n)
        if n < width:
            last = torch.arange(width, device=tokens.device).clamp_(max=n - 1)
            tokens, positions, slots, mask = tokens[:, last], positions[:, last], slots[:, last], mask[:, :, last]
        return [x.contiguous() for x in (tokens, positions, slots, mask)]
