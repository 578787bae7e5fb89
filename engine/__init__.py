"""How a model runs: a Hugging Face causal language model, its KV cache addressed by position, and the graphs (compiled
on a CPU, captured on a GPU) that replace eager forwards."""
