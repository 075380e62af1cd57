"""Every notebook runs from top to bottom."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, smollm2_path: Path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(not cell["outputs"] for cell in cells), "commit notebooks without outputs"
    namespace: dict[str, object] = {"__name__": "notebook"}
    for cell in cells:
        exec(compile("".join(cell["source"]), path.name, "exec"), namespace)
