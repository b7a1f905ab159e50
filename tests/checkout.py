"""Where things are in this repository, for tests and benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = tuple(sorted((ROOT / "packages").glob("*/src")))
DISTRIBUTION = ROOT / "packages" / "entropy-experiments"
PACKAGE = DISTRIBUTION / "src" / "entropy_experiments"
