"""`CapturedForward`: on a GPU the forward of a few tokens is recorded, once for each shape `[B, n]`, and replayed.

A replay costs the host one call instead of one for each of hundreds of kernels. What a recording reads and writes stays
where it was, so inputs are copied into tensors of its own, and a new cache needs new recordings.
"""

import torch

from blockWidths import BlockWidths


class CapturedForward(BlockWidths):
    """model: a transformers causal LM; vocabulary: entries of the logits kept; kept_as: the dtype of its cache."""

    def __init__(self, model, vocabulary):
        super().__init__()
        self.model, self.vocabulary, self.kept_as = model, vocabulary, model.dtype
        self._recordings, self._cache = {}, None

    def __call__(self, tokens, positions, slots, mask, cache):
        """mask: bool `[B, 1, n, capacity]`; the rest as in `CachedModel.forward`."""
        inputs = self.fill(tokens, positions, slots, mask)
        if cache is not self._cache:
            self._cache, self._recordings = cache, {}
        shape = tuple(inputs[0].shape)
        if shape not in self._recordings:
            self._recordings[shape] = self.record(inputs, cache)
        own, replay, logits = self._recordings[shape]
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        replay()
        return logits[:, : tokens.shape[1]].clone()

    def record(self, inputs, cache):
        """(inputs of its own, what runs it again, the logits it leaves). Without a GPU the same steps are run, not
        replayed."""
        own = [x.clone() for x in inputs]

        def step():
            tokens, positions, slots, mask = own
            cache.address(slots)
            return (
                self.model(
                    input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
                )
                .logits[..., : self.vocabulary]
                .float()
            )

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
