"""Network interfaces of this host (Linux, IPv4): which one leads to a peer, and its address."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, None if it has none or does not exist."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_towards(host: str) -> str | None:
    """The interface that packets to `host` leave by, None if there is no IPv4 way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # a datagram socket: nothing is sent
        except OSError:
            return None
        address = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if address_of(name) == address:
            return name
    return None
