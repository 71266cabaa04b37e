"""F rank k > 0: its WebSocket to F rank 0."""

from __future__ import annotations

import logging
import ssl
import threading
import time

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from ffn_faas.config import ServeConfig
from ffn_faas.connectors import keepalive
from ffn_faas.errors import LaunchDisagreement, WorldLost
from ffn_faas.protocol.messages import (
    Message,
    Refused,
    WorldDrained,
    WorldJoin,
    WorldPhase,
    WorldPhases,
    WorldStop,
    WorldWelcome,
    parse,
)
from ffn_faas.service.lifecycle import Lifecycle, Phase
from ffn_faas.service.stop import StopRequest
from ffn_faas.service.world import WorldView

log = logging.getLogger(__name__)
RETRY_S = 0.2


class WorldMember(WorldView):
    """A thread joins F rank 0 (which may come up later), then listens to it until either side is gone."""

    def __init__(self, config: ServeConfig, lifecycle: Lifecycle, stop: StopRequest, own_address: str) -> None:
        self._socket: ClientConnection | None = None
        self._send_lock = threading.Lock()
        self._phase_lock = threading.Lock()
        self._closing = self._joined = False
        self._own_address = own_address
        self._hub = f"{config.rank_zero_host}:{config.port}"
        super().__init__(config, lifecycle, stop)
        self._thread = threading.Thread(target=self._run, name="ffn-world", daemon=True)
        self._thread.start()

    def drained(self) -> None:
        self._send(WorldDrained())

    def close(self) -> None:
        self._closing = True
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        socket = self._connected()
        if socket is None:
            return
        try:
            with socket:
                self._socket = socket
                self._send(self._join_message())
                self._joined = True
                self._own_phase_changed()
                for frame in socket:
                    self._heard(parse(frame))
        except (ConnectionClosed, OSError):
            log.debug("the connection to F rank 0 ended")
        finally:
            if not self._closing and not self._left_in_order(0):
                text = f"F rank 0 ({self._hub}) was lost"
                self.stop.request(text, WorldLost(text, remedy="look at F rank 0's log"))

    def _join_message(self) -> WorldJoin:
        world = self.config.world
        return WorldJoin(
            rank=world.rank,
            world_size=world.size,
            address=self._own_address,
            launch=self.config.launch_settings(),
        )

    def _connected(self) -> ClientConnection | None:
        credentials = self.config.credentials
        deadline = time.monotonic() + self.config.world_timeout_s
        while not self._closing and time.monotonic() < deadline:
            try:
                socket = connect(
                    f"{credentials.scheme}://{self._hub}/v1/world",
                    additional_headers=credentials.headers(),
                    ssl=credentials.ssl_context(),
                    ping_interval=None,
                    proxy=None,
                    open_timeout=5,
                )
                keepalive.watch(socket.socket)
                return socket
            except InvalidStatus as error:
                if error.response.status_code in (401, 403):
                    self._refused("FFN_FAAS_TOKEN: F rank 0 has another token than this rank")
                    return None
                time.sleep(RETRY_S)
            except ssl.SSLCertVerificationError as error:
                self._refused(f"--ssl-ca-certs: the certificate of F rank 0 ({self._hub}) is not accepted: {error}")
                return None
            except (OSError, TimeoutError, InvalidHandshake, InvalidMessage, ConnectionClosed, EOFError):
                time.sleep(RETRY_S)
        return None

    def _refused(self, text: str) -> None:
        self.stop.request(text, LaunchDisagreement(text, remedy="start every F rank with the same settings"))

    def _heard(self, message: Message) -> None:
        if isinstance(message, WorldWelcome):
            self.addresses = message.addresses
            self.rendezvous_port = message.rendezvous_port
            self.formed.set()
        elif isinstance(message, WorldPhases):
            self.phases = message.phases
            if self.phases[0] == Phase.STOPPED.value:
                self.all_drained.set()  # nobody is left who would say so
        elif isinstance(message, WorldDrained):
            self.all_drained.set()
        elif isinstance(message, WorldStop):
            error = WorldLost(message.reason, remedy="look at that rank's log") if message.lost else None
            self.stop.request(message.reason, error)
        elif isinstance(message, Refused):
            self.stop.request(message.reason, LaunchDisagreement(message.reason))

    def _absent(self, seconds: float) -> str:
        if self._socket is None:
            return f"F rank 0 was not reached at {self._hub} within {seconds:.0f} s"
        return f"F rank 0 ({self._hub}) was reached, but the world was not complete within {seconds:.0f} s"

    def _own_phase_changed(self) -> None:
        with self._phase_lock:  # two threads may change the phase in a row: what is sent last must be the latest
            snapshot = self.lifecycle.snapshot()
            self.phases[self.config.world.rank] = snapshot.phase.value
            if self._joined:
                self._send(WorldPhase(phase=snapshot.phase.value, progress=snapshot.progress, reason=snapshot.reason))

    def _tell_stop(self) -> None:
        self._send(self._stop_message())

    def _send(self, message: Message) -> None:
        if self._socket is None:
            return
        try:
            with self._send_lock:
                self._socket.send(message.model_dump_json())
        except (ConnectionClosed, OSError):
            log.debug("F rank 0 is gone already")
