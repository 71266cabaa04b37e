"""A signal ends a long command wherever it meets it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import gc, signal, sys, time
from ffn_faas.demo.interrupts import interruptible, uninterrupted

class Slow:
    def __del__(self):
        print("in a destructor", flush=True)
        time.sleep(20)

def command(how):
    with interruptible():
        try:
            if how == "destructor":
                slow = Slow()
                del slow
            print("on its way", flush=True)
            time.sleep(20)
        finally:
            with uninterrupted():
                print("stopping", flush=True)
                time.sleep(2.5)
                print("stopped", flush=True)

try:
    command(sys.argv[1])
except KeyboardInterrupt:
    time.sleep(1.5)  # nothing comes after the command
    print("ended", flush=True)
    sys.exit(130)
"""


@pytest.mark.parametrize("how", ["destructor", "plain"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_even_if_python_drops_its_exception(how: str, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = time.monotonic()
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.split("\n")[-4:-1] == ["stopping", "stopped", "ended"]
        assert time.monotonic() - start < 18, "it did not sleep to the end"
