"""Run the tests that measure reactions and print what they saw as the table of docs/operations.md.

python -m tests.service.fault_table [pytest arguments]
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

FILES = (
    "tests/service/test_faults.py",
    "tests/service/test_fault_stops.py",
    "tests/service/test_fault_server.py",
    "tests/service/test_ready.py",
)
HEAD = ("who", "rows over", "where F stands", "what happens", "seen")


def rows(report):
    """(who, where, what, seen) of every test that recorded one."""
    for recorded in ET.parse(report).iter("property"):
        if recorded.get("name") == "fault":
            yield ast.literal_eval(recorded.get("value"))


def main(arguments):
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *FILES, *arguments]
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
        for row in rows(report):
            print("| " + " | ".join(row) + " |")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
