"""Two network namespaces and the link between them, which can be slow, lossy, or cut, one way or both, at run time.

The link is two TUN devices and a thread that carries packets from one to the other. Nothing has a name that outlives
this process: namespaces and devices are held by descriptors, and go with them, also when the process is killed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

_Result = TypeVar("_Result")

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_numbers = itertools.count()  # of networks of this process
_libc = ctypes.CDLL(None, use_errno=True)

LINK = "wire"  # the device towards the other namespace, in both
RATE = 2e6  # bytes/s: the KV of a prompt of 600 tokens of the tiny model takes a quarter of a second
MTU = 9000  # few packets: each costs a turn of the carrying thread
_QUEUE_S = 1.0  # a link holds what it can send in this time; the rest is lost, as on a router


class Namespace:
    """A network of its own for processes. `close` it; it lasts until its last process has ended."""

    def __init__(self) -> None:
        self._fd = _in_thread(_unshared)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def run(self, *command: str) -> None:
        """Raises OSError with what the command said if it fails."""
        _run(*self.entering(), *command)

    def entering(self) -> Sequence[str]:
        """What to put before a command, so that it runs in here."""
        return ("nsenter", f"--net={self.path}")

    def unacknowledged_bytes(self, address: str) -> int:
        """What TCP in here still wants to bring to an address, all sockets together."""
        table = self.call(lambda: Path("/proc/thread-self/net/tcp").read_text())
        wanted = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
        rows = [line.split() for line in table.splitlines()[1:]]
        return sum(int(row[4].split(":")[0], 16) for row in rows if row[2].startswith(wanted))

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Calls it in here, in a thread of its own: what it opens stays in here."""

        def entered() -> _Result:
            _check(_libc.setns(self._fd, _CLONE_NEWNET), "setns")
            return function()

        return _in_thread(entered)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(slots=True)
class Direction:
    """What happens to packets on their way. May be changed while the link is up.

    `cut_at_bytes` cuts it by itself once so many bytes have been carried.
    """

    delay_s: float = 0.0
    loss: float = 0.0  # probability
    rate: float = RATE
    is_cut: bool = False
    cut_at_bytes: float = float("inf")
    num_bytes: int = 0  # that got through
    num_lost: int = 0  # packets, by chance; not those that a cut or a full queue swallowed
    busy_until: float = 0.0

    def takes(self, rng: random.Random) -> bool:
        if self.num_bytes >= self.cut_at_bytes:
            self.is_cut = True
        if self.is_cut:
            return False
        if rng.random() < self.loss:
            self.num_lost += 1
            return False
        return self.busy_until - time.monotonic() < _QUEUE_S

    def arrives_at(self, num_bytes: int) -> float:
        self.busy_until = max(self.busy_until, time.monotonic()) + num_bytes / self.rate
        return self.busy_until + self.delay_s


