"""The native tests over a build with sanitizers: every finding is printed, and any fails the run.

    python -m tests.native.sanitize address          (AddressSanitizer and UndefinedBehaviorSanitizer)
    python -m tests.native.sanitize thread [pytest arguments]

Needs g++ with its sanitizer libraries. The tree is copied beside the build, which it leaves alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/native",
    "tests/connectors",
    "tests/fuzz/test_fuzz.py::test_mutated_windows_cost_nobody_else_anything",
    "tests/experts/test_native_kernel.py",
    "tests/cam/twin",
    "--ignore=tests/native/test_cuda_compiles.py",
)
LEFT_OUT = {
    "address": (),
    # Bounds resident memory, of which the sanitizer takes several bytes for each of ours.
    "thread": (
        "--deselect=tests/experts/test_native_kernel.py::test_loading_peaks_at_little_more_than_the_weights_it_keeps",
    ),
}
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=vptr",
    "thread": "-fsanitize=thread",
}
LIBRARIES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    # Of leaks the interpreter has its own; the long runs count descriptors, mappings and memory instead.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={Path(__file__).with_name('tsan.supp')}",
}


def build(kind: str, tree: Path) -> None:
    """Configure, compile and install into ``tree``."""
    made = tree / "build"
    flags = f"-O1 -g -fno-omit-frame-pointer {FLAGS[kind]}"
    configure = ["cmake", "-S", str(tree), "-B", str(made), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None"]
    configure += ["-DFFN_FAAS_CUDA=OFF", f"-DCMAKE_CXX_FLAGS={flags}", f"-DCMAKE_INSTALL_PREFIX={tree}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={_pybind11()}"]
    for command in (configure, ["ninja", "-C", str(made)], ["cmake", "--install", str(made)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _pybind11() -> str:
    import pybind11

    return pybind11.get_cmake_dir()


def surroundings(kind: str, tree: Path, reports: Path) -> dict[str, str]:
    """The environment of the tests; each process that finds something writes to a file in ``reports``."""
    preload = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in LIBRARIES[kind]
    ]
    options = {name: f"{value}:log_path={reports / 'report'}" for name, value in OPTIONS.items()}
    return {**os.environ, **options, "LD_PRELOAD": ":".join(preload), "PYTHONPATH": str(tree)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLAGS)
    args, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "*.so", "__pycache__", ".*_cache"))
        started = time.monotonic()
        build(args.kind, tree)
        print(f"built in {time.monotonic() - started:.0f} s", file=sys.stderr)
        # Without address space randomization: older sanitizer libraries do not know where newer kernels map.
        command = ["setarch", "-R", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        chosen = any(word.startswith("tests") for word in pytest_arguments)
        command += pytest_arguments if chosen else [*TESTS, *pytest_arguments]
        command += LEFT_OUT[args.kind]
        reports = Path(directory, "reports")
        reports.mkdir()
        run = subprocess.run(command, cwd=tree, env=surroundings(args.kind, tree, reports), check=False)
        found = [path.read_text() for path in sorted(reports.iterdir())]
        print(*found, f"{len(found)} findings", sep="\n", file=sys.stderr)
        return run.returncode or min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
