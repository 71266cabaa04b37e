"""Attention processes that post for ever, as a test sees them: how many rounds were right, and what they logged."""

import subprocess
import sys
import threading


class Attention:
    """``tests.gpu.attention_process`` with these arguments. All it prints is read, so that it never waits for us."""

    def __init__(self, *arguments):
        command = [sys.executable, "-u", "-m", "tests.gpu.attention_process", *arguments]
        self.process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.done = 0
        self.out, self.log = "", ""
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_out, self._read_log)]
        for reader in self._readers:
            reader.start()

    def rounds(self, count):
        """Returns once ``count`` more rounds were right; fails with all that was said."""
        with self._changed:
            target = self.done + count
            self._changed.wait_for(lambda: self.done >= target or not self._readers[0].is_alive(), 100.0)
            if self.done >= target:
                return
        self.kill()
        raise AssertionError(f"{self.done} of {target} rounds\n{self.out}\n{self.log}")

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.wait()

    def wait(self, timeout_s=60.0):
        """The exit code; everything printed has been read then."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def _read_out(self):
        for line in self.process.stdout:
            with self._changed:
                if line.startswith("ok "):
                    self.done += 1
                else:
                    self.out += line
                self._changed.notify_all()

    def _read_log(self):
        for line in self.process.stderr:
            self.log += line
