"""C++ kernels for a CPU, their build, and the linear layer whose weights are packed for them."""
