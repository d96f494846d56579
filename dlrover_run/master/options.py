"""The master's command line: flags and secrets, read and checked, become one frozen record."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from dlrover_run.command_line import credentials, flags, lookup
from dlrover_run.command_line.flags import Given
from dlrover_run.command_line.rendezvous_conf import RendezvousConf
from dlrover_run.coordination.rules import Rules
from dlrover_run.spec import SpecError, TlsSpec
from dlrover_run.wire.address import join_address


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
    add("--listen", required=True, metavar="HOST:PORT", help="the one address to listen on; port 0 takes a free one")
    add("--state-dir", metavar="DIR", help="keep the plan of each job here, so that a successor can go on")
    add("--idle-timeout", metavar="S", help="end after S seconds without a node, and at once after the last job")
    add("--token-file", metavar="FILE", help="a file with the token that nodes have to know")
    add("--token-fd", metavar="N", help="an inherited descriptor to read the token from")
    add("--tls-ca", metavar="FILE", help="let only nodes in with a certificate that this one (PEM) has signed")
    add("--tls-cert", metavar="FILE", help="the master's certificate (PEM), for an encrypted connection")
    add("--tls-key", metavar="FILE", help="the key to it (PEM)")
    add("--auth-required", action="store_true", help="refuse to run without a token or certificates of the nodes")
    add("--ready-fd", metavar="N", help="an inherited descriptor to write one line of JSON to once the master listens")
    add("--report-fd", metavar="N", help="an inherited descriptor to write lines to that say how nodes were checked")
    add("--parent-pipe-fd", metavar="N", help="an inherited descriptor at whose end the master ends")
    return parser


def ready_fd_of(args: Sequence[str]) -> int:
    """The descriptor that `--ready-fd` names, -1 for none: it is told of any other mistake in the command line."""
    for flag, value in itertools.pairwise(args):
        if flag == "--ready-fd" and value.isascii() and value.isdigit():
            return int(value)
    return -1


def read_options(args: Sequence[str], environ: Mapping[str, str]) -> Options:
    """What a command line asks for. Raises SpecError, and SystemExit after `--help`."""
    given = _parser().parse_args(list(args))
    host, port = flags.endpoint("--listen", given.listen, 0)
    conf = RendezvousConf(
        rules=Rules(),
        token_file=_file("--token-file", given.token_file),
        tls_ca=_file("--tls-ca", given.tls_ca),
        tls_cert=_file("--tls-cert", given.tls_cert),
        tls_key=_file("--tls-key", given.tls_key),
    )
    if given.token_fd is None:
        token = credentials.find_token(conf, environ)
    else:
        token = _read_token(flags.whole_number("--token-fd", given.token_fd, 0))
    tls = credentials.find_tls(conf)
    if tls is not None and tls.cert is None:
        raise SpecError("--tls-ca needs --tls-cert and --tls-key: without them nothing is encrypted.")
    if given.auth_required and not token and (tls is None or tls.ca is None):
        raise SpecError(
            "--auth-required, and there is nothing that nodes could prove: set DLROVER_RDZV_TOKEN or "
            "DLROVER_RDZV_TOKEN_FILE, or give --token-file, or --tls-ca with --tls-cert and --tls-key."
        )
    return Options(
        host=host,
        port=port,
        state_dir=None if given.state_dir is None else _state_dir(given.state_dir),
        idle_timeout=None
        if given.idle_timeout is None
        else flags.seconds("--idle-timeout", given.idle_timeout, zero_allowed=False),
        token=token,
        tls=tls,
        ready_fd=_descriptor("--ready-fd", given.ready_fd),
        report_fd=_descriptor("--report-fd", given.report_fd),
        parent_pipe_fd=_descriptor("--parent-pipe-fd", given.parent_pipe_fd),
        warnings=() if given.token_fd is not None else tuple(credentials.weaknesses_of_token(token, conf, environ)),
    )


def _descriptor(place: str, number: str | None) -> int:
    return -1 if number is None else flags.whole_number(place, number, 0)


def _file(place: str, path: str | None) -> Given | None:
    return None if path is None else Given(place, path)


def _read_token(fd: int) -> str:
    try:
        with open(fd, "rb") as file:
            token = file.read(4 * credentials.LONGEST_SECRET).decode().rstrip("\r\n")
    except OSError as error:
        raise SpecError(f"--token-fd {fd} cannot be read ({error.strerror}): name an inherited descriptor.") from None
    except UnicodeDecodeError:
        raise SpecError(f"--token-fd {fd} is not text: a token is UTF-8.") from None
    if not token:
        raise SpecError(f"--token-fd {fd} holds an empty token: write a secret text to it, or leave it out.")
    return token


def _state_dir(path: str) -> Path:
    lookup.find_directory("--state-dir", path)
    directory = Path(lookup.absolute(path))
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--state-dir {path!r} cannot be made ({error.strerror}): name another one.") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise SpecError(f"--state-dir {path!r} cannot be written to by this user: name another one.")
    return directory
