"""AMX that the system refuses: the next path computes, and the log says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Answers arch_prctl(ARCH_REQ_XCOMP_PERM, ...) with EPERM, as a container's filter of system calls may.
_REFUSE = """
import ctypes, struct
words = [(0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023)]
words += [(6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in words))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(words), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""
_LOOK = """
from ffn_faas import native
from ffn_faas.experts.kernels.native_kernel import NativeKernel
from ffn_faas.experts.spec import MoESpec
from tests.data import TinyModel
module = native.load()
kernel = NativeKernel(MoESpec.from_config(TinyModel().config()), threads=1)
kernel.allocate(range(2))
print(*module.ExpertsCpu.paths(module.BF16))
print(kernel.description)
"""


def look(before: str = "") -> tuple[list[str], str]:
    """The paths, and how the kernel describes itself, in a process of its own."""
    command = [sys.executable, "-c", before + _LOOK]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths, description = output.splitlines()
    return paths.split(), description


def test_the_log_names_the_path() -> None:
    paths, description = look()
    assert description == f"native, path {paths[0]}"


@pytest.mark.skipif("amx_bf16" not in Path("/proc/cpuinfo").read_text().split(), reason="no AMX")
def test_without_permission_the_next_path_computes_and_the_log_says_why() -> None:
    allowed, description = look()
    if "amx" not in allowed:
        pytest.skip(f"refused here already, or not compiled: {description}")
    refused, description = look(_REFUSE)
    assert refused == [path for path in allowed if path != "amx"]
    assert description == f"native, path {refused[0]} (not allowed: amx: Operation not permitted)"
