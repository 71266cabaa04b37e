"""The GPU suite in one command: ``python -m tests.gpu [--report gpu-report.json] [--lanes] [pytest options]``.

Writes one report: machine, versions, every test with its outcome, seconds and recorded figures; what is known so far
after every test, with ``exit`` null. ``--lanes``: five parts at once, most of a test being the start of processes;
their output is in files beside the report. Reads no pytest configuration, so that it runs where only torch, pytest and
the daemon's own needs are installed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


class Report:
    """Collects what each test did, and keeps ``target`` up to date."""

    def __init__(self, target):
        self.target, self.machine, self.tests = target, machine(), {}

    def write(self, code=None):
        whole = {"machine": self.machine, "exit": code, "tests": self.tests}
        unfinished = self.target.with_suffix(".new")
        unfinished.write_text(json.dumps(whole, indent=1))
        unfinished.replace(self.target)

    def pytest_runtest_logreport(self, report):
        seen = self.tests.setdefault(report.nodeid, {"outcome": report.outcome, "seconds": 0.0})
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


LANES = {
    "vllm-and-quiet": "gpu and (vllm or quiet) and not topologies",
    "topologies": "gpu and topologies",
    "deaths": "gpu and deaths",
    "processes": "gpu and not (vllm or quiet or deaths) and processes",
    "others": "gpu and not (vllm or quiet or deaths) and not processes",
}
"""By name, which tests: pytest's ``-m``."""


def run_lanes(target, arguments):
    """One pytest process for each; ``target`` is kept up to date with what all of them know."""
    running, parts = [], []
    for number, (name, which) in enumerate(LANES.items()):
        part = target.with_name(f"{target.stem}.{name}.json")
        part.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.gpu", "--report", str(part), *arguments, "-m", which]
        for at, argument in enumerate(command):
            if argument.startswith("--basetemp="):
                Path(argument.partition("=")[2]).mkdir(parents=True, exist_ok=True)
                command[at] = f"{argument}/{name}"
        with target.with_name(f"{target.stem}.{name}.txt").open("w") as log:
            environment = os.environ | {"GPU_TEST_PORT": str(8311 + 100 * number)}
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        parts.append(part)
    codes = None
    while codes is None:
        codes = [process.poll() for process in running]
        codes = time.sleep(1.0) if None in codes else [abs(code) for code in codes]  # below 0: a signal ended it
        known = [json.loads(part.read_text()) for part in parts if part.exists()]
        if known:
            tests = {name: test for one in known for name, test in one["tests"].items()}
            whole = {"machine": known[0]["machine"], "exit": codes and max(codes), "tests": tests}
            target.write_text(json.dumps(whole, indent=1))
    return max(codes)


def main(arguments):
    target = Path("gpu-report.json")
    if "--report" in arguments:
        at = arguments.index("--report")
        target = Path(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    if "--lanes" in arguments:
        return run_lanes(target, [argument for argument in arguments if argument != "--lanes"])
    root = Path(__file__).parents[2]
    report = Report(target)
    options = ["-c", os.devnull, "--rootdir", str(root), "-p", "no:cacheprovider", "-m", "gpu", "-ra"]
    code = pytest.main([*options, str(root / "tests" / "gpu"), *arguments], plugins=[report])
    report.write(int(code))
    print(f"report: {target.resolve()}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
