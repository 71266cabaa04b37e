"""F ranks join F rank 0, agree, and end together."""

import threading
import time

import pytest

from ffn_faas.config import ServeConfig, World
from ffn_faas.errors import LaunchDisagreement, WorldLost
from ffn_faas.service.lifecycle import Lifecycle, Phase
from ffn_faas.service.stop import StopRequest
from ffn_faas.service.world import WorldHub
from ffn_faas.service.world_member import WorldMember
from tests.http.conftest import Service
from tests.waiting import wait_until


@pytest.fixture
def hub():
    service = Service(World(rank=0, size=3, local_size=3))
    yield service
    service.server.shutdown()


@pytest.fixture
def member(hub):
    members = []

    def make(rank, **changes):
        fields = {"model": "m", "port": hub.port, "world": World(rank, 3, rank, 3), "world_timeout_s": 5.0}
        made = WorldMember(
            ServeConfig(**(fields | changes)), Lifecycle(), StopRequest(), f"127.0.0.1:{hub.port + rank}"
        )
        members.append(made)
        return made

    yield make
    for made in members:
        made.close()


def test_the_world_is_formed_when_all_have_joined_and_everyone_knows_all_addresses(hub, member):
    one = member(1)
    assert not hub.state.world.formed.wait(0.3)
    two = member(2)
    for view in (hub.state.world, one, two):
        view.form()
        wait_until(lambda view=view: view.addresses == [f"127.0.0.1:{hub.port + rank}" for rank in range(3)], 5)


def test_phases_reach_every_rank(hub, member):
    one, two = member(1), member(2)
    one.form()
    one.lifecycle.advance(Phase.LOADING)
    wait_until(lambda: hub.state.world.phases[1] == "loading", 5)
    wait_until(lambda: two.phases[1] == "loading", 5)


def test_a_rank_started_with_other_settings_fails_the_launch_naming_both_values(hub, member):
    wrong = member(1, dtype="float16")
    with pytest.raises(LaunchDisagreement, match=r"--dtype: F rank 0 has auto, F rank 1 has float16"):
        wrong.form()
    with pytest.raises(LaunchDisagreement, match="float16"):
        hub.state.world.form()


def test_two_processes_with_one_rank_fail_the_launch(hub, member):
    member(1)
    wait_until(lambda: hub.state.world.addresses[1], 5)
    with pytest.raises(LaunchDisagreement, match="two processes claim to be F rank 1"):
        member(1).form()


@pytest.mark.parametrize(("rank", "settings"), [(1, {"dtype": "float16"}), (1, {}), (2, {})])
def test_who_comes_to_a_complete_world_is_refused_and_the_world_goes_on(hub, member, rank, settings):
    one, two = member(1), member(2)
    one.form()
    stranger = member(rank, **settings)
    with pytest.raises(LaunchDisagreement):
        stranger.form()
    assert not any(view.stop for view in (hub.state, one, two))
    two.lifecycle.advance(Phase.LOADING)
    wait_until(lambda: one.phases[2] == "loading", 5)


def test_a_rank_that_never_comes_is_named(hub):
    service = Service(World(rank=0, size=2, local_size=2))
    try:
        object.__setattr__(service.state.config, "world_timeout_s", 0.2)
        with pytest.raises(LaunchDisagreement, match=r"F ranks \[1\] of 2 did not join"):
            service.state.world.form()
    finally:
        service.server.shutdown()


def test_losing_any_rank_ends_all_others_with_world_lost(hub, member):
    one, two = member(1), member(2)
    two.form()
    one._socket.socket.shutdown(2)
    wait_until(lambda: hub.state.stop and two.stop, 5)
    assert isinstance(hub.state.stop.error, WorldLost)
    assert isinstance(two.stop.error, WorldLost)
    assert "F rank 1" in two.stop.reason


def test_losing_f_rank_0_ends_the_others(hub, member):
    one, two = member(1), member(2)
    one.form()
    hub.server.shutdown()
    wait_until(lambda: one.stop and two.stop, 5)
    assert "F rank 0" in one.stop.reason
    assert isinstance(two.stop.error, WorldLost)


def test_a_stop_asked_of_any_rank_stops_all_without_an_error(hub, member):
    one, two = member(1), member(2)
    one.form()
    two.form()
    two.stop.request("SIGTERM")
    wait_until(lambda: hub.state.stop and one.stop, 5)
    assert (hub.state.stop.error, one.stop.error) == (None, None)
    assert one.stop.reason == "SIGTERM"


def test_a_rank_that_is_lost_while_the_world_stops_turns_the_stop_into_a_failure(hub, member):
    one, two = member(1), member(2)
    two.form()
    hub.state.stop.request("SIGTERM")
    wait_until(lambda: one.stop and two.stop, 5)
    one._socket.socket.shutdown(2)
    wait_until(lambda: hub.state.stop.error is not None and two.stop.error is not None, 5)
    assert isinstance(hub.state.stop.error, WorldLost)
    assert "F rank 1" in two.stop.reason


