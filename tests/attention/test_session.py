from __future__ import annotations

import logging
import socket
import threading
import time

import pytest

from ffn_faas.connectors.base import WindowGeometry
from ffn_faas.errors import HandshakeRefused, SessionLost
from ffn_faas.protocol.messages import Detach, Ended, LayersAccepted, Progress, Refused

from .fake_client import NAMES, FakeClient, session_to
from .fake_f import Peer, Script, fake_f, granted, serving


def test_a_session_with_three_f_ranks_reaches_attached_and_tells_the_client_everything() -> None:
    addresses: list[str] = []
    with fake_f(*(lambda peer, rank=rank: serving(addresses, rank)(peer) for rank in range(3))) as found:
        addresses += found
        session = session_to(addresses[0])
        session.attach(5.0)
        session.declare_layers(NAMES)
        session.wait_ready(5.0)
        client = session.client
        assert isinstance(client, FakeClient)
        assert client.geometry == WindowGeometry(1, 16, 8, 2, 2)
        assert client.layers == [4, 7]
        assert client.links == {rank: (f"ticket {rank}", 5 + rank) for rank in range(3)}
        assert not client.failed.is_set()
        session.close()


def test_close_detaches_and_later_ops_raise() -> None:
    said: list[object] = []
    done = threading.Event()

    def then(peer: Peer) -> None:
        said.append(peer.hear())
        done.set()

    addresses: list[str] = []
    with fake_f(serving(addresses, 0, then)) as found:
        addresses += found
        session = session_to(addresses[0])
        session.attach(5.0)
        session.declare_layers(NAMES)
        session.wait_ready(5.0)
        session.close()
        session.close()
        assert done.wait(5.0)
    assert said == [Detach()]
    assert isinstance(session.client, FakeClient)
    assert "detached" in session.client.reason


def test_a_refusal_raises_with_the_very_text_of_f() -> None:
    reason = "dtype: Attention has bfloat16, F has float16; give both sides the same --dtype"

    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(Refused(reason=reason))

    started = time.monotonic()
    with fake_f(script) as addresses, pytest.raises(HandshakeRefused, match=r"F rank 0 at 127.0.0.1") as caught:
        session_to(addresses[0]).attach(600.0)
    assert reason in str(caught.value)
    assert time.monotonic() - started < 2.0


def test_refused_layers_raise_with_the_very_text_of_f() -> None:
    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(granted(addresses))
        peer.hear()
        peer.say(Refused(reason="layers: Attention built a, F has b"))

    with fake_f(script) as addresses:
        session = session_to(addresses[0])
        session.attach(5.0)
        with pytest.raises(HandshakeRefused, match="layers: Attention built a, F has b"):
            session.declare_layers(NAMES)
        session.close()


def test_progress_before_the_grant_is_waited_through() -> None:
    def script(peer: Peer) -> None:
        peer.hear()
        for _ in range(3):
            peer.say(Progress(phase="STARTING", progress=0.0))
        peer.say(granted(addresses))
        peer.listen_to_the_end()

    with fake_f(script) as addresses:
        session = session_to(addresses[0])
        session.attach(5.0)
        session.close()


def test_an_f_that_never_answers_is_named_with_role_rank_and_address(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with caplog.at_level(logging.INFO), pytest.raises(SessionLost) as caught:
            session_to(f"127.0.0.1:{port}").attach(1.2)
    assert f"A rank 0: F rank 0 at 127.0.0.1:{port} did not answer within 1.2 s" in str(caught.value)
    assert any(f"Waiting for F rank 0 at 127.0.0.1:{port}" in record.message for record in caplog.records)


def test_attention_may_start_before_f() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    address = f"127.0.0.1:{port}"
    session = session_to(address)
    caller = threading.Thread(target=session.attach, args=(20.0,))
    caller.start()
    time.sleep(0.3)
    with fake_f(serving([address], 0), ports=[port]):
        caller.join(10.0)
        session.declare_layers(NAMES)
        session.wait_ready(5.0)
        session.close()


def test_the_death_of_one_f_rank_fails_the_client_naming_it() -> None:
    addresses: list[str] = []
    with fake_f(
        serving(addresses, 0),
        serving(addresses, 1, Peer.die),
    ) as found:
        addresses += found
        session = session_to(addresses[0])
        try:
            session.attach(5.0)
            session.declare_layers(NAMES)
        except SessionLost as lost:  # it may have died before there was anything to fail
            reason = str(lost)
        else:
            client = session.client
            assert isinstance(client, FakeClient)
            assert client.failed.wait(2.0)
            reason = client.reason
        assert f"F rank 1 at {addresses[1]} is lost" in reason
        session.close()


def test_an_end_by_f_carries_its_reason() -> None:
    addresses: list[str] = []

    declared = threading.Event()

    def then(peer: Peer) -> None:
        declared.wait(5.0)
        peer.say(Ended(reason="F is stopping: POST /stop"))

    with fake_f(serving(addresses, 0, then)) as found:
        addresses += found
        session = session_to(addresses[0])
        session.attach(5.0)
        session.declare_layers(NAMES)
        declared.set()
        client = session.client
        assert isinstance(client, FakeClient)
        assert client.failed.wait(2.0)
        assert "ended the session: F is stopping: POST /stop" in client.reason
        session.close()


def test_f_dying_while_it_loads_ends_the_wait_for_ready() -> None:
    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(granted(addresses), Progress(phase="LOADING", progress=0.1))
        peer.hear()
        peer.say(LayersAccepted(indices=[0, 1]))
        time.sleep(0.3)
        peer.die()

    with fake_f(script) as addresses:
        session = session_to(addresses[0])
        session.attach(5.0)
        session.declare_layers(NAMES)
        with pytest.raises(SessionLost, match=r"F rank 0 at .* is lost"):
            session.wait_ready(60.0)
        session.close()


def test_a_load_that_stands_still_is_given_up_naming_its_phase() -> None:
    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(granted(addresses), Progress(phase="LOADING", progress=0.25))
        peer.hear()
        peer.say(LayersAccepted(indices=[0, 1]))
        peer.listen_to_the_end()

    with fake_f(script) as addresses:
        session = session_to(addresses[0])
        session.attach(5.0)
        session.declare_layers(NAMES)
        with pytest.raises(SessionLost, match=r"LOADING 25%"):
            session.wait_ready(0.5)
        session.close()


def test_f_ranks_that_grant_different_capacities_are_refused() -> None:
    def script(rank: int) -> Script:
        def run(peer: Peer) -> None:
            peer.hear()
            peer.say(granted(addresses, rank, capacity=16 - rank))
            peer.listen_to_the_end()

        return run

    with fake_f(script(0), script(1)) as addresses:
        session = session_to(addresses[0])
        with pytest.raises(HandshakeRefused, match="16, 15"):
            session.attach(5.0)
        session.close()


def test_a_port_of_another_f_rank_is_refused() -> None:
    def script(peer: Peer) -> None:
        peer.hear()
        peer.say(granted(addresses, rank=1))

    with fake_f(script) as addresses, pytest.raises(HandshakeRefused, match="says that it is F rank 1"):
        session_to(addresses[0]).attach(5.0)
