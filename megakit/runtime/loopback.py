"""Prepares the loopback interface, over which gloo communicates even within one process."""

import fcntl
import socket
import struct

from megakit.errors import UserError

_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


def ensure_loopback() -> None:
    """Brings `lo` up if it is down, as in a new network namespace.

    Raises:
        UserError: `lo` is down, and this process may not bring it up.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH14x", b"lo", 0)
        try:
            reply = fcntl.ioctl(control, _GET_FLAGS, request)
            flags: int = struct.unpack("16sH14x", reply)[1]
            if not flags & _IS_UP:
                fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _IS_UP))
        except OSError as error:
            raise UserError(
                f"the loopback interface lo is down ({error.strerror}), and processes communicate "
                "over it. Bring it up: ip link set lo up."
            ) from error


def reserve_port() -> socket.socket:
    """Reserves a port of this machine until the returned socket is closed.

    Rank 0 listens at the port some seconds after the port was chosen. Meanwhile, the kernel
    gives the port to no process that asks for any free port. A server that sets SO_REUSEADDR can
    listen at it, and torch's `TCPStore` does.

    Returns:
        A socket that is bound to the port and does not listen; `port_of` returns the port.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def port_of(bound: socket.socket) -> str:
    """Returns the port that a socket is bound to, as in MASTER_PORT."""
    return str(bound.getsockname()[1])
