"""Two F ranks on one GPU are told by its UUID: processes of one host see each other's claims."""

import subprocess
import sys

import pytest

from ffn_faas.backends.gpu_claim import claim
from ffn_faas.errors import ResourceError

UUID = "ab" * 16


def other_rank(last_words):
    """A process that has claimed the GPU and then does as told."""
    lines = (
        "import time",
        "from ffn_faas.backends.gpu_claim import claim",
        f"held = claim({UUID!r}, share=False)",
        "print(1, flush=True)",
        last_words,
    )
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    return process


def test_a_gpu_of_another_process_is_refused_unless_shared_and_free_once_that_one_is_dead():
    other = other_rank("time.sleep(100)")
    with pytest.raises(ResourceError, match=f"GPU {UUID} already serves another F rank"):
        claim(UUID, share=False, patience_s=0.2)
    assert claim(UUID, share=True) is None
    with claim("cd" * 16, share=False) as another_gpu:
        assert another_gpu.fileno() >= 0
    other.kill()
    other.communicate()
    with claim(UUID, share=False) as held:
        assert held.fileno() >= 0


def test_a_claim_waits_for_a_rank_that_is_ending():
    other = other_rank("time.sleep(0.5)")
    with claim(UUID, share=False, patience_s=30.0) as held:
        assert held.fileno() >= 0
    other.communicate()
