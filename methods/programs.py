"""The methods that other programs compute (benchmark/)."""

# {program: {kind of its methods: title}}. The name of a program alone is all of them.
PROGRAMS = {
    "generate": {
        "plain": "generate of transformers",
        "static": "the same with a static KV cache",
        "compiled": "the same, compiled by transformers",
        "lookup": "its prompt lookup",
        "draft": "its assisted decoding with gamma guesses each round",
        "assisted": "its assisted decoding as it comes",
        "custom": "this project's speculative sampling inside generate",
    },
    "llama.cpp": {
        "plain": "float16",
        "draft": "float16, the draft model guesses",
        "copy": "float16, the target's 4-bit copy guesses",
        "int8": "weights in int8",
    },
    "openvino": {"plain": "OpenVINO GenAI", "draft": "the draft model guesses", "int8": "weights in int8"},
    "ctranslate2": {"plain": "float32", "int8": "weights in int8"},
    "vllm": {"plain": "vLLM", "lookup": "its prompt lookup"},
}
