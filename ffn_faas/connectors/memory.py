"""Windows are refused before they are made when the memory is not there: the kernel would kill F later instead."""

from __future__ import annotations

from pathlib import Path

from ffn_faas.errors import ResourceError

_CGROUPS = Path("/sys/fs/cgroup")


def require_memory(nbytes: int, purpose: str) -> None:
    """Raise ResourceError unless the host and this process's cgroup (v2) can hold ``nbytes`` more."""
    import psutil

    available = int(psutil.virtual_memory().available)
    where = "this host has"
    limit = cgroup_headroom(Path("/proc/self/cgroup"), _CGROUPS)
    if limit is not None and limit < available:
        available, where = limit, "the memory limit of this container leaves"
    if nbytes > available:
        raise ResourceError(
            f"{purpose} need {nbytes} bytes, {where} {available}",
            remedy="attach with a smaller capacity (--max-num-batched-tokens) or give F more memory",
        )


def cgroup_headroom(membership: Path, root: Path) -> int | None:
    """Bytes the tightest cgroup above this process still allows, file cache counted as free; None without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    name = next((line[3:] for line in lines if line.startswith("0::")), None)
    if name is None:
        return None
    directory = root / name.lstrip("/")
    rooms = [_headroom(place) for place in (directory, *directory.parents) if place.is_relative_to(root)]
    return min((room for room in rooms if room is not None), default=None)


def _headroom(directory: Path) -> int | None:
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((directory / "memory.current").read_text())
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
