"""Whether a server uses TLS: probed where it closes each connection, as etcd does if only one side uses TLS.

Nothing is sent but the beginning of a connection, so no certificate is checked.
"""

from __future__ import annotations

import asyncio
import ssl

from dlrover_run.transport.addresses import Address

PROBE_TIMEOUT = 3.0
"""Seconds for one probe."""

_SETTINGS = 4
"""The type of the first frame that each side of an HTTP/2 connection sends."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
_FRAME_HEADER = 9


async def answers_with_tls(address: Address) -> bool:
    """Whether the server takes part in a TLS handshake, even if it then demands a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    writer.transport.abort()
    return True


async def answers_without_tls(address: Address) -> bool:
    """Whether the server answers in HTTP/2, which gRPC uses, without TLS."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(_PREFACE)
                header = await reader.readexactly(_FRAME_HEADER)
            finally:
                writer.transport.abort()
    except (OSError, EOFError):
        return False
    return header[3] == _SETTINGS
