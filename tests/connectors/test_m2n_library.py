"""The compiled GPU part of another version is refused, naming both versions."""

import shutil
import subprocess

import pytest

from ffn_faas.connectors.m2n_library import VERSION, Library
from ffn_faas.errors import NativeMissing

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = """
const char* ffn_m2n_error(void) { return ""; }
int ffn_m2n_version(void) { return 1; }
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_library_of_another_version_is_refused_naming_both(tmp_path):
    library = tmp_path / "m2n.so"
    (tmp_path / "m2n.c").write_text(SOURCE)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(library), str(tmp_path / "m2n.c")], check=True)
    with pytest.raises(NativeMissing, match=f"has version 1, this package needs {VERSION}") as refused:
        Library(str(library))
    assert "pip install" in str(refused.value)


def test_what_is_no_library_is_refused_naming_the_file(tmp_path):
    (tmp_path / "m2n.so").write_text("no library")
    with pytest.raises(NativeMissing, match=r"m2n\.so cannot be loaded"):
        Library(str(tmp_path / "m2n.so"))