class Link:
    """Joins two namespaces by packets; `out` carries from the first to the second, `back` the other way."""

    def __init__(self, first: Namespace, second: Namespace, addresses: tuple[str, str], *, seed: int) -> None:
        self.out, self.back = Direction(), Direction()
        self._rng = random.Random(seed)
        self._fds = [namespace.call(_open_tun) for namespace in (first, second)]
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._carry, name="link")
        self._thread.start()
        try:
            for namespace, own, other in zip((first, second), addresses, reversed(addresses), strict=True):
                namespace.run("ip", "addr", "add", own, "peer", other, "dev", LINK)
                namespace.run("ip", "link", "set", "dev", LINK, "mtu", str(MTU), "up")
        except BaseException:
            self.close()
            raise

    @property
    def directions(self) -> tuple[Direction, Direction]:
        return self.out, self.back

    def cut(self) -> None:
        """Everything is lost from now on, and nobody is told."""
        for direction in self.directions:
            direction.is_cut = True

    def restore(self) -> None:
        """Whole again, in both directions, without delay or loss."""
        for direction in self.directions:
            direction.is_cut, direction.cut_at_bytes = False, float("inf")
            direction.delay_s, direction.loss = 0.0, 0.0

    def close(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        for fd in (*self._fds, self._stop_fd):
            os.close(fd)

    def _carry(self) -> None:
        """Packets under way are (due, number, file descriptor they go to, packet, direction)."""
        under_way: list[tuple[float, int, int, bytes, Direction]] = []
        number = 0
        ways = {self._fds[0]: (self._fds[1], self.out), self._fds[1]: (self._fds[0], self.back)}
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            readable, _, _ = select.select([*self._fds, self._stop_fd], [], [], wait_s)
            if self._stop_fd in readable:
                return
            for fd in readable:
                target, direction = ways[fd]
                for packet in _packets(fd):
                    if direction.takes(self._rng):
                        number += 1
                        due = direction.arrives_at(len(packet))
                        heapq.heappush(under_way, (due, number, target, packet, direction))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, packet, direction = heapq.heappop(under_way)
                if not direction.is_cut:  # a cut also takes what is under way
                    direction.num_bytes += len(packet)
                    with suppress(OSError):  # the device is down
                        os.write(target, packet)


class Cable:
    """Joins two namespaces by a pair of Ethernet devices. Its cut is seen at both ends at once."""

    def __init__(self, first: Namespace, second: Namespace, addresses: tuple[str, str]) -> None:
        self._first, self._second, self._addresses = first, second, addresses
        first.run("ip", "link", "add", "name", LINK, "type", "veth", "peer", "name", LINK, "netns", second.path)
        for namespace, own, other in zip((first, second), addresses, reversed(addresses), strict=True):
            namespace.run("ip", "addr", "add", own, "peer", other, "dev", LINK)
            namespace.run(*f"tc qdisc add dev {LINK} root tbf rate {RATE * 8:.0f} burst 64kb latency 500ms".split())
        self.restore()

    def cut(self) -> None:
        self._second.run("ip", "link", "set", "dev", LINK, "down")
        self._first.run("ip", "link", "set", "dev", LINK, "down")

    def restore(self) -> None:
        for namespace in (self._first, self._second):
            namespace.run("ip", "link", "set", "dev", LINK, "up")

    def close(self) -> None:
        """It goes with the namespaces."""


class Network:
    """Namespace `near`, which this process reaches too, and `far` behind a link. Use it as a context manager."""

    def __init__(self) -> None:
        number = os.getpid() % 2**18 * 8 + next(_numbers) % 8  # each has four addresses of 10.128.0.0/9
        start = 0x0A800000 + 4 * number
        here, self.near_address, self.far_address = (
            ".".join(map(str, (start + offset).to_bytes(4, "big"))) for offset in (1, 2, 3)
        )
        self.near, self.far = Namespace(), Namespace()
        self._device = f"pd{number}"
        inner = ("peer", "name", "client", "netns", self.near.path)
        _run("ip", "link", "add", self._device, "type", "veth", *inner)
        _run("ip", "addr", "add", here, "peer", self.near_address, "dev", self._device)
        self.near.run("ip", "addr", "add", self.near_address, "peer", here, "dev", "client")
        _run("ip", "link", "set", self._device, "up")
        self.near.run("ip", "link", "set", "client", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def addresses(self) -> tuple[str, str]:
        return self.near_address, self.far_address

    def close(self) -> None:
        with suppress(OSError):
            _run("ip", "link", "delete", self._device)
        self.near.close()
        self.far.close()


def why_not() -> str | None:
    """Why no such network can be made here; None if it can."""
    try:
        with Network() as network:
            Link(network.near, network.far, network.addresses, seed=0).close()
    except OSError as error:
        return f"no network namespaces or TUN devices here: {error}"
    return None


def _open_tun() -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", LINK.encode(), _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _packets(fd: int) -> list[bytes]:
    packets: list[bytes] = []
    while len(packets) < 64:
        try:
            packets.append(os.read(fd, 65536))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EIO):  # EIO: the device is down
                raise
            break
    return packets


def _unshared() -> int:
    _check(_libc.unshare(_CLONE_NEWNET), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], _Result]) -> _Result:
    """In a thread that ends with it: a namespace entered is left for certain."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if ran.returncode != 0:
        raise OSError(f"{' '.join(command)}: {ran.stderr.strip()}")
