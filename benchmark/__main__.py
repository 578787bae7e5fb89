"""The benchmark: `test.py` with the flags that compare every method, and `transformers`' own, and time the steps.

    python -m benchmark                          the pair that test.py uses by default
    python -m benchmark --target random:pythia-2.8b --draft random:pythia-70m --acceptance 0.6     Pythia's shapes
    python -m benchmark --compare all,generate,llama.cpp,openvino      other engines too; make bench-peers installs them

Flags that are given come after these and win.
"""

import argparse
import sys
from collections.abc import Sequence

from inputs import starting

PRESET = ["--compare", "all,generate", "--steps", "--compile", "--maxLen", "300", "--repeats", "3"]
FEW = ["--sentences", "5"]
PROMPTS = {"--prompt", "--prompts", "--promptFile", "--question"}  # With these no text of the data set is used.


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of test.py; --help shows the defaults of the benchmark."""
    from experiments import flags  # Here, because starting.py reads flags without the libraries.

    parser = flags.parser()
    preset = vars(parser.parse_args([*PRESET, *FEW]))
    for action in parser._actions:
        if (value := preset.get(action.dest, action.default)) != action.default:
            action.help = f"{str(action.help).partition(' Default: ')[0]} Default: {'on' if value is True else value}."
    for group in parser._action_groups:
        group.title = str(group.title).replace("--speed --ppl", "--compare --steps")
    return flags.read_flags(argv)


if __name__ == "__main__":
    given = {word.split("=")[0] for word in sys.argv[1:]}
    sys.argv[:1] = [str(starting.ROOT / "test.py"), *PRESET, *([] if given & PROMPTS else FEW)]
    sys.exit(starting.run(sys.argv[0], "benchmark.__main__.read_flags"))
