"""Parts of the suite run beside each other (``--lanes``); tests whose figures need quiet GPUs run alone."""

import fcntl
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(*, alone):
    """Waits while another lane's test is alone, or with ``alone`` until none runs. Who came first goes first."""
    places = [Path(tempfile.gettempdir()) / f"ffn_faas-gpu-tests.{name}" for name in ("gate", "turn")]
    with places[0].open("a") as gate, places[1].open("a") as held:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
