"""`CachedModel`: a Hugging Face causal language model, its `SlotCache`, and one `forward(tokens, positions)`."""

import subprocess
import sys
import time

import torch

from engine import attention
from engine.cudaGraphs import CapturedForward
from engine.kvCache import SlotCache

LARGE = 200_000_000  # parameters of a model whose forward takes milliseconds


def context_of(config):
    """Tokens a model of this config may read."""
    return getattr(config, "max_position_embeddings", None) or 1 << 30


class CachedModel:
    """A causal language model whose cache is addressed by position.

    model: any `transformers` causal LM that takes a 4-D mask and explicit positions (GPT-NeoX, Llama, GPT-2, OPT,
        Qwen2 are tested). Its attention is set to attention.py's.
    vocabulary: logits are cut to this many entries (the tokenizer's size): model sizes of one family pad differently.
    name: what messages and records call it.
    """

    def __init__(self, model, vocabulary=None, name="model"):
        self.model = model.eval()
        self.vocabulary = vocabulary or model.config.vocab_size
        self.name = name
        self.device = model.device
        self.dtype = model.dtype
        model.set_attn_implementation(attention.NAME)
        self.context = context_of(model.config)
        self.forwards = 0
        self.parameters = sum(p.numel() for p in model.parameters())
        self._cache, self._shape = None, None
        # On a CPU attention costs what it reads: not the slots that no row has come to yet. On a GPU it is little
        # beside the weights, and to ask for the highest position would make the host wait.
        self._reads_filled = self.device.type == "cpu"
        self._kept_as, self._graphs = attention.cache_dtype(model), None

    @torch.inference_mode()
    def compile(self, widths=(), runs=(), rows=1, progress=None):
        """Make one graph for blocks of each of `widths` tokens in `rows` rows; narrower blocks are filled up to the
        next, wider ones stay eager. And one for each of `runs` (tokens read, tokens drawn one after the other). On a
        CPU the linear layers are packed for it (packedLinear.py) for good; on a GPU graphs are recorded at the first
        use after a new cache (capturedForward.py).

        Returns the seconds it took, or None where it cannot be done: then one line says why, and all stays eager.
        progress: called after each graph."""

        def make():
            if len(set(getattr(self.model, "hf_device_map", {}).values())) > 1:
                raise RuntimeError("it is spread over several devices")
            if self.device.type == "cuda":
                graphs = CapturedForward(self.model, self.vocabulary)
            else:
                from engine.cpuGraphs import CompiledForward  # its imports take seconds, and most runs need none of it

                graphs = CompiledForward(self.model, self.vocabulary)
            for width in sorted(set(widths)):
                graphs.add(rows, width)
                if progress:
                    progress()
            for width, count in sorted(set(runs)):
                graphs.add_run(rows, width, count)
                if progress:
                    progress()
            self._graphs, self._kept_as, self._shape = graphs, graphs.kept_as, None

        return self._seconds(make)

    @torch.inference_mode()
    def compile_round(self, draft, width, count, rows=1):
        """Make one graph of a run of `count` tokens of `draft` after blocks `[rows, width]` and of this model's forward
        that scores them. Both must be compiled. What it saves is the host's time between the two: a large model's
        rounds take too long to gain by it, and a GPU's host has the time; there nothing is made. Returns as `compile`.
        """
        if self.parameters > LARGE or self.device.type == "cuda":
            return 0.0
        return self._seconds(lambda: self._graphs.add_round(draft._graphs, rows, width, count))

    def _seconds(self, make):
        start = time.perf_counter()
        try:
            make()
        except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
            compiler = isinstance(error, subprocess.CalledProcessError)
            reason = "the C++ compiler failed" if compiler else " ".join(str(error).split())[:200]
            print(f"{self.name} stays eager: it cannot be compiled here ({reason})", file=sys.stderr)
            return None
        return time.perf_counter() - start

    def reserve(self, rows, capacity):
        """Get ready for `rows` rows of at most `capacity` tokens. A cache of that shape is used again as it is: what an
        earlier text left in it is masked like any other stale slot."""
        if self._graphs and self.device.type == "cuda" and self._shape and self._shape[0] == rows:
            capacity = max(capacity, self._shape[1])  # recordings live as long as their cache: a longer one will do
        if self._shape != (rows, capacity):
            self._cache = SlotCache(self.model.config.num_hidden_layers, capacity, self._kept_as)
            self._shape = (rows, capacity)
            self._order = torch.arange(capacity, device=self.device)

    @torch.inference_mode()
    def forward(self, tokens, positions, slots=None, mask=None, keep=None):
        """Read a block of tokens and return the logits after each.

        tokens, positions: int64 `[B, n]`. Keys and values go to the slots named by `positions`, and a token attends to
            the slots `<=` its own position.
        slots `[B, n]` and mask (bool `[B, n, capacity]`) say otherwise where a slot is not a position, as in a tree of
            candidates: siblings share a position, not a slot, and a node attends to its ancestors.
        keep: int64 `[B]`, one index into the block for each row whose logits alone are wanted.
        Returns float32 logits `[B, n, vocabulary]`, or `[B, vocabulary]` with `keep`.
        """
        reach = None
        if slots is None and mask is None and keep is None and self._ready() and self._graphs.fits(tokens):
            self.forwards += 1
            return self._graphs(tokens, positions, self._cache)
        if mask is None:
            reach = int(positions.max()) + 1 if self._reads_filled else None
            mask = self._order[:reach] <= positions[..., None]
        self._cache.address(positions if slots is None else slots, reach)
        kept, where = (0, None) if keep is None else keep.unique(return_inverse=True)
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=kept,
        ).logits
        self.forwards += 1
        if keep is not None:
            logits = logits[torch.arange(len(tokens), device=self.device), where]
        return logits[..., : self.vocabulary].float()

    @torch.inference_mode()
    def run_at_once(self, tokens, positions, u, sampling):
        """The tokens and distributions of `runs.run`, drawn with the numbers `u[count, B]`, where there is a graph that
        does it all; else None."""
        if not (self._ready() and self._graphs.run_fits(tokens)):
            return None
        self.forwards += len(u)
        return self._graphs.run(tokens, positions, u, sampling, self._cache)

    @torch.inference_mode()
    def judge_at_once(self, block, positions, q, u, sampling, verify):
        """What `runs.judge` returns, where there is a graph that does it all; else None."""
        if not (self._ready() and self._graphs.judges and self._graphs.fits(block)):
            return None
        self.forwards += 1
        return self._graphs.judge(block, positions, q, u, sampling, verify, self._cache)

    @torch.inference_mode()
    def round_at_once(self, draft, tokens, positions, sampling, generator=None):
        """Guesses of `draft` after a block `tokens[B, w]`, scored by this model, where there is a graph that does it
        all; else None. positions `[B, w + gamma]`, of the block and the guesses. Returns the guesses `[B, gamma]`, the
        distributions q they were drawn from, and p `[B, gamma + 1, vocabulary]`, before each and after the last."""
        count = positions.shape[1] - tokens.shape[1]
        key = draft._graphs, *tokens.shape, count
        if not (self._ready() and draft._ready() and key in self._graphs.rounds):
            return None
        self.forwards, draft.forwards = self.forwards + 1, draft.forwards + count
        u = torch.rand(count, len(tokens), device=self.device, generator=generator)
        return self._graphs.round(draft._graphs, tokens, positions, u, sampling, draft._cache, self._cache)

    def _ready(self):
        """Whether there are graphs, and memory for the cache was taken."""
        return self._graphs and self._cache.layers[0].is_initialized

    def read_prompt(self, rows):
        """Read every row's prompt (`Rows`) in one forward; float32 logits `[B, vocabulary]` after each prompt's end.

        Shorter prompts are padded at the right. What is read there is stale from the start: later tokens overwrite it.
        """
        self.reserve(len(rows.prompt), rows.capacity)
        positions = torch.arange(rows.prompt.shape[1], device=self.device).repeat(len(rows.prompt), 1)
        return self.forward(rows.prompt, positions, keep=rows.prompt_lengths - 1)

    @torch.inference_mode()
    def score(self, tokens):
        """Logits after each of `tokens[B, n]` read from the start, without the cache: float32 `[B, n, vocabulary]`."""
        return self.model(input_ids=tokens, use_cache=False).logits[..., : self.vocabulary].float()
