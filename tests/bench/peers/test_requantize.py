"""A file is requantized once, under the peer's interpreter, and whatever goes wrong leaves nothing behind."""

import os
import sys

import pytest

from jaxserve.bench.peers.requantize import RequantizeFailed, requantized
from jaxserve.errors import ConfigError


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def python(tmp_path):
    """Writes a program that takes the interpreter's place: it is given the script and its arguments."""

    def write(body):
        path = tmp_path / "python"
        path.write_text(
            f"#!{sys.executable}\nimport pathlib, sys\nscript, source, target, name = sys.argv[1:]\n{body}\n"
        )
        path.chmod(0o755)
        return str(path)

    return write


def test_the_file_is_written_once_for_each_source(model, python, tmp_path):
    copy = "pathlib.Path(target).write_text(name + ' of ' + pathlib.Path(source).read_text())"
    first = requantized(model, "Q4_0", python(copy), tmp_path / "cache", 30.0)
    assert first.read_text() == "Q4_0 of weights"
    assert first.suffix == ".gguf"
    again = requantized(model, "Q4_0", python("sys.exit('asked twice')"), tmp_path / "cache", 30.0)
    assert again == first
    os.utime(model, ns=(1, 1))  # another file under the same name
    with pytest.raises(RequantizeFailed, match="asked twice"):
        requantized(model, "Q4_0", python("sys.exit('asked twice')"), tmp_path / "cache", 30.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import absent_module", r"No module named 'absent_module' \(pip install llama-cpp-python\)"),
        ("sys.exit(1)", "nothing on stderr"),
        ("", "nothing on stderr"),
    ],
)
def test_failures_are_one_line(model, python, tmp_path, body, message):
    with pytest.raises(RequantizeFailed, match=message):
        requantized(model, "Q4_0", python(body), tmp_path / "cache", 30.0)
    assert list((tmp_path / "cache").glob("*.gguf")) == []


def test_formats_that_are_not_known_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="--requantize must be one of Q4_0"):
        requantized(model, "q4", sys.executable, tmp_path, 1.0)
    with pytest.raises(RequantizeFailed, match="No such file"):
        requantized(model, "Q4_0", str(tmp_path / "nowhere"), tmp_path, 1.0)
