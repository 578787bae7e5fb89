"""`CapturedForward`: on a GPU the forward of a few tokens is recorded, once for each shape `[B, n]`, and replayed; and
so are a run of tokens, each drawn from what the model says after the one before, and a block scored and verified.

A replay costs the host one call instead of one for each of hundreds of kernels. What a recording reads and writes stays
where it was, so inputs are copied into tensors of its own, and a new cache needs new recordings.
"""

import torch
from torch.nn.functional import pad

from decoding.rounds import steps, verdict
from engine.graphs import BlockWidths
from utils import probabilities


class CapturedForward(BlockWidths):
    """model: a transformers causal LM; vocabulary: entries of the logits kept; kept_as: the dtype of its cache."""

    judges = True

    def __init__(self, model, vocabulary):
        super().__init__()
        self.model, self.vocabulary, self.kept_as = model, vocabulary, model.dtype
        self._recordings, self._cache = {}, None

    def __call__(self, tokens, positions, cache):
        """Logits as of `CachedModel.forward`."""
        inputs = self.fill(tokens, positions)
        (logits,) = self.replay(inputs[0].shape, inputs, cache, lambda *own: (self.forward(*own, cache),))
        return logits[:, : tokens.shape[1]]

    def part_of_run(self, tokens, positions, u, sampling, cache):
        def work(tokens, positions, u):
            def forward(tokens, at):
                return self.forward(tokens, at, cache)

            drawn = steps(forward, lambda logits: probabilities(logits, sampling), tokens, positions, u)
            return [torch.stack(each, 1) for each in zip(*drawn)]

        return self.replay((*tokens.shape, len(u), sampling), [tokens, positions, u], cache, work)

    def judge(self, block, positions, q, u, sampling, verify, cache):
        """p, accepted and token as of `runs.judge`. In a block filled up the tokens beyond its drafts count as drafts
        with q = 0, which are no guesses."""

        def work(tokens, positions, q, u):
            return verdict(self.forward(tokens, positions, cache), tokens, q, u, sampling, verify)

        tokens, at = self.fill(block, positions)
        n, beyond = q.shape[1], tokens.shape[1] - block.shape[1]
        if beyond:
            q, u = pad(q, (0, 0, 0, beyond)), torch.cat([pad(u[:, :n], (0, beyond)), u[:, n:]], 1)
        key = *tokens.shape, block.shape[1] - n, sampling, verify
        p, accepted, token = self.replay(key, (tokens, at, q, u), cache, work)
        return p[:, : n + 1], accepted, token

    def forward(self, tokens, positions, cache):
        cache.address(positions)
        slots = torch.arange(cache.capacity, device=tokens.device)
        mask = (slots <= positions[..., None])[:, None]
        logits = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits
        return logits[..., : self.vocabulary].float()

    def replay(self, key, inputs, cache, work):
        """What `work(*inputs)` returns, copied from where the recording named `key` leaves it."""
        if cache is not self._cache:
            self._cache, self._recordings = cache, {}
        if key not in self._recordings:
            self._recordings[key] = record(inputs, work)
        own, again, results = self._recordings[key]
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        again()
        return [result.clone() for result in results]


def record(inputs, work):
    """(inputs of its own, what runs `work` on them again, the tensors it leaves). Without a GPU the same work is done
    again where a GPU would replay it."""
    own = [x.clone() for x in inputs]
    if own[0].device.type != "cuda":
        results = work(*own)

        def again():
            for kept, new in zip(results, work(*own)):
                kept.copy_(new)

        return own, again, results
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries choose kernels and take memory before anything is recorded
        for _ in range(3):
            work(*own)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work(*own)
    return own, graph.replay, results
