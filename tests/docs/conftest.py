"""The pages people read: README, CONTRIBUTING and docs/, and what is in them."""

import sys
from pathlib import Path


# Test modules are imported by path (see pyproject.toml); the helper beside them needs its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
