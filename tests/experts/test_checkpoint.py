from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ffn_faas.errors import FfnError, ModelRefused, ResourceError
from ffn_faas.experts.checkpoint import INDEX_NAME, Checkpoint
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel, write_tensors

MODEL = TinyModel(layers=1, experts=2)
SPEC = MoESpec.from_config(MODEL.config())
GATE = "model.layers.0.mlp.experts.1.gate_proj.weight"


@pytest.mark.parametrize("shards", [1, 3])
def test_entries_point_at_the_bytes_that_the_safetensors_library_reads(tmp_path: Path, shards: int) -> None:
    checkpoint = Checkpoint.open(MODEL.write(tmp_path, shards))
    assert set(checkpoint.tensors) == set(MODEL.tensors())
    for name, entry in checkpoint.tensors.items():
        with safe_open(entry.path, "pt") as file:
            expected = file.get_tensor(name)
        raw = entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        assert raw == expected.view(torch.uint8).numpy().tobytes()
        assert entry.shape == tuple(expected.shape)


def test_index_decides_which_file_a_tensor_comes_from(tmp_path: Path) -> None:
    MODEL.write(tmp_path, 2)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "stray.safetensors")
    assert all(entry.path.name != "stray.safetensors" for entry in Checkpoint.open(tmp_path).tensors.values())


def test_missing_shard_is_named(tmp_path: Path) -> None:
    MODEL.write(tmp_path, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ResourceError, match=r"model-00002-of-00003\.safetensors, which is missing"):
        Checkpoint.open(tmp_path)


def test_truncated_file_names_tensor_and_both_sizes(tmp_path: Path) -> None:
    path = MODEL.write(tmp_path) / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(ResourceError, match=rf"truncated.*{size}.*{size - 1}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "header claims 0 bytes"),
        (b"\x08", "header claims"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "header claims 1099511627776 bytes, the file has 10"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((2).to_bytes(8, "little") + b"{]", "not JSON"),
        ((20000).to_bytes(8, "little") + b"[" * 20000, "not JSON"),
    ],
)
def test_corrupt_header_is_named(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ResourceError, match=named) as caught:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "description",
    [
        5,
        {},
        {"dtype": "BF17", "shape": [1], "data_offsets": [0, 2]},
        {"dtype": ["BF16"], "shape": [1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [1.0], "data_offsets": [0, 2]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [0, 3]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [2, 0]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [-2, 0]},
        {"dtype": "BF16", "shape": [1], "data_offsets": [0]},
        {"dtype": "BF16", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 2]},
    ],
)
def test_senseless_tensor_descriptions_are_refused(tmp_path: Path, description: object) -> None:
    header = json.dumps({"odd": description}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ResourceError, match="'odd'"):
        Checkpoint.open(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = TinyModel(layers=1, experts=1, hidden=32).write(tmp_path_factory.mktemp("sound"))
    return (directory / "model.safetensors").read_bytes()


def _open(directory: Path, content: bytes) -> None:
    (directory / "model.safetensors").write_bytes(content)
    try:
        Checkpoint.open(directory).expert(SPEC, 0, 0)
    except FfnError as error:
        assert str(directory) in str(error)  # noqa: PT017


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=8), st.integers(0, 1 << 20))
def test_mutated_bytes_cause_no_other_error(
    tmp_path: Path, sound: bytes, changes: list[tuple[int, int]], length: int
) -> None:
    content = bytearray(sound)
    for offset, value in changes:
        content[offset % len(content)] = value
    _open(tmp_path, bytes(content[:length] if length < len(content) else content))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_mutated_header_fields_cause_no_other_error(tmp_path: Path, sound: bytes, data: st.DataObject) -> None:
    length = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + length])
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
    if field is None or not isinstance(header[name], dict):
        header[name] = data.draw(_JSON)
    else:
        header[name][field] = data.draw(_JSON)
    text = json.dumps(header).encode()
    _open(tmp_path, len(text).to_bytes(8, "little") + text + sound[8 + length :])


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    MODEL.write(tmp_path)
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ResourceError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", ""])
def test_index_cannot_point_out_of_its_directory(tmp_path: Path, file: str) -> None:
    MODEL.write(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ResourceError, match="not a file beside it"):
        Checkpoint.open(tmp_path)


def test_tensor_that_the_index_promises_and_the_file_lacks_is_named(tmp_path: Path) -> None:
    MODEL.write(tmp_path)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"ghost": "model.safetensors"}}))
    with pytest.raises(ResourceError, match="lacks tensor 'ghost'"):
        Checkpoint.open(tmp_path)


def test_tensor_in_two_files_without_index_is_refused(tmp_path: Path) -> None:
    MODEL.write(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "other.safetensors")
    with pytest.raises(ResourceError, match=r"both .*model\.safetensors and .*other\.safetensors"):
        Checkpoint.open(tmp_path)


def test_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelRefused, match="no safetensors"):
        Checkpoint.open(tmp_path)


def test_missing_expert_tensor_is_named(tmp_path: Path) -> None:
    tensors = MODEL.tensors()
    del tensors[GATE]
    write_tensors(tmp_path, tensors)
    with pytest.raises(ModelRefused, match=GATE):
        Checkpoint.open(tmp_path).expert(SPEC, 0, 1)


def test_fused_experts_are_refused_as_such(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 64, 64)})
    with pytest.raises(ModelRefused, match="way of storing"):
        Checkpoint.open(tmp_path).expert(SPEC, 0, 1)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(32, 63, dtype=torch.bfloat16), r"shape \[32, 63\].* \[32, 64\]"),
        (torch.zeros(64, 32, dtype=torch.bfloat16), r"shape \[64, 32\].* \[32, 64\]"),
        (torch.zeros(32, 64, dtype=torch.int8), "dtype I8"),
        (torch.zeros(32, 64, dtype=torch.float8_e4m3fn), "dtype F8_E4M3"),
    ],
)
def test_wrong_shape_or_dtype_names_file_and_both_values(tmp_path: Path, tensor: torch.Tensor, named: str) -> None:
    write_tensors(tmp_path, {**MODEL.tensors(), GATE: tensor})
    with pytest.raises(ModelRefused, match=named) as caught:
        Checkpoint.open(tmp_path).expert(SPEC, 0, 1)
    assert "model.safetensors" in str(caught.value)
