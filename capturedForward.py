"""`CapturedForward`: on a GPU the forward of a few tokens is recorded, once for each shape `[B, n]`, and replayed.

A replay costs the host one call instead of one for each of hundreds of kernels. What a recording reads and writes stays
where it was, so inputs are copied into tensors of its own, and a new cache needs new recordings.
"""

import torch


class CapturedForward:
    """model: a transformers causal LM; vocabulary: entries of the logits kept; kept_as: the dtype of its cache."""

    def __init__(self, model, vocabulary):
        self.model, self.vocabulary, self.kept_as = model, vocabulary, model.dtype
        self._shapes, self._recordings, self._cache, self.used = {}, {}, None, 0

    def add(self, rows, width):
        """Blocks `[rows, width]` are to be recorded, at the first call after a new cache."""
        self._shapes[rows] = sorted({*self._shapes.get(rows, ()), width})

    def fits(self, tokens):
        """Whether blocks like `tokens[B, n]` are recorded."""
        return len(tokens) in self._shapes and tokens.shape[1] <= self._shapes[len(tokens)][-1]

    def __call__(self, tokens, positions, slots, mask, cache):
        """mask: bool `[B, 1, n, capacity]`; the rest as in `CachedModel.forward`."""
        self.used += 1
        rows, n = tokens.shape
        width = next(width for width in self._shapes[rows] if width >= n)
        last = torch.arange(width, device=tokens.device).clamp_(max=n - 1)  # filled up with its last token
        inputs = [x.index_select(axis, last) for x, axis in ((tokens, 1), (positions, 1), (slots, 1), (mask, 2))]
        if cache is not self._cache:
            self._cache, self._recordings = cache, {}
        if (rows, width) not in self._recordings:
            self._recordings[rows, width] = self.record(inputs, cache)
        own, replay, logits = self._recordings[rows, width]
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        replay()
        return logits[:, :n].clone()

    def record(self, inputs, cache):
        """(inputs of its own, what runs it again, the logits it leaves). Without a GPU the same steps are run, not
        replayed."""
        own = [x.clone() for x in inputs]

        def step():
            tokens, positions, slots, mask = own
            cache.address(slots)
            return self.model(input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache,
                              use_cache=True).logits[..., :self.vocabulary].float()

        if own[0].device.type != "cuda":
            logits = step()
            return own, lambda: logits.copy_(step()), logits
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries choose kernels and take memory before anything is recorded
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        return own, graph.replay, logits
