from __future__ import annotations

from pathlib import Path

import pytest

from ffn_faas.errors import UsageError
from ffn_faas.experts.model_path import resolve_model
from tests.data import TinyModel


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; the library reads its place when it is imported, hence the patch of the constant."""
    from huggingface_hub import _snapshot_download, constants

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(_snapshot_download.constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    model = TinyModel().write(tmp_path / "model")
    assert resolve_model(str(model)) == model


def test_hub_id_resolves_to_its_snapshot_in_the_cache(hub_cache: Path) -> None:
    repository = hub_cache / "models--acme--tiny"
    snapshot = TinyModel().write(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert resolve_model("acme/tiny").resolve() == snapshot.resolve()


def test_hub_id_that_is_not_cached_names_the_cache_and_never_asks_the_network(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(UsageError, match="acme/tiny") as caught:
        resolve_model("acme/tiny")
    assert str(hub_cache) in str(caught.value)


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/place", "a/b/c", "not a name!", "~/nowhere-at-all"])
def test_unknown_model_is_one_clear_error(model: str, hub_cache: Path) -> None:
    with pytest.raises(UsageError, match="MODEL"):
        resolve_model(model)


def test_directory_without_config_and_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(str(tmp_path / "file"))
