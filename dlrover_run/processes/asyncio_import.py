"""Importing asyncio for a process whose event loop has no connections with TLS."""

from __future__ import annotations

import sys


def import_asyncio_without_tls() -> None:
    """Import asyncio as it is where Python was built without `ssl`, which takes longer than all else that it imports.

    An agent calls it unless it reaches a store over HTTPS, and a master unless it serves the web page: TLS between
    nodes and a master is gRPC's own. Both call it before they import what imports asyncio. Others may import `ssl`
    afterwards.
    """
    if "ssl" in sys.modules or "asyncio" in sys.modules:
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]  # The import system then raises ImportError.
    try:
        import asyncio  # noqa: F401
    finally:
        del sys.modules["ssl"]
