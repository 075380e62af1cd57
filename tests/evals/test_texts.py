"""A text is UTF-8 with nothing binary in it; the built-in one stays what it is."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.evals.texts import read_text


def test_the_built_in_text_never_changes():
    """Figures of different versions are compared by it."""
    found = read_text(None)
    assert (found.name, found.num_bytes) == ("built-in", 4876)
    assert found.sha256 == "d6ec9b5d2ed8bd7550c2eb3b72159ea4fc6fd4564b4645889fa41e4627c17e4f"


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "t").write_bytes("é\r\nline".encode())
    found = read_text(tmp_path / "t")
    assert (found.text, found.num_bytes, found.name) == ("é\r\nline", 8, str(tmp_path / "t"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGUF\x00", "byte 4 is zero, so this is no text"),
        (b"abc\xff", "byte 3 is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_text(tmp_path, content, said):
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_text(path)
    assert str(caught.value).startswith(f"--text {path}: {said}")
