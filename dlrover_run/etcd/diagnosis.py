"""Why an endpoint of etcd cannot be reached at all: gRPC's words are poor where TLS is involved.

It is found out with a connection of Python's own, on which an HTTP/2 server is greeted as gRPC does it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_run.etcd.endpoints import AddressCache
from dlrover_run.etcd.errors import ETCD, EndpointFailed
from dlrover_run.etcd.operations import EtcdMisconfigured
from dlrover_run.spec import EtcdSpec, TlsSpec
from dlrover_run.transport import grpc_errors
from dlrover_run.transport.addresses import Address, join_address
from dlrover_run.transport.auth import find_ca_file

PROBE_TIMEOUT = 3.0
"""Seconds for all that is tried with one endpoint; after this it counts as one that says nothing. Its name gets as many
before."""

_SETTINGS = 4
"""The type of HTTP/2's frame of settings."""

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 says first: the preface, and a frame of settings without any."""

_HEAD = 9
"""Bytes of the head of a frame, of which the fourth one is its type."""

_FOR_ANOTHER = (62, 64)
"""OpenSSL's numbers for a certificate of another host name or another IP address."""

_NOT_NOW = (9, 10)
"""OpenSSL's numbers for a certificate that is not valid yet, or not any more."""


class _Endpoint(NamedTuple):
    host: str
    port: int
    addresses: Sequence[Address]

    def __str__(self) -> str:
        return join_address(self.host, self.port)


async def examine(spec: EtcdSpec, names: AddressCache) -> dict[str, str]:
    """A clause for each endpoint, HOST:PORT, of which more can be said than that a call failed.

    Raises EtcdMisconfigured for what the person has to change. What is wrong with one endpoint counts only if no other
    one works.
    """
    context = None if spec.tls is None else _context(spec.tls)
    findings = await asyncio.gather(*(_examine(names, *place, spec.tls, context) for place in spec.endpoints))
    mistakes = [finding for finding in findings if isinstance(finding, EtcdMisconfigured)]
    if mistakes and None not in findings:
        raise mistakes[0]
    return {join_address(*place): str(found) for place, found in zip(spec.endpoints, findings, strict=True) if found}


async def _examine(
    names: AddressCache, host: str, port: int, tls: TlsSpec | None, context: ssl.SSLContext | None
) -> EtcdMisconfigured | str | None:
    """What the person has done wrong, else a clause about the endpoint; None where nothing is wrong."""
    try:
        endpoint = _Endpoint(host, port, await names.find(host, port, PROBE_TIMEOUT))
    except EndpointFailed as error:
        return str(error)
    probe = _probe_plain(endpoint) if tls is None or context is None else _probe_tls(endpoint, tls, context)
    try:
        return await asyncio.wait_for(probe, PROBE_TIMEOUT)
    except TimeoutError:
        return ETCD.silent
    except ConnectionRefusedError:
        return grpc_errors.REFUSED
    except OSError as error:
        return f"it cannot be reached ({_reason(error)})"


async def _probe_plain(endpoint: _Endpoint) -> EtcdMisconfigured | str | None:
    if await _speaks_http2(endpoint, None):
        return None
    if await _speaks_tls(endpoint):
        return EtcdMisconfigured(
            f"etcd at {endpoint} speaks TLS: add protocol=https to --rdzv-conf, and cacert=PATH unless this system "
            "trusts who signed its certificate."
        )
    return ETCD.missing


async def _probe_tls(endpoint: _Endpoint, tls: TlsSpec, context: ssl.SSLContext) -> EtcdMisconfigured | str | None:
    try:
        if await _speaks_http2(endpoint, context):
            return None
    except ssl.SSLCertVerificationError as error:
        return EtcdMisconfigured(_distrusted(endpoint, tls, error))
    except ssl.SSLError as error:
        reason = _reason(error)
        # With TLS 1.3 a server looks at our certificate after the handshake, and this comes in place of its greeting.
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            return EtcdMisconfigured(_refused(endpoint, tls))
        if "ALERT" in reason:
            return f"it does not agree with this node on how to speak TLS ({reason})"
    except ConnectionRefusedError:
        raise
    except OSError:
        pass  # So a server ends a handshake that it does not understand.
    if await _speaks_http2(endpoint, None):
        return EtcdMisconfigured(
            f"etcd at {endpoint} does not speak TLS: leave protocol=https, cacert, cert and key out of --rdzv-conf."
        )
    return f"{ETCD.missing}, or no etcd with TLS"


