"""Reads one endpoint over ZMQ and does what its state machine says.

Three sockets: SUB for live batches and heartbeats, its monitor for the state of the
connection, and a DEALER a replay (docs/events.md has the protocol). Everything runs
on one asyncio loop; whatever decides anything is in
:mod:`event_consumer.stream_state`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.utils.monitor import parse_monitor_message

from event_consumer.endpoints import Endpoint
from event_consumer.intake import NS, Intake
from event_consumer.kv_events import KvEventReader
from event_consumer.settings import SettingsError
from event_consumer.storable import MAX_ENGINE_ID, make_storable, storable
from event_consumer.stream_state import (
    UNREADABLE,
    Action,
    AskReplay,
    StreamState,
)
from vllm_fork.events import (
    END_OF_REPLAY,
    BatchDecoder,
    DecodedBatch,
    EngineStarted,
    seq_from_bytes,
    seq_to_bytes,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
"""A longer message costs the connection (libzmq closes it before reading it)."""
FRAMES_A_TURN: Final = 64
"""Frames of one endpoint that are handled before the others have their turn."""
TICK_S: Final = 0.1
RECONNECT_MS: Final = 100
MAX_RECONNECT_MS: Final = 1_000
CONNECT_WARNING_S: Final = 5.0
"""After so long without a first connection, say so."""
PING_MS: Final = 2_000
"""A peer that does not answer for three of these is gone, whatever TCP thinks."""
RECEIVE_HWM: Final = 4_096
REPLAY_HWM: Final = 256

_CONNECTED: Final = zmq.Event.HANDSHAKE_SUCCEEDED
_DISCONNECTED: Final = zmq.Event.DISCONNECTED
_REFUSED: Final = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


MAX_SEQ: Final = 2**62
"""No publisher comes so far, and a store takes sums of such numbers."""

MAX_TIME_S: Final = 2**62 / NS

_Seq = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQ)]


class ReplaySummary(msgspec.Struct):
    """What the end marker of a replay says (empty in vLLM's own publisher)."""

    first_buffered_seq: _Seq | None = None
    next_seq: _Seq | None = None
    engine_id: str | None = None

    def __post_init__(self) -> None:
        if self.engine_id is not None:
            self.engine_id = storable(self.engine_id, MAX_ENGINE_ID)


class CurveKeys(NamedTuple):
    """The engine's public key, and our own pair."""

    server: bytes
    public: bytes
    secret: bytes


class Subscriber:
    """One endpoint. :meth:`run` until cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: Endpoint,
        state: StreamState,
        intake: Intake,
        *,
        curve: CurveKeys | None,
        gate: asyncio.Event,
        max_frame_bytes: int,
    ) -> None:
        """
        Args:
            curve: of :func:`curve_keys`.
            gate: nothing is read while it is not set (the store does not keep up).
            max_frame_bytes: longer payloads are counted and skipped.
        """
        self._context = context
        self._endpoint = endpoint
        self._state = state
        self._intake = intake
        self._gate = gate
        self._max_frame_bytes = max_frame_bytes
        self._decoder = BatchDecoder()
        self._curve = curve
        self._replay: asyncio.Task[None] | None = None
        self._warned_refused = False
        self._unheard_since: float | None = time.monotonic()

    async def run(self) -> None:
        """Read until cancelled."""
        socket = self._socket(zmq.SUB)
        socket.rcvhwm = RECEIVE_HWM
        socket.subscribe(self._endpoint.settings.topic)
        monitor = socket.get_monitor_socket(_CONNECTED | _DISCONNECTED | _REFUSED)
        try:
            socket.connect(self._endpoint.endpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(monitor))
                tasks.create_task(self._read_live(socket))
                if self._endpoint.kv_events is not None:
                    tasks.create_task(self._read_kv_events(self._endpoint.kv_events))
        finally:
            await self._stop_replay()
            socket.disable_monitor()
            socket.close(linger=0)

    def _socket(self, kind: int, *, curve: bool = True) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = MAX_RECONNECT_MS
        socket.heartbeat_ivl = PING_MS
        socket.heartbeat_timeout = 3 * PING_MS
        if "[" in self._endpoint.endpoint:
            socket.ipv6 = True
        if curve and self._curve is not None:
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
                self._curve
            )
        return socket

    def _act(self, actions: list[Action]) -> None:
        if not actions:
            return
        self._intake.handle(self._endpoint.endpoint, actions)
        for action in actions:
            if type(action) is AskReplay:
                self._ask(action)

    # -- connection and time -------------------------------------------------

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            kind = event["event"]
            now = time.monotonic()
            if kind & _CONNECTED:
                logger.info("%s is connected", self._endpoint.endpoint)
                self._unheard_since = None
                self._act(self._state.on_connected(now))
                self._touch()
            elif kind & _DISCONNECTED:
                # Also what never spoke ZMQ hangs up, ten times a second.
                if not self._state.connected:
                    continue
                logger.info("%s is disconnected", self._endpoint.endpoint)
                self._act(self._state.on_disconnected(now))
                self._touch()
            elif not self._warned_refused:
                self._warned_refused = True
                logger.warning(
                    "%s refused the connection: it speaks another protocol, or its "
                    "CURVE keys are not those of the configuration",
                    self._endpoint.endpoint,
                )

    def tick(self) -> None:
        """To be called about every :data:`TICK_S` seconds."""
        now = time.monotonic()
        self._warn_unheard(now)
        if self._gate.is_set():
            self._act(self._state.on_tick(now))

    def _warn_unheard(self, now: float) -> None:
        """Once, where nobody has answered since the start."""
        since = self._unheard_since
        if since is None or now - since < CONNECT_WARNING_S:
            return
        self._unheard_since = None
        logger.warning(
            "%s has not connected within %g s: no engine with checkpoint events "
            "answers there; it is tried on",
            self._endpoint.endpoint,
            CONNECT_WARNING_S,
        )

    def _touch(self) -> None:
        """The state of the stream changed, though nothing was applied."""
        self._intake.handle(self._endpoint.endpoint, ())

    # -- live ----------------------------------------------------------------

    async def _read_live(self, socket: zmq.asyncio.Socket) -> None:
        # The same socket without asyncio: one await serves many frames.
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        while True:
            await self._gate.wait()
            await socket.poll()
            for _ in range(FRAMES_A_TURN):
                try:
                    frames = plain.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._on_live(frames)
            await asyncio.sleep(0)

    def _on_live(self, frames: list[bytes]) -> None:
        read = self._read(frames)
        if read is None:
            return
        seq, decoded = read
        batch = decoded.batch
        now = time.monotonic()
        if batch.heartbeat:
            self._act(self._state.on_heartbeat(batch.engine_id, seq, now))
        else:
            begins = _begins_epoch(decoded)
            self._act(
                self._state.on_live(batch.engine_id, seq, decoded, now, begins=begins)
            )

    def _read(self, frames: list[bytes]) -> tuple[int, DecodedBatch] | None:
        """Decode ``[topic, seq, payload]``; None, counted, where it is no batch."""
        try:
            _, seq_frame, payload = frames
            seq = seq_from_bytes(seq_frame)
            if not 0 <= seq <= MAX_SEQ:
                raise ValueError(f"its sequence number is {seq}")
            decoded = self._decode(payload)
        except (ValueError, msgspec.DecodeError) as error:
            self._intake.undecodable(self._endpoint.endpoint, str(error))
            return None
        return seq, decoded

    def _decode(self, payload: bytes) -> DecodedBatch:
        if len(payload) > self._max_frame_bytes:
            raise ValueError(
                f"it has {len(payload)} bytes, more than max_frame_bytes "
                f"({self._max_frame_bytes})"
            )
        decoded = self._decoder.decode(payload)
        if not decoded.batch.engine_id:
            raise ValueError("it names no engine (another program's events?)")
        if not 0 <= decoded.batch.ts <= MAX_TIME_S:
            raise ValueError(f"its time is {decoded.batch.ts}")
        make_storable(decoded.batch, decoded.events)
        return decoded

    # -- vLLM's own stream ---------------------------------------------------

    async def _read_kv_events(self, endpoint: str) -> None:
        socket = self._socket(zmq.SUB, curve=False)
        socket.subscribe(b"")
        reader = KvEventReader()
        try:
            socket.connect(endpoint)
            while True:
                await self._gate.wait()
                self._on_kv_events(reader, await socket.recv_multipart())
        finally:
            socket.close(linger=0)

    def _on_kv_events(self, reader: KvEventReader, frames: list[bytes]) -> None:
        try:
            removed = reader.read(frames[-1])
        except msgspec.DecodeError as error:
            self._intake.undecodable(self._endpoint.endpoint, str(error))
            return
        if removed.block_hashes:
            self._intake.ledger.attention_evicted(
                self._endpoint.endpoint, removed.block_hashes, removed.time_ns
            )

    # -- replay --------------------------------------------------------------

    def _ask(self, ask: AskReplay) -> None:
        if self._replay is not None:
            self._replay.cancel()
        self._replay = asyncio.create_task(self._read_replay(ask))

    async def _stop_replay(self) -> None:
        if self._replay is not None:
            self._replay.cancel()
            await asyncio.gather(self._replay, return_exceptions=True)

    async def _read_replay(self, ask: AskReplay) -> None:
        assert self._endpoint.replay is not None
        socket = self._socket(zmq.DEALER)
        socket.rcvhwm = REPLAY_HWM
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        try:
            socket.connect(self._endpoint.replay)
            plain.send_multipart((b"", seq_to_bytes(ask.first_seq)))
            while self._state.attempt == ask.attempt:
                await self._gate.wait()
                await socket.poll()
                for _ in range(FRAMES_A_TURN):
                    try:
                        frames = plain.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    if self._on_replayed(ask.attempt, frames):
                        return
                await asyncio.sleep(0)
        finally:
            socket.close(linger=0)

    def _on_replayed(self, attempt: int, frames: list[bytes]) -> bool:
        """Handle one reply; whether it was the end marker."""
        now = time.monotonic()
        if len(frames) == 4 and frames[2] == END_OF_REPLAY:
            summary = _summary(frames[3])
            self._act(
                self._state.on_replay_end(
                    attempt,
                    now,
                    epoch=summary.engine_id,
                    first_buffered_seq=summary.first_buffered_seq,
                    next_seq=summary.next_seq,
                )
            )
            self._touch()
            return True
        read = self._read(frames[1:])
        if read is not None:
            seq, decoded = read
            epoch = decoded.batch.engine_id
            begins = _begins_epoch(decoded)
            self._act(
                self._state.on_replayed(
                    attempt, epoch, seq, decoded, now, begins=begins
                )
            )
        elif len(frames) == 4 and len(frames[2]) == len(END_OF_REPLAY):
            seq = seq_from_bytes(frames[2])
            self._act(self._state.on_replayed(attempt, None, seq, UNREADABLE, now))
        return False


def _begins_epoch(decoded: DecodedBatch) -> bool:
    return bool(decoded.events) and type(decoded.events[0]) is EngineStarted


def _summary(payload: bytes) -> ReplaySummary:
    try:
        return msgspec.msgpack.decode(payload, type=ReplaySummary)
    except msgspec.DecodeError:  # vLLM's own is empty
        return ReplaySummary()


def check_addresses(endpoint: Endpoint) -> None:
    """Whether ZMQ can make sense of the addresses; nobody need listen there.

    Raises:
        SettingsError: one is no address.
    """
    for address in (endpoint.endpoint, endpoint.replay, endpoint.kv_events):
        if address is None:
            continue
        probe: Any = zmq.Context.instance().socket(zmq.SUB)
        probe.setsockopt(zmq.IPV6, "[" in address)
        try:
            probe.connect(address)
        except zmq.ZMQError as error:
            raise SettingsError(
                f"The endpoint {address} is no address: {error.strerror}."
            ) from None
        finally:
            probe.close(linger=0)


def curve_keys(endpoint: Endpoint) -> CurveKeys | None:
    """The keys of the settings; None without CURVE.

    Raises:
        SettingsError: one cannot be read.
    """
    server = endpoint.settings.curve_server_key
    if server is None:
        return None
    try:
        server_key = (
            server.encode()
            if len(server) == 40
            else zmq.auth.load_certificate(server)[0]
        )
        ours = endpoint.settings.curve_secret_key_file
        public, secret = (
            zmq.auth.load_certificate(ours) if ours else zmq.curve_keypair()
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"A CURVE key of {endpoint.endpoint} cannot be read: {error}."
        ) from None
    if secret is None:
        raise SettingsError(
            f"{endpoint.settings.curve_secret_key_file} holds no secret key: name the "
            ".key_secret file that zmq.auth.create_certificates wrote."
        )
    return CurveKeys(server_key, public, secret)
