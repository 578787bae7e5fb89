"""The child process of a row: `python -m benchmark.engines.worker`. It reads messages from stdin and answers on stdout,
one JSON object a line.

    {"do": "convert", "module", "source", "folder", "vocabulary", "bits"}   answered by {}
    {"do": "load", "module", ...}    the fields of `Load`                    answered by {"version"}
    {"do": "generate", ...}          the fields of `Asked`                   answered by {"tokens", "times"}

What fails is answered by {"error"}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmark.engines.engineModule import Asked, Load
from benchmark.engines.weights import Weights


class Worker:
    """Does what messages say."""

    engine: Any = None

    def convert(self, module: str, source: str, folder: str, vocabulary: int, bits: int) -> dict[str, Any]:
        """Convert the model in the folder `source`."""
        own = importlib.import_module(f"benchmark.engines.{module}")
        own.convert(Weights(Path(source), vocabulary), Path(folder), bits)
        return {}

    def load(self, module: str, target: str, draft: str | None, **fields: Any) -> dict[str, Any]:
        """Load converted models."""
        own = importlib.import_module(f"benchmark.engines.{module}")
        self.engine = own.Engine(Load(Path(target), Path(draft) if draft else None, **fields))
        return {"version": self.engine.version}

    def generate(self, **fields: Any) -> dict[str, Any]:
        """Continue a prompt."""
        tokens, times = self.engine.generate(Asked(**fields))
        return {"tokens": list(map(int, tokens)), "times": times}


def main() -> None:
    """Answer messages until stdin ends."""
    os.setpgrp()  # client.py stops and ends the whole group.
    # Engines print to stdout. Answers go to a copy of it, and everything else to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = getattr(worker, message.pop("do"))(**message)
        except Exception as error:  # Whatever an engine raises is the reason why its row is left out.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
