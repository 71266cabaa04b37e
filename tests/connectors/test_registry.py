"""Connectors by name, and what is said about the host."""

import subprocess
import sys
from pathlib import Path

import pytest

from ffn_faas.connectors import TRANSPORT_NAMES, create_connector
from ffn_faas.connectors.host_identity import host_identity
from ffn_faas.connectors.shm import ShmConnector
from ffn_faas.errors import ResourceError, UsageError
from ffn_faas.memory import cgroup_headroom, require_memory


def test_every_known_transport_can_be_made() -> None:
    assert TRANSPORT_NAMES == ("shm",)
    connector = create_connector("shm")
    assert isinstance(connector, ShmConnector)
    connector.close()
    connector.close()


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'rdma' is unknown .*shm"):
        create_connector("rdma")


def test_another_process_of_this_host_has_the_same_identity() -> None:
    script = "from ffn_faas.connectors.host_identity import host_identity; print(host_identity().model_dump_json())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_identity().model_dump_json()
    assert host_identity().boot_id


def test_the_tightest_limit_of_the_cgroups_above_counts_and_file_cache_is_free(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("1:name=systemd:/x\n0::/pod/container\n")
    for directory, limit, used, cache in (("pod", "1000", 700, 100), ("pod/container", "max", 650, 0)):
        place = root / directory
        place.mkdir(parents=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert cgroup_headroom(membership, root) == 400
    membership.write_text("0::/\n")
    assert cgroup_headroom(membership, root) is None
    assert cgroup_headroom(tmp_path / "missing", root) is None


def test_limits_of_cgroup_v1_count_too(tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("9:name=systemd:/\n4:cpu,memory:/pod/container\n0::/\n")
    for directory, limit, used, cache in (("pod", 9223372036854771712, 700, 0), ("pod/container", 1000, 650, 30)):
        place = root / "memory" / directory
        place.mkdir(parents=True)
        (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (place / "memory.usage_in_bytes").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cache}\n")
    assert cgroup_headroom(membership, root) == 380
    membership.write_text("4:memory:/pod\n")
    assert cgroup_headroom(membership, root) is None


def test_memory_that_nobody_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(ResourceError, match=f"things need {1 << 60} bytes, .* {'[0-9]+'}"):
        require_memory(1 << 60, "things")
