"""Tools for maintainers, run as `python -m scripts.NAME`: they train the bundled models, keep records, and render the
documentation and its figures."""
