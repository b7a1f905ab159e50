"""Performance and memory against plain implementations; some share the tests' oracles."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "packages" / "entropy-experiments" / "tests"))
