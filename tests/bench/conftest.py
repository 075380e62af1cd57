"""The fake frontend and its loopback server are modules beside the server's tests."""

import sys
from pathlib import Path

# Type checkers do not see it: the imports say so.
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
