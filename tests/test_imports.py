"""Every module imports where no accelerator package, no vLLM and no torch is installed, and where nothing was built."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ffn_faas

PROGRAM = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED or name == "ffn_faas._native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

BLOCKED = {"torch", "vllm", "vllm_ascend", "torch_npu", "afdep", "transformers", "tokenizers"}
sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not BLOCKED & set(sys.modules)
"""


def modules() -> list[str]:
    found = pkgutil.walk_packages(ffn_faas.__path__, "ffn_faas.")
    return sorted(module.name for module in found if module.name.rpartition(".")[2] not in ("__main__", "_native"))


def test_all_modules_import_without_torch_vllm_or_native_code():
    names = modules()
    assert len(names) > 30
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, *names], check=True)


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_help_works_without_torch_or_vllm(command):
    program = PROGRAM + "\nfrom ffn_faas.cli import main\nsys.exit(main([COMMAND, '--help']))".replace(
        "COMMAND", repr(command)
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage: python -m ffn_faas" in result.stdout


def test_only_env_reads_the_environment_and_only_compat_names_vllm_internals():
    package = Path(ffn_faas.__file__).parent
    for path in package.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(package).as_posix()
        if name != "env.py":
            assert "os.environ[" not in text, name
            assert "getenv(" not in text, name
        if not name.startswith("attention/compat/") and name != "experts/kernels/vllm_ops.py":
            assert not re.search(r"^\s*(from|import) vllm\b", text, re.MULTILINE), name
