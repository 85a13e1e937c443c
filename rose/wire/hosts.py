"""Hosts as they stand in URLs."""

from __future__ import annotations


def in_url(host: str) -> str:
    """``host`` in a URL: an IPv6 address has brackets there, a name and an IPv4 address are as they are."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
