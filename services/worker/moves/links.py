"""The links of a worker to other workers: one for all that push blocks to it, and one to each
worker that it pushes blocks to."""

import asyncio
import logging
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path

from shared.errors import CodecError, ConfigError
from shared.link.address import checked, socket_path
from shared.link.endpoint import Endpoint, check_dialled, tcp_address
from shared.link.keys import Keys, load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    INSTANCE,
    MOVES_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Meet,
    Message,
    Pushed,
    ServiceName,
    State,
)

log = logging.getLogger(__name__)

SERVICE: ServiceName = "worker"
SETTING = "kv-transfer-address"
CONNECT_S = 5.0  # blocks wait so long for a connection; schedulers wait no longer for them
ELSEWHERE = "192.0.2.1", 9  # nothing is sent: the system only chooses a route
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

OnPushed = Callable[[Peer, Pushed, Sequence[Array]], None]


def role_of(instance: str) -> str:
    """The role of the socket of ``instance`` for blocks: short, and no prefix of another one."""
    return f"kv{blake2b(instance.encode(), digest_size=4).hexdigest()}"


def location_of(mesh_dir: Path) -> str:
    """Equal for workers that reach each other's sockets in ``mesh_dir``."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = secrets.token_hex(16)
    found = mesh_dir.stat()
    return f"{boot}:{found.st_dev:x}:{found.st_ino:x}"


class End:
    """One end of a link between workers, which is always ready."""

    def status(self) -> Heartbeat:
        return Heartbeat(State.READY, "", 0, 0)

    def refusal(self, hello: Hello) -> str | None:
        if hello.minor < MOVES_MINOR:
            return f"protocol minor {hello.minor} knows of no moves, {MOVES_MINOR} does"
        return None

    def on_up(self, peer: Peer) -> None:
        """Nothing is sent before a push."""

    def on_down(self, peer: Peer, reason: str) -> None:
        """Blocks that have come stay."""

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)


class Receiver(End):
    """Passes on the blocks of other workers. ``address`` is the tcp address for workers elsewhere,
    or empty."""

    def __init__(self, config: WorkerConfig, keys: Keys | None, on_pushed: OnPushed) -> None:
        self.link = Link(_hello(config), self, keys)
        self.address = ""
        self._config, self._on_pushed = config, on_pushed

    def listen(self) -> None:
        """Raises ConfigError."""
        config, tcp = self._config, self._config.kv_transfer_address
        try:
            self.link.listen(config.mesh_dir, SERVICE, role_of(config.instance), tcp)
        except ConfigError as error:
            raise ConfigError(f"{SETTING}: {error}" if tcp else str(error)) from None
        if tcp is not None:
            host = Endpoint.parse(tcp).host
            port = int(self.link.addresses[-1].rpartition(":")[2])
            self.address = tcp_address(_own_host() if host == "*" else host, port)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        if isinstance(message, Pushed):
            self._on_pushed(peer, message, arrays)
        else:
            super().on_message(peer, message, arrays)


class Sender(End):
    """Pushes blocks to one worker, by one connection; until it is up, blocks wait."""

    def __init__(self, config: WorkerConfig, keys: Keys | None, meet: Meet) -> None:
        self._worker = meet.worker
        self._peer: Peer | None = None
        self._waiting: list[tuple[Pushed, Sequence[Array]]] = []
        self._is_up, self._is_over = asyncio.Event(), asyncio.Event()
        self._link = Link(_hello(config), self, keys)
        tcp = [meet.address] if meet.address else []
        role = role_of(meet.worker)
        self._link.dial(SERVICE, config.mesh_dir, role, tcp=tcp, takes_one=True)

    async def run(self) -> None:
        """Until the connection ends, cannot be made, or is stopped."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self._link.run())
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await self._is_up.wait()
                    await self._is_over.wait()
                except TimeoutError:
                    log.warning("worker %s cannot be reached for KV blocks", self._worker)
                self.stop()
                running.cancel()
        finally:
            await self._link.close("no more KV blocks")

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def stop(self) -> None:
        self._peer, self._waiting = None, []
        self._is_up.set()
        self._is_over.set()

    def send(self, message: Pushed, blocks: Sequence[Array]) -> None:
        if self._peer is None:
            self._waiting.append((message, blocks))
        else:
            self._peer.send(message, *blocks)

    def refusal(self, hello: Hello) -> str | None:
        if hello.instance != self._worker:
            return f"this is {hello.instance}, and not {self._worker}"
        return super().refusal(hello)

    def on_up(self, peer: Peer) -> None:
        if self.is_over:
            return
        self._peer = peer
        for message, blocks in self._waiting:
            peer.send(message, *blocks)
        self._waiting = []
        self._is_up.set()

    def on_down(self, peer: Peer, reason: str) -> None:
        self.stop()


