"""MODEL on the command line to a directory: a local one, or a hub id in the local cache. Never the network."""

from __future__ import annotations

from pathlib import Path

from ffn_faas.errors import UsageError


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The directory that holds ``model``'s config.json. Raises UsageError that says where was looked."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _with_config(directory, model)
    if directory.exists():
        raise UsageError(f"MODEL {model} is a file", remedy="give the directory that holds config.json")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UsageError(f"MODEL {model}: no such directory")

    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(model, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        at = f" at revision {revision}" if revision else ""
        raise UsageError(
            f"MODEL {model}{at} is neither a directory nor in the local hub cache {constants.HF_HUB_CACHE}",
            remedy=f"give a directory, or download it first: hf download {model}",
        ) from None
    return _with_config(Path(snapshot), model)


def _with_config(directory: Path, model: str) -> Path:
    if not (directory / "config.json").is_file():
        raise UsageError(f"MODEL {model}: {directory} holds no config.json")
    return directory
