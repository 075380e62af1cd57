"""The fake engine is a program beside these tests."""

import sys
from pathlib import Path

import pytest

# Type checkers do not see it: the imports say so.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def root_fixtures() -> Path:
    """The folder of the tests' files."""
    return Path(__file__).resolve().parents[2] / "fixtures"
