"""The GPU suite is whole: collected and reported everywhere, also where nothing of it can run."""

import json
import subprocess
import sys
from pathlib import Path


def test_one_command_collects_every_file_of_the_suite_and_writes_one_report(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu", "--report", str(report), "--collect-only", "-q"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if file.name != Path(__file__).name:
            assert f"{file.name}::" in run.stdout
    written = json.loads(report.read_text())
    assert set(written) == {"machine", "exit", "tests"}
