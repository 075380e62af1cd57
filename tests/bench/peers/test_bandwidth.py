"""Bytes a decode step reads, from files of known tensors, and that a bandwidth is a positive number."""

import gguf
import numpy as np
import pytest

from jaxserve.bench.peers.bandwidth import ReadBandwidth, bytes_per_decode_step


def _write(path, **tensors):
    writer = gguf.GGUFWriter(path, "llama")
    for name, size in tensors.items():
        writer.add_tensor(name.replace("_weight", ".weight"), np.zeros((size, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_embedding_table_that_is_the_output_too_is_read(tmp_path):
    path = _write(tmp_path / "tied.gguf", token_embd_weight=10, other_weight=3)
    assert bytes_per_decode_step(path) == 13 * 32 * 4


def test_of_an_embedding_table_alone_one_row_is_read_and_not_counted(tmp_path):
    path = _write(tmp_path / "untied.gguf", token_embd_weight=10, output_weight=5, other_weight=3)
    assert bytes_per_decode_step(path) == 8 * 32 * 4


@pytest.mark.parametrize("num_threads", [1, 2])
def test_memory_is_read(num_threads):
    memory = ReadBandwidth(num_threads, num_bytes=1 << 16)
    assert memory.bytes_per_second() > 0
    memory.close()
