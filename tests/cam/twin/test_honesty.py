"""The twin keeps its honesty rules, and each rule broken on purpose is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffn_faas.ascend import twin
from tests.cam.mutations import NOTICED_BY


def test_every_rule_can_be_broken_and_has_a_test():
    assert NOTICED_BY.keys() == set(twin.MUTATIONS)
    assert len(set(NOTICED_BY.values())) == len(NOTICED_BY)


@pytest.mark.parametrize("rule", NOTICED_BY.values(), ids=lambda rule: rule.__name__)
def test_the_twin_keeps_the_rule(rule, load):
    rule(load)


@pytest.mark.parametrize("mutation", NOTICED_BY)
def test_a_broken_rule_is_noticed(mutation, load):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        NOTICED_BY[mutation](replace(load, mutations=(mutation,)))