class WorkerLinks:
    """All links of a worker to others, while ``run`` runs. Raises ConfigError there."""

    def __init__(self, config: WorkerConfig, on_pushed: OnPushed) -> None:
        self.receiver: Receiver | None = None
        self._config, self._on_pushed = config, on_pushed
        self._met: dict[str, Meet] = {}
        self._senders: dict[str, Sender] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._keys: Keys | None = None

    async def run(self) -> None:
        """Without a socket, whose path may be too long, this worker takes part in no moves."""
        config, name = self._config, self._config.instance
        try:
            checked(socket_path(config.mesh_dir, SERVICE, name, role_of(name)))
        except ConfigError as error:
            log.warning("kv-transfer: no KV block moves: %s", error)
            return
        self._keys = load_keys(config.keys, SERVICE)
        receiver = Receiver(config, self._keys, self._on_pushed)
        try:
            receiver.listen()
            self.receiver = receiver
            async with asyncio.TaskGroup() as self._tasks:
                await receiver.link.run()
        finally:
            self._tasks = None
            await receiver.link.close("the worker leaves")

    def meet(self, meet: Meet) -> None:
        """The worker may be another process than the one of that name before. Raises
        CodecError."""
        if not re.fullmatch(INSTANCE, meet.worker):
            raise CodecError(f"a worker whose name is not {INSTANCE}")
        try:
            if meet.address:
                check_dialled(meet.address)
        except ValueError as error:
            raise CodecError(f"the address of worker {meet.worker}: {error}") from None
        if (sender := self._senders.pop(meet.worker, None)) is not None:
            sender.stop()
        self._met[meet.worker] = meet
        self._sender(meet)

    def has_met(self, worker: str) -> bool:
        return worker in self._met

    def has_guests(self, worker: str) -> bool:
        """True if blocks for ``worker`` go to another cell."""
        return self._met[worker].are_guests

    def send(self, worker: str, message: Pushed, blocks: Sequence[Array]) -> None:
        """A connection that was lost is made again."""
        if (sender := self._sender(self._met[worker])) is not None:
            sender.send(message, blocks)

    def forget(self) -> None:
        """No more is sent to any worker."""
        for sender in self._senders.values():
            sender.stop()
        self._senders, self._met = {}, {}

    def _sender(self, meet: Meet) -> Sender | None:
        """None while the links do not run."""
        sender = self._senders.get(meet.worker)
        if self._tasks is not None and (sender is None or sender.is_over):
            sender = self._senders[meet.worker] = Sender(self._config, self._keys, meet)
            self._tasks.create_task(self._run(meet.worker, sender))
        return sender

    async def _run(self, worker: str, sender: Sender) -> None:
        await sender.run()
        if self._senders.get(worker) is sender:
            del self._senders[worker]


def _hello(config: WorkerConfig) -> Hello:
    return Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, SERVICE, config.instance)


def _own_host() -> str:
    """The address of this host's name, or on its way to others. Raises ConfigError."""
    with suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not ip_address(found).is_loopback:
            return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
            return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(
                f"{SETTING}: this host has no address for others ({error.strerror}); name it"
                " instead of *"
            ) from None
