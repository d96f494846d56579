"""How the place of a server is written."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """HOST:PORT, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
