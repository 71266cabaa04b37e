"""The GPU part compiles where nvcc is found, and what it says about itself fits the Python side."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ffn_faas.connectors import m2n_library

NATIVE = Path(__file__).parents[2] / "native"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
FLAGS = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-I", str(NATIVE)]


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_the_grouped_product_keeps_its_sums_in_registers(tmp_path):
    source = NATIVE / "experts_gpu" / "experts.cu"
    command = [str(NVCC), *FLAGS, "-c", str(source), "-o", str(tmp_path / "experts.o")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = int(re.search(r"(\d+) bytes spill stores", output).group(1))
    assert spilled < 64, output
    assert "serialized" not in output, output


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("verb", ["m2n/dispatch", "m2n/receive", "m2n/combine", "m2n/wait_any", "m2n/observer"])
def test_window_kernels_compile_without_spills(verb, tmp_path):
    command = [str(NVCC), *FLAGS, "-c", str(NATIVE / f"{verb}.cu"), "-o", str(tmp_path / "verb.o")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert set(re.findall(r"(\d+) bytes spill stores", output)) == {"0"}, output


def test_python_declares_every_function_of_the_c_border():
    header = (NATIVE / "m2n" / "api.h").read_text()
    declared = set(re.findall(r"FFN_M2N_API [^(]*\bffn_m2n_(\w+)\(", header))
    by_hand = {
        "error", "version", "service_stop", "attention_stop", "service_stream", "service_bytes", "service_counters",
        "service_times",
    }  # fmt: skip
    assert declared == by_hand | set(m2n_library._SIGNATURES)
    assert f"#define FFN_M2N_VERSION {m2n_library.VERSION}" in header


def test_structures_repeat_the_header_field_by_field():
    header = (NATIVE / "m2n" / "api.h").read_text()
    for name, structure in {
        "counters": m2n_library.Counters,
        "service_config": m2n_library.ServiceConfig,
        "window": m2n_library.Window,
        "item_times": m2n_library.ItemTimes,
        "post_times": m2n_library.PostTimes,
    }.items():
        body = re.search(rf"typedef struct ffn_m2n_{name} \{{(.*?)\}}", header, re.DOTALL).group(1)
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        fields = re.findall(r"\b(\w+)(?=\s*[,;])", body)
        assert fields == [field[0] for field in structure._fields_]


def test_rings_of_times_are_as_long_as_the_header_says():
    header = (NATIVE / "m2n" / "api.h").read_text()
    assert f"FFN_M2N_KEPT_TIMES = {m2n_library.KEPT_TIMES} " in header
    for ring in (m2n_library.Items, m2n_library.Posts):
        assert len(ring().kept) == m2n_library.KEPT_TIMES
        assert ring.kept.offset == 8


def test_the_stated_row_orders_fit_the_kernel_tiles():
    source = (NATIVE / "experts_gpu" / "experts.cu").read_text()
    assert "constexpr int kWeightRows = 256;" in source
