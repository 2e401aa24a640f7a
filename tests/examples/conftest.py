"""The toy algorithm of the developer guide is imported from where it lies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "toy_algorithm"))
