from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ffn_faas.experts.checkpoint import Checkpoint
from ffn_faas.experts.fingerprint import fingerprint
from ffn_faas.experts.spec import MoESpec
from ffn_faas.protocol.messages import Fingerprint
from tests.data import TinyModel, write_tensors

MODEL = TinyModel()
SPEC = MoESpec.from_config(MODEL.config())


def _of(directory: Path, spec: MoESpec = SPEC) -> Fingerprint:
    return fingerprint(spec, Checkpoint.open(directory))


@pytest.mark.parametrize("shards", [1, 3])
def test_copies_of_a_checkpoint_agree(tmp_path: Path, shards: int) -> None:
    first = MODEL.write(tmp_path / "first", shards)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    assert _of(first) == _of(second)


def test_order_of_tensors_in_a_dict_does_not_matter(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(MODEL.write(tmp_path))
    backwards = Checkpoint(checkpoint.directory, dict(reversed(checkpoint.tensors.items())))
    assert fingerprint(SPEC, checkpoint) == fingerprint(SPEC, backwards)


def test_hub_cache_of_symlinks_agrees_with_plain_files(tmp_path: Path) -> None:
    plain = MODEL.write(tmp_path / "plain", 3)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copy(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / f"{number:064x}", snapshot))
    assert _of(plain) == _of(snapshot)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
)
def test_fine_tune_of_equal_shapes_is_told_apart(tmp_path: Path, name: str) -> None:
    base = MODEL.write(tmp_path / "base")
    tensors = MODEL.tensors()
    tensors[name] = tensors[name] + 0.5
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    write_tensors(tuned, tensors)
    assert _of(base).checkpoint != _of(tuned).checkpoint


def test_other_headers_are_told_apart(tmp_path: Path) -> None:
    base = _of(MODEL.write(tmp_path / "base"))
    wider = TinyModel(dtype="float32").write(tmp_path / "wider")
    fewer = TinyModel(experts=7).write(tmp_path / "fewer")
    assert len({base.checkpoint, _of(wider).checkpoint, _of(fewer).checkpoint}) == 3


def test_fields_are_those_of_the_spec_and_dummy_needs_no_files() -> None:
    assert fingerprint(SPEC, None) == Fingerprint(
        architecture="Qwen3MoeForCausalLM",
        hidden_size=64,
        intermediate_size=32,
        num_experts=8,
        top_k=2,
        dtype="bfloat16",
        activation="silu",
        quantization="none",
        num_moe_layers=2,
        checkpoint="dummy",
    )
