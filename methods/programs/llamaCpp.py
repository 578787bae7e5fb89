"""llama.cpp: its server, and the connection to it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from methods.programs.program import FOLDER, PIP, Answer, LoadRequest, Program, Row, TextRequest, Weights, run_command

SURE = 0.5  # how probable a guess must be to the draft
KEY = secrets.token_hex()  # by which the server knows this process: another run's may have taken the port
WAIT = 600  # seconds for the server to write a text
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # It would be downloaded.
    "LLAMA_OPENSSL": "OFF",
}


class LlamaCpp(Program):
    """It computes in float16, unless a row says otherwise."""

    name = "llama.cpp"
    rows = {
        "plain": Row("float16", None, "float16"),
        "draft": Row("float16, the draft model guesses", "draft", "float16"),
        "copy": Row("float16, the target's 4-bit copy guesses", "target", "float16"),
        "lookup": Row("float16, its n-grams guess", "lookup", "float16", matched=12, guesses=48),
        "bfloat16": Row("bfloat16", None, "bfloat16"),
        "int8": Row("weights in int8", None, "int8"),
        "int4": Row("weights in 4 bits, Q4_1, and the output layer in int8", None, "int4", "Q4_1"),
        "q4_0": Row("weights in 4 bits, Q4_0, and the output layer in int8", None, "int4", "Q4_0"),
    }
    requirements = ("llama-cpp-python==0.3.36",)
    installed = FOLDER / "llama-server"
    batches = coin = True
    version = f"llama.cpp server of {requirements[0].replace('==', ' ')}"

    @classmethod
    def install(cls) -> None:
        """Compile llama-server from the source that the package brings. Nothing else of it is used."""
        if not shutil.which("cmake"):
            raise RuntimeError("cmake is needed to compile llama.cpp")
        package = cls.requirements[0]
        with tempfile.TemporaryDirectory() as folder:
            options = "--no-deps", "--no-binary", package.split("==")[0], "--dest", folder
            run_command(sys.executable, *PIP, "download", *options, package)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
            (source,) = Path(folder).glob("*/vendor/llama.cpp")
            build = Path(folder) / "build"
            run_command("cmake", "-S", source, "-B", build, *(f"-D{name}={v}" for name, v in CMAKE_OPTIONS.items()))
            run_command("cmake", "--build", build, "--target", "llama-server", "--parallel", os.cpu_count() or 1)
            shutil.copy(build / "bin" / "llama-server", cls.installed)

    @staticmethod
    def convert(weights: Weights, folder: Path, form: str) -> None:
        """Write model.gguf."""
        import gguf

        types = gguf.GGMLQuantizationType
        kinds = {"float16": types.F16, "bfloat16": types.BF16, "int8": types.Q8_0}
        kinds |= {"Q4_1": types.Q4_1, "Q4_0": types.Q4_0, "pure Q4_0": types.Q4_0}
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama" if weights.llama else "gptneox")
        writer.add_context_length(weights.context)
        writer.add_embedding_length(weights.config["hidden_size"])
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
            writer.add_parallel_residual(weights.parallel)
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
            kind = types.F32
            if weight.ndim > 1:  # A matrix whose rows are not whole blocks is stored in 16 bits.
                is_head = name.startswith(("token_embd", "output."))
                kind = kinds["int8" if form in ("Q4_1", "Q4_0") and is_head else form]
                kind = types.F16 if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def __init__(self, request: LoadRequest) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = str(unused.getsockname()[1])
        import requests

        self.address, self.session = f"http://127.0.0.1:{port}", requests.Session()
        self.session.trust_env = False  # no proxy
        self.session.headers["Authorization"] = f"Bearer {KEY}"
        threads = str(request.threads)
        # fmt: off
        command = [
            str(self.installed), "--model", f"{request.target}/model.gguf", "--host", "127.0.0.1", "--port", port,
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
        if request.matched:
            command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(request.matched)]
            command += ["--spec-ngram-simple-size-m", str(request.gamma)]
        if request.alpha is not None:  # Each rate is that of a guess and of all before it.
            command += ["--spec-synth-rates", ",".join(str(request.alpha**i) for i in range(1, request.gamma + 1))]
        # fmt: on
        self.start(command)

    def start(self, command: list[str]) -> None:
        """Run the server, and wait until the model is loaded. Raises RuntimeError if it does not load it.

        The server may die of its code for AMX: GCC 12 leaves out a part of the stores that describe the tiles, because
        its `_tile_loadconfig` claims to read 8 of the 64 bytes. Without repacked weights that code is not used.
        """
        self.settings = {"arguments": [word for word in command if "/" not in word]}  # without paths
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"LLAMA_API_KEY": KEY})
        while (code := process.poll()) is None:
            with suppress(OSError):
                if self.session.get(f"{self.address}/props", timeout=WAIT).ok:
                    return
            time.sleep(0.2)
        if code != -signal.SIGSEGV or "--no-repack" in command:
            raise RuntimeError(f"llama-server ended with exit code {code}")
        self.start([*command, "--no-repack"])

    def generate(self, request: TextRequest) -> Answer:
        """Continue one prompt. The times are by the server's own clock: an HTTP request is no part of decoding."""
        sampling, drawn = request.sampling, request.sampling.temperature > 0
        body = {
            "prompt": request.prompt,
            "n_predict": request.count,
            "cache_prompt": False,
            "return_tokens": True,
            "samplers": ["penalties", "temperature", "top_k", "top_p"] if drawn else ["penalties", "top_k"],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if drawn else 1,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(request.prompt) + request.count,  # of the whole text
            "seed": request.seed,
        }
        response = self.session.post(f"{self.address}/completion", json=body, timeout=WAIT)
        if not response.ok:
            raise RuntimeError(f"llama-server answered {response.status_code}: {response.text}")
        answer = response.json()
        first, rest = (answer["timings"][f"{part}_ms"] / 1e3 for part in ("prompt", "predicted"))
        tokens = answer["tokens"]
        return Answer(tokens, [(first, 1), (first + rest, len(tokens) - 1)])

    def write(self, requests: Sequence[TextRequest], batch: int) -> list[Answer]:
        if batch == 1:
            return super().write(requests, batch)
        start = time.perf_counter()

        def late(request: TextRequest) -> Answer:
            """A text whose times count from the start of all."""
            begun = time.perf_counter() - start
            answer = self.generate(request)
            return Answer(answer.tokens, [(begun + seconds, new) for seconds, new in answer.times], begun)

        with ThreadPoolExecutor(batch) as pool:
            return list(pool.map(late, requests))
