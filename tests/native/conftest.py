"""Modules about what a client sees run over every connector: its windows must not tell where F is."""

import pytest

from tests.native import world

OVER_EACH = ("test_round_trip", "test_holding")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in OVER_EACH:
        metafunc.parametrize("_over", world.CONNECTORS, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def _over(request: pytest.FixtureRequest):
    before, world.over = world.over, getattr(request, "param", world.over)
    yield
    world.over = before
