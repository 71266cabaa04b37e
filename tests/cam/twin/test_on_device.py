"""The same contract on NPUs: ``SOC_VERSION=910c python -m pytest -m npu tests/cam/twin``. Never run on a device.

Without torch_npu these are skipped; where it is installed, an operator that is missing is a failure. Each rank ends
itself at its limit, so that a receive that is stuck cannot hang the run.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import replace

import pytest
import torch

from ffn_faas.ascend import schemas
from ffn_faas.ascend.op_module import TABLE, real_module
from tests.cam.twin.system import CONTEXT, System
from tests.cam.twin.test_systems import SYSTEMS
from tests.npu.marks import ON_DEVICE

pytestmark = ON_DEVICE
DISTRIBUTIONS = ("torch", "torch_npu", "afd-plugin", "ffn-faas")


@pytest.fixture(autouse=True)
def versions(record_property):
    """Of a report nobody can use: on which versions, so they stand in the JUnit file of every test."""
    for name in DISTRIBUTIONS:
        try:
            record_property(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            record_property(name, "not installed as a distribution")
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "SOC_VERSION", "LCCL_BUFFER_SIZE"):
        record_property(name, os.environ.get(name, ""))


def tolerance(system: System) -> dict[str, float]:
    """Fixed: where a device rounds is not stated, so bit-equality is not claimed."""
    if system.experts != "identity":
        return {"rtol": 0.04, "atol": 0.05}
    size = 1e-3 if system.sizes.dtype == torch.float16 else 8e-3
    return {"rtol": size, "atol": size}


def test_the_installed_extension_has_every_operator_with_the_public_schema():
    """In a process of its own: this one may have the twin."""
    process = CONTEXT.Process(target=compare_schemas)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def compare_schemas() -> None:
    real_module()
    for schema in schemas.load():
        assert schema.name in TABLE.values()
        stated = torch._C.parse_schema(schema.operator + schema.arguments)
        assert getattr(torch.ops.afd_ascend, schema.name).default._schema == stated, schema.name


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS.keys())
def test_every_output_is_the_oracles_within_the_stated_tolerance(system, tmp_path):
    on_npus = replace(system, npu=True, limit_s=240)
    for rank, outputs in enumerate(on_npus.run(tmp_path)):
        for output, expected in zip(outputs, on_npus.expected(rank), strict=True):
            torch.testing.assert_close(output.float(), expected.float(), **tolerance(on_npus))
