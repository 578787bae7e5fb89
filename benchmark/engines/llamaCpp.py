"""llama.cpp: its server, in a process of its own."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmark.engines.adapters import SERVER, Answer, Engine, LoadRequest, TextRequest, Weights

KINDS = {  # {bits: how a matrix is stored}
    16: gguf.GGMLQuantizationType.F16,
    8: gguf.GGMLQuantizationType.Q8_0,
    4: gguf.GGMLQuantizationType.Q4_0,
}
SURE = 0.5  # how probable a guess must be to the draft
WAIT = 600  # seconds for the server to load a model, and to write a text


class LlamaCpp(Engine):
    """A server, and the connection to it."""

    version = "llama.cpp server of llama-cpp-python"

    @staticmethod
    def convert(weights: Weights, folder: Path, bits: int) -> None:
        """Write model.gguf."""
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama" if weights.llama else "gptneox")
        writer.add_context_length(weights.context)
        writer.add_embedding_length(weights.hidden)
        writer.add_block_count(weights.layers)
        writer.add_feed_forward_length(weights.config["intermediate_size"])
        writer.add_rope_dimension_count(weights.rotary)
        writer.add_rope_freq_base(weights.theta)
        writer.add_head_count(weights.heads)
        writer.add_head_count_kv(weights.groups)
        if weights.llama:
            writer.add_layer_norm_rms_eps(weights.epsilon)
        else:
            writer.add_layer_norm_eps(weights.epsilon)
            writer.add_parallel_residual(weights.config["use_parallel_residual"])
        writer.add_vocab_size(weights.vocabulary)
        # The only kind of vocabulary that has pieces and yet no token that ends a text.
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list([f"t{token}" for token in range(weights.vocabulary)])
        writer.add_token_types([gguf.TokenType.NORMAL] * weights.vocabulary)
        architecture = gguf.MODEL_ARCH.LLAMA if weights.llama else gguf.MODEL_ARCH.GPTNEOX
        by_name = gguf.get_tensor_name_map(architecture, weights.layers)
        names = {by_name.get_name(source, (".weight", ".bias")): source for source in weights.files}
        names.pop(None, None)  # Old files hold buffers too, which are no weights.
        for name, source in names.items():
            weight = weights[source]
            if "attn_qkv" in name:  # By head, each with q, k and v -> all of q, all of k, all of v.
                grouped = weight.reshape(weights.heads, 3, weights.head, *weight.shape[1:])
                weight = grouped.swapaxes(0, 1).reshape(weight.shape)
            elif weights.llama and ("attn_q." in name or "attn_k." in name):
                # llama.cpp rotates neighbouring numbers, transformers those half a head apart.
                heads = weights.heads if "attn_q" in name else weights.groups
                halves = weight.reshape(heads, 2, weights.head // 2, *weight.shape[1:])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            kind = gguf.GGMLQuantizationType.F32
            if weight.ndim > 1:  # A matrix whose rows are not whole blocks is stored in 16 bits.
                block, _ = gguf.GGML_QUANT_SIZES[KINDS[bits]]
                kind = KINDS[16 if weight.shape[-1] % block else bits]
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def __init__(self, request: LoadRequest) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self.port = unused.getsockname()[1]
        threads = str(request.threads)
        # fmt: off
        command = [
            str(SERVER), "--model", f"{request.target}/model.gguf", "--host", "127.0.0.1", "--port", str(self.port),
            "--threads", threads, "--threads-batch", threads, "--parallel", str(request.batch),
            "--ctx-size", str(request.batch * request.context), "--cache-ram", "0", "--no-warmup", "--offline",
            "--log-disable",
        ]
        if request.draft:
            command += [
                "--model-draft", f"{request.draft}/model.gguf", "--spec-type", "draft-simple",
                "--spec-draft-n-max", str(request.gamma), "--spec-draft-n-min", "0", "--threads-draft", threads,
                # It guesses the draft's likeliest token, which is often wrong where the draft is unsure, and it guesses
                # no further there. Random weights are never sure, and a coin accepts them.
                "--spec-draft-p-min", "0" if request.alpha is not None else str(SURE),
            ]
        if request.alpha is not None:  # Each rate is that of a guess and of all before it.
            command += ["--spec-synth-rates", ",".join(str(request.alpha**i) for i in range(1, request.gamma + 1))]
        # fmt: on
        self.settings = {"arguments": [word for word in command if "/" not in word]}  # without paths
        self.start(command)

    def start(self, command: list[str]) -> None:
        """Run the server, and wait until the model is loaded. Raises RuntimeError if it does not load it.

        The server may die of its code for AMX: GCC 12 leaves out a part of the stores that describe the tiles, because
        its `_tile_loadconfig` claims to read 8 of the 64 bytes. Without repacked weights that code is not used.
        """
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            code = self.process.poll()
            if code == -signal.SIGSEGV and "--no-repack" not in command:
                return self.start([*command, "--no-repack"])
            if code is not None:
                raise RuntimeError(f"llama-server ended with exit code {code}")
            with suppress(OSError):
                if self.request("GET", "/health")[0] == 200:
                    return None
            time.sleep(0.2)
        raise RuntimeError("llama-server did not load the model in time")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, answer) of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def generate(self, request: TextRequest) -> Answer:
        """Continue one prompt. The times are by the server's own clock: an HTTP request is no part of decoding."""
        body = {
            "prompt": request.prompt,
            "n_predict": request.count,
            "cache_prompt": False,
            "return_tokens": True,
            "samplers": ["temperature", "top_p"] if request.temperature else ["top_k"],
            "temperature": request.temperature,
            "top_p": request.top_p if request.temperature else 1.0,
            "top_k": 0 if request.temperature else 1,
            "seed": request.seed,
        }
        status, answer = self.request("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {answer}")
        first, rest = (answer["timings"][f"{part}_ms"] / 1e3 for part in ("prompt", "predicted"))
        tokens = answer["tokens"]
        return tokens, [(first, 1), (first + rest, len(tokens) - 1)]

    def batch(self, requests: Sequence[TextRequest], batch: int) -> list[Answer]:
        start = time.perf_counter()

        def write(request: TextRequest) -> Answer:
            before = time.perf_counter() - start
            tokens, times = self.generate(request)
            return tokens, [(before + seconds, new) for seconds, new in times]

        with ThreadPoolExecutor(batch) as pool:
            return list(pool.map(write, requests))
