"""`python -m dlrover_run.master`: the master's command line and its process, from the flags to the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlrover_run import exit_codes, linux
from dlrover_run.command_line import checks, credentials, values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.rounds.quorum import LostMaster
from dlrover_run.master.server import IdleShutdown
from dlrover_run.processes import event_loop, signals, tree
from dlrover_run.rendezvous import kinds
from dlrover_run.spec import FlagValue, SpecError
from dlrover_run.transport.addresses import Address, bind_error
from dlrover_run.words.text import join_address
from dlrover_run.workers.template import process_title

if TYPE_CHECKING:
    from dlrover_run.master.web import MasterWeb

SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Options:
    """The settings of a master. `idle_timeout` None serves for ever; a descriptor of -1 is not used. `web` is where the
    status is served over HTTP. `lost` is for the successor of a master on another machine (see `Coordinator`).
    `warnings` are sentences about the command line."""

    host: str
    port: int
    state_dir: Path | None = None
    idle_timeout: float | None = None
    web: tuple[str, int] | None = None
    token: str = field(default="", repr=False)
    tls: kinds.TlsSpec | None = None
    ready_fd: int = -1
    report_fd: int = -1
    parent_pipe_fd: int = -1
    lost: LostMaster | None = None
    warnings: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """HOST:PORT as gRPC takes it."""
        return join_address(self.host, self.port)

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this master, for the nodes of one job."""
        return self.idle_timeout is not None or self.parent_pipe_fd >= 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecError(f"{message} (see python -m dlrover_run.master --help).")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dlrover_run.master",
        allow_abbrev=False,
        description="Serve the rendezvous of any number of jobs. A job's token comes from DLROVER_RDZV_TOKEN, from the "
        "file that DLROVER_RDZV_TOKEN_FILE names, or from --token-file.",
    )
    add = parser.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="the address to listen on; port 0 takes a free port")
    add("--state-dir", metavar="DIR", help="directory of the journals, with which a new master continues the jobs")
    add("--idle-timeout", metavar="S", help="end after S seconds without a node, and immediately after the last job")
    add("--web", metavar="[HOST:]PORT", help="also serve the status of the jobs over HTTP there; loopback without HOST")
    add("--token-file", metavar="FILE", help="a file with the token that nodes must have")
    add("--token-fd", metavar="N", help="an inherited descriptor to read the token from")
    add("--tls-ca", metavar="FILE", help="accept only nodes with a certificate of this authority (PEM)")
    add("--tls-cert", metavar="FILE", help="the master's certificate (PEM), for an encrypted connection")
    add("--tls-key", metavar="FILE", help="the private key of --tls-cert (PEM)")
    add("--auth-required", action="store_true", help="refuse to run without a token or --tls-ca")
    add("--ready-fd", metavar="N", help="an inherited descriptor that gets one line of JSON when the master listens")
    add("--report-fd", metavar="N", help="an inherited descriptor that gets the lines for the user of this node")
    add("--succeeds", metavar="N,M", help="take over from a master elsewhere that had N nodes, M of which have ended")
    add("--parent-pipe-fd", metavar="N", help="an inherited descriptor of a parent-death pipe: the master ends with it")
    return parser


def parse_ready_fd(args: Sequence[str]) -> int:
    """The descriptor of `--ready-fd`, -1 for none: it also gets the errors of the rest of the command line."""
    for flag, value in itertools.pairwise(args):
        if flag == "--ready-fd" and value.isascii() and value.isdigit():
            return int(value)
    return -1


