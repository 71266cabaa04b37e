"""Memory is asked for before it is taken: the kernel would kill the process later instead of telling it."""

from __future__ import annotations

from pathlib import Path

from ffn_faas.errors import ResourceError

_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""cgroup v1 says 2^63 less a page where there is no limit."""
SMALLER_WINDOWS = "attach with a smaller capacity (--max-num-batched-tokens) or give F more memory"


def require_memory(nbytes: int, purpose: str, remedy: str = SMALLER_WINDOWS) -> None:
    """Raise ResourceError unless the host and this process's cgroup (v1 or v2) can hold ``nbytes`` more."""
    import psutil

    available = int(psutil.virtual_memory().available)
    where = "this host has"
    limit = cgroup_headroom(Path("/proc/self/cgroup"), _CGROUPS)
    if limit is not None and limit < available:
        available, where = limit, "the memory limit of this container leaves"
    if nbytes > available:
        raise ResourceError(f"{purpose} need {nbytes} bytes, {where} {available}", remedy=remedy)


def cgroup_headroom(membership: Path, root: Path) -> int | None:
    """Bytes the tightest cgroup above this process still allows, file cache counted as free; None without a limit.

    ``membership`` is /proc/self/cgroup, ``root`` where the hierarchies are mounted. A container that sees its own
    cgroup as the root has the limit there.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    rooms: list[int | None] = []
    for fields in lines:
        if len(fields) != 3:
            continue
        _, controllers, name = fields
        if not controllers:
            rooms += _rooms(root, name, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            v1 = root / "memory"
            rooms += _rooms(v1, name, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min((room for room in rooms if room is not None), default=None)


def _rooms(root: Path, name: str, limit: str, usage: str, cache: str) -> list[int | None]:
    directory = root / name.lstrip("/")
    above = (directory, *directory.parents)
    return [_room(place, limit, usage, cache) for place in above if place.is_relative_to(root)]


def _room(directory: Path, limit_file: str, usage_file: str, cache: str) -> int | None:
    try:
        limit = (directory / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= _NO_LIMIT:
            return None
        used = int((directory / usage_file).read_text())
        statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used + int(statistics.get(cache, 0)))
