"""GGUF headers and number types, against the gguf package; and one clear error for every way a file can be broken."""

import gguf
import numpy as np
import pytest

from jserve.models.config import ModelError
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.errors import WeightsError
from jserve.weights.gguf import as_hf, read_gguf
from tests.support.tiny_models import random_gguf


def write(path, tensors=(), fields=()):
    writer = gguf.GGUFWriter(path, "llama")
    for add, *arguments in fields:
        getattr(writer, add)(*arguments)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_are_plain_values_of_every_type(tmp_path):
    fields = [
        ("add_uint8", "u8", 200), ("add_int8", "i8", -3), ("add_uint16", "u16", 60000), ("add_int16", "i16", -300),
        ("add_uint32", "u32", 4 * 10**9), ("add_int32", "i32", -5), ("add_uint64", "u64", 2**63),
        ("add_int64", "i64", -(2**40)), ("add_float32", "f32", 0.5), ("add_float64", "f64", 0.1),
        ("add_bool", "yes", True), ("add_string", "text", "naïve 🙂"), ("add_array", "words", ["a", "", "ü"]),
        ("add_array", "numbers", [3, 1, 2]), ("add_array", "floats", [0.5, -1.0]),
    ]  # fmt: skip
    read = read_gguf(write(tmp_path / "m.gguf", [("w", np.ones((1, 1), np.float32), None)], fields)).fields
    assert {key: read[key] for _, key, _ in fields} == {key: value for _, key, value in fields}
    assert read["general.architecture"] == "llama"


QUANTISED = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("encoding", ("F32", "F16", *QUANTISED))
def test_numbers_are_bit_equal_to_the_gguf_package(tmp_path, encoding):
    kind = gguf.GGMLQuantizationType[encoding]
    rng = np.random.default_rng(0)
    if encoding.endswith("_K"):  # the package reads these but does not write them: any bytes but infinite scales do
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        data = rng.integers(0, 59, (6, 2 * block_bytes), np.uint8)
    else:
        data = gguf.quantize(rng.standard_normal((6, 512), np.float32), kind)
    tensor = read_gguf(write(tmp_path / "m.gguf", [("w", data, kind)])).tensors["w"]
    assert (tensor.shape, tensor.encoding) == ((6, 512), encoding)
    expected = gguf.dequantize(data, kind).reshape(6, 512)
    assert np.array_equal(tensor.read(0, 6).astype(np.float32), expected)
    assert np.array_equal(tensor.read(2, 5).astype(np.float32), expected[2:5])


def test_only_the_llama_architecture_has_its_q_and_k_rows_reordered(tmp_path):
    """Stored per head of 4: 0, 2, 1, 3; any other tensor, and any other architecture, as it is."""
    rows = np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    names = [f"blk.0.attn_{part}.weight" for part in "qkv"] + ["blk.0.attn_q.bias"]
    file = read_gguf(write(tmp_path / "m.gguf", [(name, rows, None) for name in names]))
    restored = as_hf(file, "llama", head_dim=4)
    halves_first = [0, 2, 1, 3, 4, 6, 5, 7]
    assert restored["model.layers.0.self_attn.q_proj.weight"].read(0, 8)[:, 0].tolist() == halves_first
    assert restored["model.layers.0.self_attn.q_proj.bias"].read(0, 8)[:, 0].tolist() == halves_first
    assert restored["model.layers.0.self_attn.k_proj.weight"].read(4, 8)[:, 0].tolist() == halves_first[4:]
    assert restored["model.layers.0.self_attn.v_proj.weight"].read(0, 8)[:, 0].tolist() == list(range(8))
    other = as_hf(file, "qwen2", head_dim=4)
    assert other["model.layers.0.self_attn.q_proj.weight"].read(0, 8)[:, 0].tolist() == list(range(8))


@pytest.fixture
def small_file(tmp_path):
    weights = np.ones((8, 64), np.float32)
    return write(tmp_path / "m.gguf", [("a", weights, None), ("b", weights, None)], [("add_string", "key", "x" * 100)])


def test_a_file_cut_anywhere_is_refused_with_its_name_and_bytes(small_file):
    whole = small_file.read_bytes()
    for size in (0, 3, 23, 24, 60, 150, 300, len(whole) - 4096, len(whole) - 1):
        small_file.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=f"m.gguf: .*truncated: .*{size}"):
            read_gguf(small_file)


def test_the_truncated_tensor_is_named(small_file):
    whole = small_file.read_bytes()
    small_file.write_bytes(whole[:-1])
    with pytest.raises(WeightsError, match=f"tensor b is bytes {len(whole) - 2048} to {len(whole)}"):
        read_gguf(small_file)


@pytest.mark.parametrize(
    "at, replacement, complaint",
    [
        (0, b"PK\x03\x04", "not a GGUF file: it starts with b'PK"),
        (4, b"\x01\x00\x00\x00", "GGUF version 1: not built"),
        (4, b"\x00\x00\x00\x03", "GGUF version 50331648: not built"),  # big-endian
        (8, b"\xff" * 8, "truncated|no GGML|no GGUF"),  # as many tensors as 64 bits can say
        (24, b"\xff" * 8, "truncated: the header needs bytes up to"),  # a key of 16 exabytes
    ],
)
def test_a_broken_header_is_refused(small_file, at, replacement, complaint):
    data = bytearray(small_file.read_bytes())
    data[at : at + len(replacement)] = replacement
    small_file.write_bytes(data)
    with pytest.raises(WeightsError, match=complaint):
        read_gguf(small_file)


def test_one_of_several_splits_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", [("w", np.ones((1, 1), np.float32), None)], [("add_uint16", "split.count", 3)])
    with pytest.raises(WeightsError, match="one of 3 splits"):
        read_gguf(path)


def test_no_damaged_byte_of_a_header_ends_in_anything_but_a_model_error(tmp_path):
    """300 seeded places in the metadata and the list of tensors; the file then opens, or says what is wrong."""
    path = random_gguf(tmp_path / "m.gguf")
    whole = path.read_bytes()
    header_bytes = read_gguf(path).header_bytes
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.integers(header_bytes)] = rng.integers(256)
        path.write_bytes(data)
        try:
            open_checkpoint(path)
        except ModelError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 20
