"""Each module has a test file of its name, or is named here beside the one whose tests prove it."""

from pathlib import Path

import pytest
from conftest import ROOT

ELSEWHERE = {
    "benchmarkParts": "benchmark",
    "benchmarkPeers": "benchmark",
    "benchmarkReport": "benchmark",
    "escape": "security",
    "experiments": "cli",
    "hub": "downloadModel",
    "losslessReport": "losslessness",
    "packedLinear": "compiledForward",
    "plantedMistakes": "losslessness",
    "plots": "results",
    "prompts": "cli",
    "proof": "losslessness",
    "report": "results",
    "runs": "drafters",
    "tables": "results",
    "test": "cli",
}


@pytest.mark.parametrize("module", sorted(path.stem for path in ROOT.glob("*.py")))
def test_every_module_has_its_tests(module):
    assert Path(__file__).with_name(f"test_{ELSEWHERE.get(module, module)}.py").exists()
