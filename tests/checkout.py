"""Where things are in this repository, for tests and benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = tuple(sorted((ROOT / "packages").glob("*/src")))
PACKAGE = ROOT / "packages" / "entropy-experiments" / "src" / "entropy_experiments"