def read_options(args: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line. Raises SpecError, and SystemExit after `--help`."""
    given = vars(_parser().parse_args(list(args)))

    def file(flag: str) -> FlagValue | None:
        path = given[flag.strip("-").replace("-", "_")]
        return None if path is None else FlagValue(flag, path)

    def descriptor(flag: str) -> int:
        number = file(flag)
        return -1 if number is None else values.integer(flag, number.text, 0)

    host, port = values.endpoint("--listen", given["listen"], 0)
    conf = RdzvConf(
        rules=JobRules(),
        token_file=file("--token-file"),
        tls_ca=file("--tls-ca"),
        tls_cert=file("--tls-cert"),
        tls_key=file("--tls-key"),
    )
    token_fd = descriptor("--token-fd")
    token = credentials.read_token(conf, environ) if token_fd < 0 else _read_token(token_fd)
    tls = credentials.read_tls(conf, credentials.MASTER_TLS)
    if tls is not None and tls.cert is None:
        raise SpecError("--tls-ca needs --tls-cert and --tls-key: without them nothing is encrypted.")
    if given["auth_required"] and not token and (tls is None or tls.ca is None):
        raise SpecError(
            "--auth-required, and the master has no credentials to check: set DLROVER_RDZV_TOKEN or "
            "DLROVER_RDZV_TOKEN_FILE, or give --token-file, or --tls-ca with --tls-cert and --tls-key."
        )
    idle, state_dir = given["idle_timeout"], given["state_dir"]
    return Options(
        host=host,
        port=port,
        state_dir=None if state_dir is None else _make_state_dir(state_dir),
        idle_timeout=None if idle is None else values.seconds("--idle-timeout", idle, zero_allowed=False),
        web=None if given["web"] is None else _web_address(given["web"], token),
        token=token,
        tls=tls,
        ready_fd=descriptor("--ready-fd"),
        report_fd=descriptor("--report-fd"),
        parent_pipe_fd=descriptor("--parent-pipe-fd"),
        lost=None if given["succeeds"] is None else _lost_master(given["succeeds"]),
        warnings=() if token_fd >= 0 else tuple(credentials.token_warnings(token, conf, environ)),
    )


def _web_address(text: str, token: str) -> tuple[str, int]:
    """The address of `--web`. Raises SpecError, also if any machine could read what only this one may."""
    host, port = values.endpoint("--web", f"127.0.0.1:{text}" if text.isdecimal() else text, 0)
    if not token and host not in ("localhost", "127.0.0.1", "::1"):
        raise SpecError(f"--web {text}: on another address than localhost it needs a token; set DLROVER_RDZV_TOKEN.")
    return host, port


def _lost_master(text: str) -> LostMaster:
    """The value of `--succeeds`, which launchers give. Raises SpecError."""
    nodes, _, ended = text.partition(",")
    return LostMaster(values.integer("--succeeds", nodes, 0), values.integer("--succeeds", ended, 0))


def _read_token(fd: int) -> str:
    try:
        with open(fd, "rb") as file:
            token = file.read(4 * credentials.MAX_SECRET_LENGTH).decode().rstrip("\r\n")
    except OSError as error:
        raise SpecError(f"--token-fd {fd} cannot be read ({error.strerror}): name an inherited descriptor.") from None
    except UnicodeDecodeError:
        raise SpecError(f"--token-fd {fd} is not text: a token must be UTF-8.") from None
    if not token:
        raise SpecError(f"--token-fd {fd} contains an empty token: write a secret text to it, or leave it out.")
    return token


def _make_state_dir(path: str) -> Path:
    checks.check_directory("--state-dir", path)
    directory = Path(os.path.abspath(path))
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--state-dir {path!r} cannot be created ({error.strerror}): give another path.") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise SpecError(f"--state-dir {path!r} is not writable for this user: give another path.")
    return directory


def main(args: Sequence[str]) -> int:
    tree.open_standard_streams()
    # A signal of a terminal (SIGHUP, SIGQUIT) ends a master that a user has started.
    signals.ignore({*SHUTDOWN_SIGNALS, signal.SIGHUP, signal.SIGQUIT})
    ready_fd = parse_ready_fd(args)
    try:
        options = read_options(args, os.environ)
        ready_fd = options.ready_fd
        credentials.scrub_environment()
        if options.is_launched:
            # So that a `pkill` of the job's script does not match it.
            process_title.name_process(tree.MASTER_NAME)
            # It ignores the signals that a scheduler sends to every process of a job step. A master with a parent-death
            # pipe ends with its parent: the parent gets the signal too, and would report a master that ends first as
            # failed.
            signals.ignore(() if options.parent_pipe_fd >= 0 else SHUTDOWN_SIGNALS)
        # A launcher starts its master with signals blocked.
        signals.release()
        return event_loop.run(_serve(options))
    except (SpecError, OSError) as error:
        is_user_error = isinstance(error, SpecError)
        log(str(error))
        _send_ready(ready_fd, {"error": str(error), "is_user_error": is_user_error})
        return exit_codes.BAD_COMMAND_LINE if is_user_error else exit_codes.CANNOT_START


def log(text: str) -> None:
    """Print one line. It is dropped if the reader is slow or gone, because serving must not block."""
    _write_line(2, f"dlrover-master: {text}")


def _write_line(fd: int, text: str) -> None:
    # Part of the text comes from nodes, and must not control a terminal.
    line = "".join(char if char.isprintable() else "?" for char in text) + "\n"
    # There is no descriptor (-1), or its reader is slow or gone.
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, line.encode(errors="replace"))


async def _serve(options: Options) -> int:
    # Failures of a stream are logged in our own words, once.
    logging.getLogger("grpc").setLevel(logging.CRITICAL + 1)
    from dlrover_run.master.server import MasterServer

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def end(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    def on_signal(reason: str) -> None:
        """End on a signal: a launched master only after its nodes, to which a scheduler sends the signal too."""
        if options.is_launched and not server.jobs.empty:
            idle_shutdown.request(reason)
            on_change()
        else:
            end(reason)

    def on_change() -> None:
        idle_shutdown.follow(server.jobs)

    if options.parent_pipe_fd >= 0:
        event_loop.watch_pipe(options.parent_pipe_fd, lambda: end("the process that started it has ended"))
    # Each node takes a descriptor.
    linux.raise_descriptor_limit()
    idle_shutdown = IdleShutdown(options.idle_timeout, end)
    log_to_launcher = partial(_write_line, options.report_fd)
    with contextlib.suppress(OSError):
        os.set_blocking(options.report_fd, False)
    server = MasterServer(
        options.token,
        options.state_dir,
        log,
        on_change,
        log_to_launcher,
        # The machine of a master that a node has started may be lost with it.
        names_successors=options.idle_timeout is not None and options.parent_pipe_fd < 0,
        lost=options.lost,
    )
    if options.parent_pipe_fd < 0:
        for number in SHUTDOWN_SIGNALS:
            loop.add_signal_handler(number, on_signal, f"received {number.name}")
    addresses = _addresses(options)
    tls = None if options.tls is None else _server_credentials(server.grpc, options.tls)
    try:
        port = await server.start(options.address, tls)
    except OSError as error:
        # The kernel's reason, because gRPC gives none.
        errors = filter(None, map(bind_error, reversed(addresses)))
        reason = next((found.strerror or str(found) for found in errors), str(error))
        raise OSError(
            f"--listen {options.address!r}: cannot listen there ({reason}); give an address of this machine that is "
            "free"
        ) from None
    log(f"listens on {join_address(options.host, port)}")
    web: MasterWeb | None = None
    if options.web is not None:
        # Imported only here: other masters do not wait for it.
        from dlrover_run.master.web import MasterWeb

        context = None if options.tls is None else _tls_context(options.tls)
        web = MasterWeb(server.jobs, options.token, options.web, context, log, log_to_launcher)
        await web.start(options.is_launched)
    for sentence in options.warnings:
        log(f"warning: {sentence}")
    if not options.token and tls is None and not all(address.loopback for address in addresses):
        log(
            "warning: any client that reaches this address can join a job, because neither a token nor TLS is set "
            "(set DLROVER_RDZV_TOKEN on the master and on every node)"
        )
    _send_ready(options.ready_fd, {"address": options.host, "port": port})
    idle_shutdown.follow(server.jobs)
    reason = await ended
    log(f"ends: {reason}")
    await server.stop(f"the master ends: {reason}")
    if web is not None:
        # The endpoint is free already: the next job of that name begins with a master of its own.
        await web.close(lingers=options.is_launched and options.parent_pipe_fd < 0)
    return exit_codes.SUCCESS


def _tls_context(files: kinds.TlsSpec) -> Any:
    """The server's side of TLS. Raises SpecError."""
    import ssl

    assert files.cert is not None, "a master without a certificate has no TLS"
    try:
        # Not the default context, which also opens the file that SSLKEYLOGFILE names.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"--tls-cert, --tls-key or --tls-ca cannot be used: {error}.") from None
    return context


def _server_credentials(grpc: Any, files: kinds.TlsSpec) -> Any:
    # gRPC would report files that cannot be used only as a failed handshake, and only to the nodes.
    _tls_context(files)
    assert files.cert is not None, "a master without a certificate has no TLS"
    assert files.key is not None, "the certificate has a key"
    ca = None if files.ca is None else Path(files.ca).read_bytes()
    pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def _addresses(options: Options) -> list[Address]:
    """The addresses of `--listen`. Raises OSError."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(
            f"--listen {options.address!r}: {options.host} is no address of this machine ({error.strerror})"
        ) from None
    return [Address(family, str(place[0]), int(place[1])) for family, _, _, _, place in found]


def _send_ready(fd: int, message: dict[str, Any]) -> None:
    # The process that waits for it may have ended.
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(message).encode() + b"\n")
    with contextlib.suppress(OSError):
        os.close(fd)
