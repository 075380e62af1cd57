"""How values are written on the command line: human numbers, token biases, chat templates."""

import re
from decimal import Decimal
from pathlib import Path

import typer

# vLLM's reading: small letters count in thousands and may follow a decimal fraction, capitals in powers of 1024.
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_number(text: str | int) -> int:
    """8192, 8_192, 8k (8,000), 25.6k (25,600) and 8K (8,192) as an integer. Raises BadParameter for the rest."""
    if isinstance(text, int):  # a default: typer parses it too
        return text
    found = re.fullmatch(r"(-?[0-9]+(?:_[0-9]+)*)(\.[0-9]+)?([kmgtKMGT]?)", text.strip())
    if found and (found[2] is None or found[3].islower()):
        value = Decimal(found[1] + (found[2] or "")) * UNITS.get(found[3], 1)
        if value == int(value):
            return int(value)
    raise typer.BadParameter(f"{text!r} is no whole number; write 8192, 8k (8,000), 25.6k or 8K (8,192)")


def bias_entry(text: str) -> tuple[int, float]:
    """TOKEN_ID=NUMBER. Raises BadParameter."""
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias {text!r}: expected TOKEN_ID=NUMBER, such as 42=-100") from None


def template_source(text: str) -> str:
    """The chat template: of the file with this name, or the text itself where it looks like Jinja.

    Raises BadParameter when it is neither.
    """
    if "{" in text or "\n" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise typer.BadParameter(
            f"{text!r} is neither a template (it has no '{{') nor a readable file: {reason}"
        ) from None
