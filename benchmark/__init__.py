"""The benchmark, `python -m benchmark`: this project's decoding beside other engines and beside the memory limit."""
