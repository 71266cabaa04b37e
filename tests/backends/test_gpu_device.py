"""Which GPU a rank binds, under plain and under masking launchers."""

import pytest

from ffn_faas.backends.gpu_device import choose_device
from ffn_faas.errors import LaunchDisagreement, ResourceError


@pytest.mark.parametrize(
    ("local_rank", "visible", "ids", "expected"),
    [
        (0, 2, (), 0),
        (1, 2, (), 1),
        (1, 1, (), 0),  # CUDA_VISIBLE_DEVICES masks all but this rank's
        (1, 8, (4, 6), 6),
        (0, 8, (4, 6), 4),
        (1, 1, (4, 6), 0),  # masked as well: the one that is left was meant
    ],
)
def test_a_rank_binds_its_own_gpu(local_rank, visible, ids, expected):
    assert choose_device(local_rank, 2, visible, ids, share=False) == expected


def test_more_ranks_than_gpus_share_only_when_asked_for():
    with pytest.raises(ResourceError, match="--share-device"):
        choose_device(2, 3, 2, share=False)
    assert choose_device(2, 3, 2, share=True) == 0


def test_one_gpu_named_twice_is_refused_unless_asked_for():
    with pytest.raises(LaunchDisagreement, match="one GPU to two ranks"):
        choose_device(0, 2, 2, (1, 1), share=False)
    assert choose_device(0, 2, 2, (1, 1), share=True) == 1


def test_lists_that_do_not_fit_are_refused_by_what_is_missing():
    with pytest.raises(LaunchDisagreement, match="local rank 2 has none"):
        choose_device(2, 3, 8, (0, 1), share=False)
    with pytest.raises(ResourceError, match="GPU 6 of 4"):
        choose_device(0, 1, 4, (6,), share=False)
    with pytest.raises(ResourceError, match="no GPU is visible"):
        choose_device(0, 1, 0, share=False)
