"""`python -m dlrover_run.master`: the master's command line and its process, from the flags to the exit code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import itertools
import json
import logging
import os
import resource
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dlrover_run import exit_codes
from dlrover_run.command_line import credentials, lookup, values
from dlrover_run.command_line.rdzv_conf import RdzvConf
from dlrover_run.command_line.values import FlagValue
from dlrover_run.coordination.rules import JobRules
from dlrover_run.master.server import IdleShutdown
from dlrover_run.process_tree import ends, event_loop, signals, tree
from dlrover_run.spec import SpecError, TlsSpec
from dlrover_run.transport.addresses import join_address


@dataclass(frozen=True)
class Options:
    """What a master was asked for. `idle_timeout` None serves for ever; `ready_fd` and `report_fd` -1 tell nobody;
    `parent_pipe_fd` -1 is bound to nobody's life. `warnings` are sentences about what was given."""

    host: str
    port: int
    state_dir: Path | None = None
    idle_timeout: float | None = None
    token: str = field(default="", repr=False)
    tls: TlsSpec | None = None
    ready_fd: int = -1
    report_fd: int = -1
    parent_pipe_fd: int = -1
    warnings: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """HOST:PORT as gRPC takes it."""
        return join_address(self.host, self.port)


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
    add("--token-file", metavar="FILE", help="a file with the token that nodes must have")
    add("--token-fd", metavar="N", help="an inherited descriptor to read the token from")
    add("--tls-ca", metavar="FILE", help="accept only nodes with a certificate of this authority (PEM)")
    add("--tls-cert", metavar="FILE", help="the master's certificate (PEM), for an encrypted connection")
    add("--tls-key", metavar="FILE", help="the private key of --tls-cert (PEM)")
    add("--auth-required", action="store_true", help="refuse to run without a token or --tls-ca")
    add("--ready-fd", metavar="N", help="an inherited descriptor that gets one line of JSON when the master listens")
    add("--report-fd", metavar="N", help="an inherited descriptor that gets the lines about the node check")
    add("--parent-pipe-fd", metavar="N", help="an inherited descriptor of a parent-death pipe: the master ends with it")
    return parser


def ready_fd_of(args: Sequence[str]) -> int:
    """The descriptor of `--ready-fd`, -1 for none, which also gets the errors of the rest of the command line."""
    for flag, value in itertools.pairwise(args):
        if flag == "--ready-fd" and value.isascii() and value.isdigit():
            return int(value)
    return -1


