"""Lets the tests of families import what they share (parity.py and the numpy models) by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
