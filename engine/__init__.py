"""How a model runs: with a KV cache addressed by position; compiled, by kernels on a CPU and by graphs on a GPU."""