def read_options(args: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line. Raises SpecError, and SystemExit after `--help`."""
    given = _parser().parse_args(list(args))
    host, port = values.endpoint("--listen", given.listen, 0)
    conf = RdzvConf(
        rules=JobRules(),
        token_file=_file("--token-file", given.token_file),
        tls_ca=_file("--tls-ca", given.tls_ca),
        tls_cert=_file("--tls-cert", given.tls_cert),
        tls_key=_file("--tls-key", given.tls_key),
    )
    if given.token_fd is None:
        token = credentials.find_token(conf, environ)
    else:
        token = _read_token(values.integer("--token-fd", given.token_fd, 0))
    tls = credentials.master_tls(conf)
    if tls is not None and tls.cert is None:
        raise SpecError("--tls-ca needs --tls-cert and --tls-key: without them nothing is encrypted.")
    if given.auth_required and not token and (tls is None or tls.ca is None):
        raise SpecError(
            "--auth-required, and the master has no credentials to check: set DLROVER_RDZV_TOKEN or "
            "DLROVER_RDZV_TOKEN_FILE, or give --token-file, or --tls-ca with --tls-cert and --tls-key."
        )
    return Options(
        host=host,
        port=port,
        state_dir=None if given.state_dir is None else _state_dir(given.state_dir),
        idle_timeout=None
        if given.idle_timeout is None
        else values.seconds("--idle-timeout", given.idle_timeout, zero_allowed=False),
        token=token,
        tls=tls,
        ready_fd=_descriptor("--ready-fd", given.ready_fd),
        report_fd=_descriptor("--report-fd", given.report_fd),
        parent_pipe_fd=_descriptor("--parent-pipe-fd", given.parent_pipe_fd),
        warnings=() if given.token_fd is not None else tuple(credentials.token_warnings(token, conf, environ)),
    )


def _descriptor(source: str, number: str | None) -> int:
    return -1 if number is None else values.integer(source, number, 0)


def _file(source: str, path: str | None) -> FlagValue | None:
    return None if path is None else FlagValue(source, path)


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


def _state_dir(path: str) -> Path:
    lookup.check_directory("--state-dir", path)
    directory = Path(lookup.absolute(path))
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--state-dir {path!r} cannot be created ({error.strerror}): give another path.") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise SpecError(f"--state-dir {path!r} is not writable for this user: give another path.")
    return directory


_LOG_FD = 2

_ASKED_WITH = (signal.SIGTERM, signal.SIGINT)
"""The signals that end a master."""


def main(args: Sequence[str]) -> int:
    """Run a master; returns its exit code."""
    _open_standard_streams()
    # A terminal ends the master of a person.
    signals.ignore({*_ASKED_WITH, signal.SIGHUP, signal.SIGQUIT})
    ready_fd = ready_fd_of(args)
    try:
        options = read_options(args, os.environ)
        ready_fd = options.ready_fd
        credentials.scrub_environment()
        if _belongs_to_job(options):
            # It shall not be ended by its job's script's name.
            tree.name_process(tree.MASTER_NAME)
            # What a scheduler sends to every process of a job step is not for it.
            # A master with a parent-death pipe ends with that: its parent gets such a signal too, and would take a
            # master that ends before it does for one that has failed.
            signals.ignore(() if options.parent_pipe_fd >= 0 else _ASKED_WITH)
        # A launcher starts its master with signals blocked.
        signals.release()
        return event_loop.run(_serve(options))
    except SpecError as mistake:
        return _fail(ready_fd, str(mistake), exit_codes.BAD_COMMAND_LINE)
    except OSError as error:
        return _fail(ready_fd, str(error), exit_codes.CANNOT_START)


def _belongs_to_job(options: Options) -> bool:
    """Whether a launcher started this master, for the nodes of one job."""
    return options.idle_timeout is not None or options.parent_pipe_fd >= 0


def say(text: str) -> None:
    """Print one line. It is dropped if the reader is slow or gone, because serving must not block."""
    _write_line(_LOG_FD, f"dlrover-master: {text}")


def _write_line(fd: int, text: str) -> None:
    # Part of the text comes from nodes, and must not control a terminal.
    line = "".join(char if char.isprintable() else "?" for char in text) + "\n"
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [fd], [], 0)[1]:
            os.write(fd, line.encode(errors="replace"))


def _open_report(fd: int) -> Callable[[str], None]:
    """A function that writes lines to the process that started this master, which may be gone or slow."""
    if fd < 0:
        return lambda line: None
    with contextlib.suppress(OSError):
        os.set_blocking(fd, False)
    return partial(_write_line, fd)


async def _serve(options: Options) -> int:
    # What goes wrong in a stream is said in our own words, once.
    logging.getLogger("grpc").setLevel(logging.CRITICAL + 1)
    from dlrover_run.master.server import MasterServer

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str] = loop.create_future()

    def end(reason: str) -> None:
        if not ended.done():
            ended.set_result(reason)

    def ask(reason: str) -> None:
        """End on a signal: a master of a job only after its nodes, which a scheduler signals together with it."""
        if _belongs_to_job(options) and not server.jobs.empty:
            idleness.ask(reason)
            look()
        else:
            end(reason)

    def look() -> None:
        idleness.look(server.jobs.lines, server.jobs.empty and server.jobs.last_one_over)

    if options.parent_pipe_fd >= 0:
        ends.watch_pipe(options.parent_pipe_fd, lambda: end("whoever started it is gone"))
    _allow_many_files()
    idleness = IdleShutdown(options.idle_timeout, end)
    server = MasterServer(
        options.token,
        options.state_dir,
        say,
        look,
        _open_report(options.report_fd),
    )
    if options.parent_pipe_fd < 0:
        for number in _ASKED_WITH:
            loop.add_signal_handler(number, ask, f"{number.name} came")
    is_open = _reachable_from_outside(options)
    tls = None if options.tls is None else _server_credentials(server.grpc, options.tls)
    try:
        port = await server.start(options.address, tls)
    except OSError as error:
        raise OSError(_why_not_bound(options, error)) from None
    address = join_address(options.host, port)
    say(f"listens on {address}")
    for sentence in options.warnings:
        say(f"warning: {sentence}")
    if is_open and not options.token and tls is None:
        say(
            "warning: whoever reaches this address can join a job, for there is neither a token nor TLS "
            "(set DLROVER_RDZV_TOKEN on the master and on every node)"
        )
    _tell_ready(options.ready_fd, {"address": options.host, "port": port})
    idleness.look(0, False)
    reason = await ended
    say(f"ends: {reason}")
    await server.stop(f"the master ends: {reason}")
    return exit_codes.SUCCESS


def _server_credentials(grpc: Any, files: TlsSpec) -> Any:
    import ssl

    assert files.cert is not None, "a master without a certificate has no TLS"
    assert files.key is not None, "the certificate has a key"
    try:
        # gRPC would only say that the handshake failed, and only to the nodes.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.cert, files.key, password=lambda: b"")
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"--tls-cert, --tls-key or --tls-ca cannot be used: {error}.") from None
    ca = None if files.ca is None else Path(files.ca).read_bytes()
    pair = (Path(files.key).read_bytes(), Path(files.cert).read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def _addresses(options: Options) -> list[tuple[Any, ...]]:
    try:
        return socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(
            f"--listen {options.address!r}: {options.host} is no address of this machine ({error.strerror})"
        ) from None


def _reachable_from_outside(options: Options) -> bool:
    return not all(ipaddress.ip_address(address[4][0].partition("%")[0]).is_loopback for address in _addresses(options))


def _why_not_bound(options: Options, error: OSError) -> str:
    """The reason from the kernel, because gRPC gives none."""
    reason = str(error)
    for family, kind, protocol, _, address in _addresses(options):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen()
            except OSError as why:
                reason = why.strerror or str(why)
    return f"--listen {options.address!r}: cannot listen there ({reason}); give an address of this machine that is free"


def _tell_ready(fd: int, message: dict[str, Any]) -> None:
    if fd < 0:
        return
    # The process that waited for it may be gone.
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(message).encode() + b"\n")
    with contextlib.suppress(OSError):
        os.close(fd)


def _fail(ready_fd: int, sentence: str, code: int) -> int:
    say(sentence)
    _tell_ready(ready_fd, {"error": sentence, "mistaken": code == exit_codes.BAD_COMMAND_LINE})
    return code


def _allow_many_files() -> None:
    """Raise the limit on descriptors: each node takes one, and the usual limit of 1024 is lower than allowed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open_standard_streams() -> None:
    """Have something at 0, 1 and 2, or else a connection becomes the standard error that lines are written to."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
