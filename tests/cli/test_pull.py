"""One line, or JSON, about a model on this disk."""

import hashlib
import json

from checkpoints.catalog import CATALOG, DEFAULT_MODEL
from checkpoints.hub import PulledModel
from jaxserve.cli import pull


def test_a_file_is_described_in_one_line(run, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"abc" * 400)
    ran = run("pull", str(file))
    sha256 = hashlib.sha256(b"abc" * 400).hexdigest()
    assert (ran.code, ran.out) == (0, f"{file}  1,200 bytes  sha256 {sha256}  cached\n")
    result = json.loads(run("pull", str(file), "--json").out)
    assert result == {
        "model": str(file),
        "path": str(file),
        "num_bytes": 1200,
        "sha256": sha256,
        "was_cached": True,
    }


def test_without_a_name_the_default_goes_to_the_chosen_cache(run, monkeypatch, tmp_path):
    asked = []

    def pull_model(source, *, cache_dir):
        asked.append((source, cache_dir))
        return PulledModel(path=tmp_path, num_bytes=5, sha256=None, was_cached=False)

    monkeypatch.setattr(pull, "pull_model", pull_model)
    assert run("pull", "--cache-dir", str(tmp_path)).out == f"{tmp_path}  5 bytes  fetched\n"
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path / "home"))
    run("pull")
    assert asked == [(DEFAULT_MODEL, tmp_path), (DEFAULT_MODEL, tmp_path / "home")]


def test_the_catalog(run):
    lines = run("pull", "--list").out.splitlines()
    assert len(lines) == len(CATALOG)
    assert lines[0].startswith(f"{DEFAULT_MODEL} (default)  98,362,432 bytes  ")
    assert {entry["name"] for entry in json.loads(run("pull", "--list", "--json").out)} == set(CATALOG)
