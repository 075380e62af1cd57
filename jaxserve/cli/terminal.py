"""What may be written to a terminal: text from models and files without the characters that steer it."""

import json
import sys
from typing import Any

KEPT_CONTROLS = "\n\t"
# They print nothing and reorder what stands around them (Unicode TR 36, "Trojan source").
BIDI_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def visible(text: str) -> str:
    r"""Text with every control character but newline and tab written as an escape, such as \x1b."""
    return "".join(_escaped(char) if _steers(char) else char for char in text)


def visible_line(text: object) -> str:
    """The same on one line."""
    return visible(str(text).replace("\n", " ").replace("\t", " "))


def write_text(text: str) -> None:
    """Writes text of a model to stdout at once: as it is into a file or pipe, made visible on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """One JSON document on stdout, in ASCII."""
    print(json.dumps(value, indent=2))


def note(line: str) -> None:
    """One line for the person watching, on stderr."""
    print(visible_line(line), file=sys.stderr, flush=True)


def _steers(char: str) -> bool:
    code = ord(char)
    return (code < 0x20 and char not in KEPT_CONTROLS) or 0x7F <= code < 0xA0 or char in BIDI_CONTROLS


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