def _distrusted(endpoint: _Endpoint, tls: TlsSpec, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _FOR_ANOTHER:
        return (
            f"The certificate of etcd at {endpoint} is for another name than {endpoint.host}: name the endpoint in "
            "--rdzv-endpoint as its certificate does."
        )
    if error.verify_code in _NOT_NOW:
        return f"The certificate of etcd at {endpoint} is not valid now ({error.verify_message}): have it renewed."
    if tls.ca is None:
        return (
            f"This system does not trust who signed the certificate of etcd at {endpoint}: give that authority's own "
            "with cacert=PATH in --rdzv-conf."
        )
    return f"The certificate of etcd at {endpoint} is not signed by cacert, {tls.ca}: give its authority's with cacert."


def _refused(endpoint: _Endpoint, tls: TlsSpec) -> str:
    if tls.cert is None:
        return (
            f"etcd at {endpoint} demands a certificate of this node: give one that its --trusted-ca-file signed, with "
            "cert=PATH,key=PATH in --rdzv-conf."
        )
    return (
        f"etcd at {endpoint} does not take the certificate of this node, {tls.cert}: give one with cert and key that "
        "its --trusted-ca-file signed and that is valid now."
    )


def _context(tls: TlsSpec) -> ssl.SSLContext:
    """As gRPC sets TLS up. Raises EtcdMisconfigured for files of which that cannot be done."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        authorities = find_ca_file(tls)
        if authorities is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(authorities)
    except OSError as error:
        raise EtcdMisconfigured(
            f"cacert, {tls.ca}, cannot be used ({_reason(error)}): give a file of PEM with the authority's certificate."
        ) from None
    if tls.cert is not None:
        try:
            # A password given here keeps OpenSSL from asking for one at the terminal.
            context.load_cert_chain(tls.cert, tls.key, password="")
        except OSError as error:
            if _reason(error) == "KEY_VALUES_MISMATCH":
                raise EtcdMisconfigured(
                    f"cert, {tls.cert}, and key, {tls.key}, do not belong together: give the key of that certificate."
                ) from None
            raise EtcdMisconfigured(
                f"cert, {tls.cert}, or key, {tls.key}, cannot be used ({_reason(error)}): give files of PEM, and a key "
                "without a password."
            ) from None
    return context


def _reason(error: OSError) -> str:
    """OpenSSL's name for what went wrong, or the system's words."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "OpenSSL cannot read it"
    return error.strerror or str(error)


async def _speaks_http2(endpoint: _Endpoint, context: ssl.SSLContext | None) -> bool:
    """Whether the endpoint answers a greeting with its settings. Raises OSError, of which SSLError is one kind."""
    reader, writer = await _connect(endpoint, context)
    try:
        writer.write(_GREETING)
        head = await reader.readexactly(_HEAD)
        return head[3] == _SETTINGS
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        writer.transport.abort()


async def _speaks_tls(endpoint: _Endpoint) -> bool:
    """Whether the endpoint takes part in a handshake of TLS, whoever it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await _connect(endpoint, context)
    except ssl.SSLError as error:
        return "ALERT" in _reason(error)
    except OSError:
        return False
    writer.transport.abort()
    return True


async def _connect(
    endpoint: _Endpoint, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    name = endpoint.host if context is not None else None
    for address in endpoint.addresses[:-1]:
        try:
            return await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname=name)
        except ssl.SSLError:
            raise
        except OSError:
            continue
    last = endpoint.addresses[-1]
    return await asyncio.open_connection(last.host, last.port, ssl=context, server_hostname=name)
