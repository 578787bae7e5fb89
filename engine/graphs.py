"""`BlockWidths`: the few shapes that blocks of tokens are read in, so that a few graphs serve all of them."""

import torch


class BlockWidths:
    """What the forwards made of graphs share. used: how many blocks, and how many runs, were read by one. judges:
    whether a graph can verify too."""

    judges = False

    def __init__(self):
        self.widths, self.runs, self.used = {}, {}, 0  # of each number of rows
        self.rounds = set()  # (graphs of the draft, rows, width, count)

    def add(self, rows, width):
        """Blocks `[rows, width]` have a graph, from now on or from the first of them on."""
        self.widths[rows] = sorted({*self.widths.get(rows, ()), width})

    def add_run(self, rows, width, count):
        """Runs of `count` tokens after blocks `[rows, width]` have a graph; `width` is one for all of these rows."""
        self.runs[rows] = width, sorted({*self.runs.get(rows, (0, ()))[1], count})

    def fits(self, tokens):
        """Whether there is a graph for blocks like `tokens[B, n]`."""
        return len(tokens) in self.widths and tokens.shape[1] <= self.widths[len(tokens)][-1]

    def fill(self, tokens, positions):
        """The block `[B, n]` filled up to the next width with its last token, written where that is; both
        contiguous."""
        self.used += 1
        n = tokens.shape[1]
        width = next(width for width in self.widths[len(tokens)] if width >= n)
        if n < width:
            last = torch.arange(width, device=tokens.device).clamp_(max=n - 1)
            tokens, positions = tokens[:, last], positions[:, last]
        return tokens.contiguous(), positions.contiguous()

    def run_fits(self, tokens):
        """Whether there is a graph for runs after blocks like `tokens[B, n]`."""
        return len(tokens) in self.runs and tokens.shape[1] <= self.runs[len(tokens)][0]

    def run(self, tokens, positions, u, sampling, cache):
        """`CachedModel.run_at_once` by graphs: of the longest runs there are that are not too long, one after the
        other; a run shorter than all of them is the beginning of the shortest."""
        width, counts = self.runs[len(tokens)]
        first = tokens.shape[1]
        if first < width:  # its first token is read twice, to the same place
            again = torch.arange(first - width, first, device=tokens.device).clamp_(min=0)
            tokens = tokens[:, again]
            positions = torch.cat([positions[:, :1].expand(-1, width - first), positions], 1)
        drawn, q, left = [], [], len(u)
        while left:
            if drawn:
                known = q[-1].shape[-1] - 1  # as in `steps`
                tokens = torch.cat([tokens, drawn[-1].clamp(max=known)], 1)[:, -width:]
            self.used += 1
            count = max((count for count in counts if count <= left), default=counts[0])
            done = len(u) - left
            numbers, at = u[done : done + count], positions[:, done : done + width + count - 1]
            if left < count:  # what is drawn beyond it is dropped, and written where later tokens will be
                numbers = torch.cat([numbers, u.new_zeros(count - left, u.shape[1])])
                at = torch.cat([at, at[:, -1:].expand(-1, count - left)], 1)
            made, p = self.part_of_run(tokens.contiguous(), at.contiguous(), numbers, sampling, cache)
            drawn.append(made[:, :left])
            q.append(p[:, :left])
            left -= drawn[-1].shape[1]
        return (drawn[0], q[0]) if len(q) == 1 else (torch.cat(drawn, 1), torch.cat(q, 1))
