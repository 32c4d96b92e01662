"""The fakes are importable by name here, as they are in the replicas of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
