"""The benchmark (`python -m benchmark`): this project beside other engines and beside the memory limit."""
