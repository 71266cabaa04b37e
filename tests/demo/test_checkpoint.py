"""The checkpoint that the demo makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ffn_faas.demo.checkpoint import expert_bytes, make_checkpoint
from ffn_faas.errors import ResourceError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

TINY_EXPERT_BYTES = 4 * 8 * 3 * 256 * 128 * 2
"""Layers, experts, matrices, hidden, intermediate, bytes of a bfloat16."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(directory)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_expert_bytes_are_those_of_the_expert_tensors(tiny: Path) -> None:
    assert expert_bytes(tiny) == TINY_EXPERT_BYTES
    held = [t.nbytes for name, t in tensors_of(tiny).items() if ".experts." in name]
    assert sum(held) == TINY_EXPERT_BYTES


def test_every_tensor_is_finite_bfloat16(tiny: Path) -> None:
    for name, tensor in tensors_of(tiny).items():
        assert tensor.dtype == torch.bfloat16, name
        assert torch.isfinite(tensor).all(), name


def test_sharding_changes_files_but_no_value(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "sharded", shards=3)
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    whole, sharded = tensors_of(tiny), tensors_of(tmp_path / "sharded")
    assert whole.keys() == sharded.keys() == index["weight_map"].keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_another_seed_gives_other_weights(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "other", seed=1)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert not torch.equal(tensors_of(tiny)[name], tensors_of(tmp_path / "other")[name])


def test_a_checkpoint_made_with_the_same_parameters_is_used_again(tiny: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    make_checkpoint(tiny)
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


def test_a_directory_with_something_else_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="another checkpoint"):
        make_checkpoint(tiny, seed=5)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ResourceError, match="another checkpoint"):
        make_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "model", report=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_checkpoint(tmp_path / "model", shards=2, report=lambda done, total: seen.append((done, total)))
    assert len(seen) == 2
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in tensors_of(tmp_path / "model").values())


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown architecture 'llama'"):
        make_checkpoint(tmp_path / "model", arch="llama")


def test_the_tokenizer_gives_text_back_and_the_vocabulary_is_its_own(tiny: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "The miller's wheel turns: zwölf \u2713"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((tiny / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
