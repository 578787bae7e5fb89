"""`CudaGraphs`: on a GPU, the forward of a few tokens is captured as a CUDA graph, once for each shape `[B, n]`, and
replayed. So are a sequence of draws, the scoring of a block with its verification, and a chunk of a prompt.

A replay costs the host one call instead of one for each of hundreds of kernels. A captured graph reads and writes fixed
memory: inputs are copied into tensors of its own, and a new cache needs new captures.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from decoding.drawing import steps
from decoding.interfaces import TreeRule, VerificationRule
from decoding.rounds import verify_logits
from decoding.treeDrawing import siblings
from decoding.treeRounds import Places, level_by_level
from decoding.trees import Tree
from engine.graphs import Graphs
from engine.kvCache import SlotCache
from utils import Sampling, pick, probabilities

CHUNK = 64  # tokens of a prompt that are read at once; a prompt of any length is read in chunks by one graph

Work = Callable[..., Sequence[Tensor]]
Capture = tuple[list[Tensor], Callable[[], object], Sequence[Tensor]]


class CudaGraphs(Graphs):
    """Graphs captured on a GPU, at their first use after a new cache."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        super().__init__(model, vocabulary)
        self.cache_dtype = model.dtype
        self.captures: dict[tuple[object, ...], Capture] = {}
        self.cache: SlotCache | None = None

    def prefill(self, tokens: Tensor, lengths: Sequence[int], cache: SlotCache) -> Tensor:
        """See `Graphs`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        return self.read_chunks(tokens, positions, cache)

    def read(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> None:
        """See `Graphs`."""
        self.read_chunks(tokens, positions, cache)

    def read_chunks(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """Read `tokens, positions [B, n]` in chunks; logits `[B, V]` after the last. The last chunk is padded with its
        last token, at the same position."""

        def work(tokens: Tensor, positions: Tensor, last: Tensor) -> Sequence[Tensor]:
            return (self.logits(tokens, positions, cache, last),)

        self.used += 1
        rows, length = tokens.shape
        for start in range(0, length, CHUNK):
            at = torch.arange(start, start + CHUNK, device=tokens.device).clamp_(max=length - 1)
            last = torch.arange(min(CHUNK, length - start) - 1, CHUNK, device=tokens.device)[:1]
            logits = self.replay((rows, "prefill"), (tokens[:, at], positions[:, at], last), cache, work)[0]
        return logits[:, 0]

    def score_and_verify(
        self,
        block: Tensor,
        positions: Tensor,
        q: Tensor,
        u: Tensor,
        sampling: Sampling,
        verify: VerificationRule,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Graphs`. In a padded block, the tokens beyond its drafts count as drafts with q = 0, which are no
        guesses."""

        def work(tokens: Tensor, positions: Tensor, q: Tensor, u: Tensor) -> Sequence[Tensor]:
            return verify_logits(self.logits(tokens, positions, cache), tokens, q, u, sampling, verify)

        tokens, at = self.pad_block(block, positions)
        n, beyond = q.shape[1], tokens.shape[1] - block.shape[1]
        if beyond:
            q, u = pad(q, (0, 0, 0, beyond)), torch.cat([pad(u[:, :n], (0, beyond)), u[:, n:]], 1)
        key = *tokens.shape, block.shape[1] - n, sampling, verify
        p, accepted, token = self.replay(key, (tokens, at, q, u), cache, work)
        return p[:, : n + 1], accepted, token

    def forward_tree(self, tokens: Tensor, places: Places, cache: SlotCache) -> Tensor:
        """See `Graphs`."""

        def work(tokens: Tensor, *places: Tensor) -> Sequence[Tensor]:
            return (self.tree_logits(tokens, Places(*places), cache),)

        self.used += 1
        return self.replay(("nodes", *tokens.shape), (tokens, *places.tensors), cache, work)[0]

    def grow(
        self,
        tree: Tree,
        tokens: Tensor,
        positions: Tensor,
        places: Places,
        u: Tensor,
        sampling: Sampling,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor]:
        """See `Graphs`."""

        def work(tokens: Tensor, positions: Tensor, u: Tensor, *flat_places: Tensor) -> Sequence[Tensor]:
            places = Places(*flat_places)

            def forward(tokens: Tensor, nodes: Sequence[int]) -> Tensor:
                if nodes[0] == 0:
                    return self.logits(tokens, positions, cache)
                return self.tree_logits(tokens, places.only(nodes), cache)

            def distribution(logits: Tensor, nodes: Sequence[int], drafts: Tensor) -> Tensor:
                return probabilities(logits, sampling)

            return level_by_level(forward, distribution, siblings, tree, tokens, u)

        self.used += 1
        inputs = tokens, positions, u, *places.tensors
        drafts, q = self.replay((*tokens.shape, tree, sampling), inputs, cache, work)
        return drafts, q

    def score_and_verify_tree(
        self,
        tree: Tree,
        block: Tensor,
        places: Places,
        q: Tensor,
        u: Tensor,
        sampling: Sampling,
        verify: TreeRule,
        cache: SlotCache,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Graphs`."""

        def work(tokens: Tensor, q: Tensor, u: Tensor, *places: Tensor) -> Sequence[Tensor]:
            p = probabilities(self.tree_logits(tokens, Places(*places), cache), sampling)
            return p, *verify(p, q, tokens[:, 1:], u, tree)

        self.used += 1
        inputs = block, q, u, *places.tensors
        p, accepted, path, token = self.replay((len(block), tree, sampling, verify), inputs, cache, work)
        return p, accepted, path, token

    def move(self, source: Tensor, slots: Tensor, cache: SlotCache) -> None:
        """See `Graphs`."""

        def work(source: Tensor, slots: Tensor) -> Sequence[Tensor]:
            cache.move(source, slots)
            return ()

        key = "move", *slots.shape
        if cache is not self.cache or key not in self.captures:
            self.replay(key, (slots, slots), cache, work)  # A capture runs its work several times: this one is safe.
        self.replay(key, (source, slots), cache, work)

    def run_forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        """See `Graphs`."""

        def work(tokens: Tensor, positions: Tensor) -> Sequence[Tensor]:
            return (self.logits(tokens, positions, cache),)

        return self.replay(tuple(tokens.shape), (tokens, positions), cache, work)[0]

    def run_draw(
        self, tokens: Tensor, positions: Tensor, u: Tensor, sampling: Sampling, cache: SlotCache
    ) -> tuple[Tensor, Tensor]:
        """See `Graphs`."""

        def work(tokens: Tensor, positions: Tensor, u: Tensor) -> Sequence[Tensor]:
            def forward(tokens: Tensor, at: Tensor) -> Tensor:
                return self.logits(tokens, at, cache)

            drawn = steps(forward, lambda logits: probabilities(logits, sampling), pick, tokens, positions, u)
            return [torch.stack(each, 1) for each in zip(*drawn)]

        drafts, q = self.replay((*tokens.shape, len(u), sampling), (tokens, positions, u), cache, work)
        return drafts, q

    def logits(self, tokens: Tensor, positions: Tensor, cache: SlotCache, keep: Tensor | int = 0) -> Tensor:
        """The forward that is captured; attention reads all slots. keep: which logits are computed, 0: all."""
        cache.address(positions)
        slots = torch.arange(cache.capacity, device=tokens.device)
        mask = (slots <= positions[..., None])[:, None]
        return self.run_model(tokens, positions, mask, cache, keep)

    def tree_logits(self, tokens: Tensor, places: Places, cache: SlotCache) -> Tensor:
        """The forward of nodes of a tree that is captured."""
        cache.address(places.slots)
        return self.run_model(tokens, places.positions, places.mask(cache.capacity)[:, None], cache)

    def replay(self, key: tuple[object, ...], inputs: Sequence[Tensor], cache: SlotCache, work: Work) -> list[Tensor]:
        """The results of `work(*inputs)`, from the capture named `key`."""
        if cache is not self.cache:
            self.cache, self.captures = cache, {}
        if key not in self.captures:
            self.captures[key] = capture(inputs, work)
        own, again, results = self.captures[key]
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        again()
        return [result.clone() for result in results]


def capture(inputs: Sequence[Tensor], work: Work) -> Capture:
    """(inputs of its own, a function that runs `work` on them again, the tensors where it leaves the results). Without
    a GPU, the function runs the same work instead of replaying it."""
    own = [x.clone() for x in inputs]
    if own[0].device.type != "cuda":
        results = work(*own)

        def again() -> None:
            for kept, new in zip(results, work(*own)):
                kept.copy_(new)

        return own, again, results
    device = own[0].device  # It need not be the current one: a draft can have a GPU of its own.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # Warm-up: libraries choose kernels and allocate memory before the capture.
        for _ in range(3):
            work(*own)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = work(*own)
    return own, graph.replay, results
