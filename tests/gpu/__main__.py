"""The GPU suite in one command: ``python -m tests.gpu [--report gpu-report.json] [pytest options]``.

Writes one report: machine, versions, every test with its outcome, seconds and recorded figures; what is known so far
after every test, with ``exit`` null. Reads no pytest configuration, so that it runs where only torch, pytest and the
daemon's own needs are installed.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest


class Report:
    """Collects what each test did, and keeps ``target`` up to date."""

    def __init__(self, target):
        self.target, self.machine, self.tests = target, machine(), {}

    def write(self, code=None):
        self.target.write_text(json.dumps({"machine": self.machine, "exit": code, "tests": self.tests}, indent=1))

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("@")[0]  # behind it the group, of several workers
        seen = self.tests.setdefault(name, {"outcome": report.outcome, "seconds": 0.0})
        seen["seconds"] = round(seen["seconds"] + report.duration, 2)
        if report.outcome != "passed" or report.when == "call":
            seen["outcome"] = report.outcome
        if report.user_properties:
            seen["figures"] = dict(report.user_properties)
        if report.failed:
            seen["failure"] = str(report.longrepr)[-4000:]
        elif report.skipped:
            seen["reason"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        if report.when == "teardown":
            self.write()


def machine():
    import torch

    from tests.gpu.conftest import DEVICES

    return {
        "devices": [device.name for device in DEVICES],
        "layout": "F on one GPU, Attention on another" if len(DEVICES) > 1 else "F and Attention share one GPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def main(arguments):
    target = Path("gpu-report.json")
    if "--report" in arguments:
        at = arguments.index("--report")
        target = Path(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    root = Path(__file__).parents[2]
    report = Report(target)
    options = ["-c", os.devnull, "--rootdir", str(root), "-p", "no:cacheprovider", "-m", "gpu", "-ra"]
    code = pytest.main([*options, str(root / "tests" / "gpu"), *arguments], plugins=[report])
    report.write(int(code))
    print(f"report: {target.resolve()}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
