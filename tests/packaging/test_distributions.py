"""The source distribution is the tree, and a wheel made from it installs and runs.

The compiled part is configured from it, not compiled again: CI installs the package that these tests run against by
compiling it from the same files.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import distributions
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
MADE = {"__pycache__", "_lib", "build", "dist"}
FOLDERS = (".ci", ".github", "deploy", "docs", "ffn_faas", "native", "tests")
FILES = ("CHANGELOG.md", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml")


def build(hook: str, source: Path, target: Path, **settings: str) -> Path:
    """Call a hook of the build backend as a front end does, in a process of its own; what it made."""
    script = (
        "import sys; from scikit_build_core import build; getattr(build, sys.argv[1])(sys.argv[2], eval(sys.argv[3]))"
    )
    command = [sys.executable, "-c", script, hook, str(target), repr(settings)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = target.iterdir()
    return made


def files(root: Path, *folders: str) -> set[str]:
    """Relative paths below ``folders``, without what builds and interpreters leave there."""
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    kept = (path for path in found if not MADE & set(path.parts) and path.suffix not in (".so", ".pyc"))
    return {path.relative_to(root).as_posix() for path in kept}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    archive = build("build_sdist", ROOT, folder)
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(unpacked, tmp_path_factory):
    """A directory into which pip installed the wheel, without its compiled part."""
    wheel = build("build_wheel", unpacked, tmp_path_factory.mktemp("wheel"), **{"wheel.cmake": "false"})
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(pip, check=True, capture_output=True)
    return target


def run(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_source_distribution_holds_every_file_of_the_tree(unpacked):
    assert files(ROOT, *FOLDERS) - files(unpacked, *FOLDERS) == set()
    assert [name for name in FILES if not (unpacked / name).is_file()] == []


def test_it_holds_nothing_that_was_built(unpacked):
    assert [path for path in unpacked.rglob("*") if path.suffix in (".so", ".pyc", ".o")] == []


def test_its_compiled_part_can_be_configured(unpacked, tmp_path):
    """CMake ends with an error when a file that it compiles is missing."""
    cmake = shutil.which("cmake")
    assert cmake is not None
    command = [cmake, "-S", str(unpacked), "-B", str(tmp_path), "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    command.append(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
    configured = subprocess.run(command, capture_output=True, text=True, check=False)
    assert configured.returncode == 0, configured.stderr


def test_the_wheel_holds_the_whole_package_and_no_tests(installed):
    assert files(ROOT, "ffn_faas") == files(installed, "ffn_faas")
    assert not (installed / "tests").exists()


def test_the_installed_package_runs_from_anywhere_and_says_what_it_lacks(installed, tmp_path):
    version = run(installed, tmp_path, sys.executable, "-m", "ffn_faas", "--version")
    assert version.stdout.startswith("ffn_faas 0.1.0")
    script = "import ffn_faas; from ffn_faas import native; print(ffn_faas.__file__); native.load()"
    # Without site-packages: the package looks for its compiled part in every installation of it.
    loaded = run(installed, tmp_path, sys.executable, "-S", "-c", script)
    assert loaded.stdout.startswith(str(installed))
    assert "NativeMissing" in loaded.stderr
    command = run(installed, tmp_path, sys.executable, str(installed / "bin" / "ffn-faas"), "check", "--help")
    assert "python -m ffn_faas check" in command.stdout


def test_its_metadata_names_the_plugin_the_backend_and_the_readme(installed):
    (found,) = distributions(name="ffn-faas", path=[str(installed)])
    entries = {entry.group: entry.name for entry in found.entry_points}
    assert entries == {"console_scripts": "ffn-faas", "vllm.general_plugins": "ffn_faas", "ffn_faas.backends": "cpu"}
    metadata = email.message_from_string(found.read_text("METADATA"))
    assert metadata["License"] or metadata["License-Expression"]
    assert "# ffn_faas" in metadata.get_payload()
