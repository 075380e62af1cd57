"""The text that a model is measured on: a person's file, or the one that is part of jaxserve and never changes."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jaxserve.errors import ConfigError

BUILT_IN = "built_in.txt"


@dataclass(frozen=True, kw_only=True)
class EvalText:
    """A text and what tells it from others. name: the path as given, or "built-in"."""

    name: str
    text: str
    num_bytes: int
    sha256: str


def read_text(path: Path | None) -> EvalText:
    """The text of a UTF-8 file, the built-in one for None. Raises ConfigError for what is no text."""
    if path is None:
        return _text("built-in", resources.files("jaxserve.evals").joinpath(BUILT_IN).read_bytes())
    try:
        content = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"--text {path}: cannot be read: {error.strerror}") from None
    return _text(str(path), content)


def _text(name: str, content: bytes) -> EvalText:
    """Line ends stay as they are: what is measured are the file's own bytes."""
    zero = content.find(b"\0")
    if zero >= 0:
        raise ConfigError(f"--text {name}: byte {zero:,} is zero, so this is no text; give a UTF-8 text file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {name}: byte {error.start:,} is not UTF-8; give a UTF-8 text file") from None
    return EvalText(name=name, text=text, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
