"""Hosts as they stand in URLs, and what this one is called."""

from __future__ import annotations

import ipaddress
import re
import socket


def in_url(host: str) -> str:
    """``host`` in a URL: an IPv6 address has brackets there, a name and an IPv4 address are as they are."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def to_call(host: str) -> str:
    """Where a caller on this host finds what listens on ``host``: on the loopback, where that is every address."""
    try:
        address = ipaddress.ip_address(host or "0.0.0.0")
    except ValueError:  # a name
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def host_name() -> str:
    """This host's, or this container's, as it calls itself; "": by no name that could be part of another."""
    name = socket.gethostname()
    return name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) else ""
