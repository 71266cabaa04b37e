import pytest

from tests.service.faults import SharedWorld


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = SharedWorld(tmp_path_factory.mktemp("faults"))
    yield made
    made.end()
