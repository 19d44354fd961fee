"""Which shard holds a tensor, and one clear error for every way a folder can be broken."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from jserve.weights.errors import WeightsError
from jserve.weights.safetensors import INDEX, SINGLE, read_folder


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    """`a` and `b` in shard 1, `w` in both, and the index says that shard 2's counts."""
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((4, 4), np.float16)
    save_file({"a": a, "b": b, "w": np.full(5, 1.0, np.float32)}, tmp_path / "one.safetensors")
    save_file({"w": np.full(5, 2.0, np.float32)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "w": "two.safetensors"})
    return tmp_path


def test_the_index_decides_which_shard_a_tensor_comes_from(sharded, caplog):
    tensors = read_folder(sharded)
    assert tensors["w"].read(0, 5).tolist() == [2.0] * 5
    assert tensors["a"].read(1, 2).tolist() == [[3.0, 4.0, 5.0]]
    assert tensors["b"].read(0, 4).dtype == np.float16
    assert "one.safetensors: ignored, for model.safetensors.index.json does not place them here: w" in caplog.text


def test_a_missing_shard_is_named_with_what_it_holds(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(WeightsError, match="two.safetensors: the shard is missing; .* says it holds w"):
        read_folder(sharded)


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded):
    write_index(sharded, {"a": "two.safetensors", "w": "two.safetensors"})
    with pytest.raises(WeightsError, match="two.safetensors: tensor a is missing; .* says it is there"):
        read_folder(sharded)


def test_a_truncated_file_is_named_with_tensor_and_bytes(sharded):
    path = sharded / "one.safetensors"
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 10)
    complaint = f"one.safetensors: truncated: tensor . is .*{whole}, the file has {whole - 10}"
    with pytest.raises(WeightsError, match=complaint):
        read_folder(sharded)


def test_a_file_that_shrinks_after_opening_is_an_error_not_zeros(sharded):
    tensor = read_folder(sharded)["w"]
    with tensor.file.open("r+b") as file:
        file.truncate(tensor.offset + 8)
    with pytest.raises(WeightsError, match="two.safetensors: truncated: tensor w needs bytes up to"):
        tensor.read(0, 5)


@pytest.mark.parametrize(
    "content, complaint",
    [
        (struct.pack("<Q", 10**6) + b"{}", "the header is 1000000 bytes long, the file has only 10"),
        (b"abc", "truncated: 3 bytes"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors header"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "not a safetensors header"),
        (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", "not a safetensors header"),
    ],
)
def test_a_broken_header_is_named(tmp_path, content, complaint):
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(WeightsError, match=f"{SINGLE}: .*{complaint}"):
        read_folder(tmp_path)


def test_a_header_whose_sizes_disagree_is_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(WeightsError, match=r"tensor a: F32\[3\] needs 12 bytes, the header gives it 8"):
        read_folder(tmp_path)


def test_an_empty_folder_and_one_without_an_index_are_named(tmp_path):
    with pytest.raises(WeightsError, match=f"{tmp_path}: neither {SINGLE} nor {INDEX} is there$"):
        read_folder(tmp_path)
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightsError, match="it holds model-00001-of-00002.safetensors"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=f"{INDEX}: no readable weight_map"):
        read_folder(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path):
    write_index(tmp_path, {"a": "../elsewhere.safetensors"})
    with pytest.raises(WeightsError, match="'../elsewhere.safetensors' is not the name of a file beside it"):
        read_folder(tmp_path)


def test_a_number_type_that_is_not_built_is_named_when_it_is_read(tmp_path):
    save_file({"a": np.ones(4, np.int8)}, tmp_path / SINGLE)
    with pytest.raises(WeightsError, match="tensor a is I8: not built"):
        read_folder(tmp_path)["a"].read(0, 4)
