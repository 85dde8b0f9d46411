"""Test modules are imported by path (see pyproject.toml); the helpers beside them need their folder on the path."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
