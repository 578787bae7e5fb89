"""The project's own folders. Use them as `folders.MODELS`, so that a test can replace them in one place."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
DATASETS = ROOT / "datasets"