def test_ranks_that_finish_one_by_one_are_not_lost_and_f_rank_0_waits_for_the_last(hub, member):
    one, two = member(1), member(2)
    for view in (one, two):
        view.form()
    hub.state.stop.request("SIGTERM")
    wait_until(lambda: one.stop and two.stop, 5)
    for view in (one, two):
        hub.state.world.await_others(0.1)
        view.lifecycle.advance(Phase.DRAINING)
        view.lifecycle.advance(Phase.STOPPED)
        view.close()
    began = time.monotonic()
    hub.state.world.await_others(30.0)
    assert time.monotonic() - began < 20
    assert (hub.state.stop.error, one.stop.error, two.stop.error) == (None, None, None)


def test_all_have_drained_when_the_last_rank_has_and_one_that_never_was_ready_is_not_waited_for(hub, member):
    one, two = member(1), member(2)
    for view in (one, two):
        view.form()
    two.lifecycle.advance(Phase.LOADING)
    hub.state.stop.request("SIGTERM")
    wait_until(lambda: one.stop and two.stop, 5)
    hub.state.world.drained()
    two.lifecycle.advance(Phase.DRAINING)
    two.lifecycle.advance(Phase.STOPPED)
    wait_until(lambda: hub.state.world.phases[2] == "stopped", 5)
    assert not any(view.all_drained.is_set() for view in (hub.state.world, one, two))
    one.drained()
    for view in (hub.state.world, one, two):
        wait_until(view.all_drained.is_set, 5)


def test_whoever_drains_when_f_rank_0_has_stopped_waits_for_nobody(hub, member):
    one, two = member(1), member(2)
    for view in (one, two):
        view.form()
    hub.state.stop.request("SIGTERM")
    hub.state.lifecycle.advance(Phase.DRAINING)
    hub.state.lifecycle.advance(Phase.STOPPED)
    for view in (one, two):
        wait_until(view.all_drained.is_set, 5)


class Slow(Lifecycle):
    """One thread, once it has read the phase, is held before it can pass it on."""

    def __init__(self):
        super().__init__()
        self.has_read, self.go_on, self.held = threading.Event(), threading.Event(), None

    def _hold(self):
        if threading.current_thread() is self.held:
            self.has_read.set()
            assert self.go_on.wait(10)

    @property
    def phase(self):
        read = super().phase
        self._hold()
        return read

    def snapshot(self):
        read = super().snapshot()
        self._hold()
        return read


@pytest.mark.parametrize("kind", ["hub", "member"])
def test_the_last_phase_that_others_hear_is_the_last_one_entered(hub, kind):
    lifecycle = Slow()
    config = ServeConfig(model="m", port=hub.port, world=World(1, 3, 1, 3), world_timeout_s=5.0)
    told = []
    if kind == "hub":
        view = WorldHub(ServeConfig(model="m", world=World(0, 3, 0, 3)), lifecycle, StopRequest(), "here")
        view._members[1] = lambda message: told.append(message.phases[0])
    else:
        view = WorldMember(config, lifecycle, StopRequest(), "here")
        wait_until(lambda: view._joined and view._thread.is_alive(), 5)
        view._send = lambda message: told.append(message.phase)
    for phase in (Phase.LOADING, Phase.CAPTURING, Phase.READY):
        lifecycle.advance(phase)
    lifecycle.held = threading.Thread(target=lifecycle.drain, args=("SIGTERM",))
    lifecycle.held.start()
    assert lifecycle.has_read.wait(10)
    other = threading.Thread(target=lifecycle.advance, args=(Phase.STOPPED,))
    other.start()
    other.join(0.3)  # it may be told first, or wait for its turn
    lifecycle.go_on.set()
    lifecycle.held.join(10)
    other.join(10)
    view.close()
    assert told[-1] == "stopped"
    assert view.phases[config.world.rank if kind == "member" else 0] == "stopped"


@pytest.mark.parametrize("token", [None, "other"])
def test_a_rank_with_another_token_fails_its_launch_at_once_and_the_hub_goes_on(member_of, token):
    hub, make = member_of("right")
    with pytest.raises(LaunchDisagreement, match="FFN_FAAS_TOKEN"):
        make(token=token).form()
    assert not hub.state.stop
    make(token="right").form()
    hub.state.world.form()


@pytest.fixture
def member_of():
    made = []

    def start(token):
        hub = Service(World(rank=0, size=2, local_size=2), token=token)
        made.append(hub.server.shutdown)

        def make(**changes):
            config = ServeConfig(model="m", port=hub.port, world=World(1, 2, 1, 2), world_timeout_s=5.0, **changes)
            one = WorldMember(config, Lifecycle(), StopRequest(), f"127.0.0.1:{hub.port + 1}")
            made.append(one.close)
            return one

        return hub, make

    yield start
    for end in reversed(made):
        end()
