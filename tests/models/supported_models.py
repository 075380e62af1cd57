"""The README's table of supported models, from the families and from the cases of test_parity.py.

`python tests/models/supported_models.py` puts it into the README; test_supported_models.py says when that is needed.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from jaxserve.models.model import Model  # noqa: E402
from jaxserve.models.registry import MODELS  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
START, END = "<!-- supported models: tests/models/supported_models.py -->", "<!-- end of supported models -->"


def table() -> str:
    """A row for each family: what it is, the architectures it reads, the reference models it agrees with."""
    rows = ["| models | `config.json` | GGUF | agrees with |", "|---|---|---|---|"]
    for model in MODELS:
        names = [_code(model.hf_architectures), _code(model.gguf_architectures), _code(references(model))]
        rows.append(f"| {title(model)} | {' | '.join(names)} |")
    return "\n".join(rows)


def title(model: Model) -> str:
    """What a family's module says it is: its first line up to the colon, without sources."""
    module = sys.modules[model.config_from_hf.__module__]
    line = (module.__doc__ or "").strip().splitlines()[0]
    return re.sub(r" \([^()]*arXiv[^()]*\)", "", re.split(r"[:;]|\.$", line)[0])


def references(model: Model) -> list[str]:
    """Reference models of the family that test_parity.py runs."""
    found = []
    for folder in sorted((FIXTURES / "models").iterdir()) + sorted((FIXTURES / "gguf").iterdir()):
        config = folder / "config.json"
        if config.is_file() and json.loads(config.read_text())["architectures"][0] in model.hf_architectures:
            found.append(folder.name)
    return found


def _code(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def in_readme(text: str) -> str:
    """The README with the table in its place."""
    before, rest = text.split(START)
    return f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(in_readme(readme.read_text()))
