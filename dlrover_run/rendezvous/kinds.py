"""The four kinds of rendezvous, of which a job has one: where its coordination state is kept, and by which credentials
this node reaches it.

`backends.TABLE` has the backends by their names. Code outside of this package asks a kind for what it means, never for
the name of a backend.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dlrover_run.words.text import join_address

DEFAULT_PREFIX = "/dlrover-run"
"""The path of all keys in a store."""


class TlsSpec(msgspec.Struct, frozen=True):
    """The files (PEM) for TLS with the master or with etcd.

    `ca` is the authority that signed the peer's certificate; `cert` and `key` are this side's own. A master with a `ca`
    accepts only nodes with a certificate of that authority.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class Kind(msgspec.Struct, frozen=True):
    """What the four have in common: the answers to questions about any job.

    `alone`: the job has one node, which keeps the state. `ranked`: flags give each node its rank, and the nodes do not
    communicate. `coordinated`: the nodes communicate, so that each learns of the others. `hosted`: a master has the
    state, which may run on a node. `leased`: the state is in a store, where a lease ends with its node.
    """

    alone: ClassVar[bool] = False
    ranked: ClassVar[bool] = False
    coordinated: ClassVar[bool] = False
    hosted: ClassVar[bool] = False
    leased: ClassVar[bool] = False

    @property
    def backend(self) -> str:
        """The name of the backend: the key of its row in `backends.TABLE`."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        """Where the nodes meet, as HOST:PORT; empty where they do not meet in one place."""
        return ""

    @property
    def secret(self) -> str:
        """What all nodes of the job, and no others, know; empty for none."""
        return ""

    def __repr__(self) -> str:
        """Without secrets, as logs and tracebacks show it."""
        fields = (name for name in self.__struct_fields__ if name not in ("token", "password"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"


class Alone(Kind, frozen=True, tag="alone"):
    """One node, whose agent decides for itself."""

    alone: ClassVar[bool] = True

    @property
    def backend(self) -> str:
        return "memory"


class Static(Kind, frozen=True, tag="static"):
    """Ranks that flags give. The workers meet at `store`, an address and a port on node 0."""

    store: tuple[str, int]

    ranked: ClassVar[bool] = True

    @property
    def backend(self) -> str:
        return "static"


class Master(Kind, frozen=True, tag="master"):
    """The built-in master of a job, and the credentials of this node.

    `is_host` means that this node starts the master if there is none; None decides by whether `host` is an address of
    this machine. `hosts` are all nodes of the job if its cluster lists them, that of the endpoint first. `bind` is the
    address on which a master of this node listens, None for the endpoint's. `state_dir` is where it keeps its journals.
    `token` is the job's secret, empty for none; `auth_required` refuses to run without credentials. `web` is where it
    also serves the status over HTTP, as [HOST:]PORT.
    """

    host: str
    port: int
    is_host: bool | None = None
    hosts: tuple[str, ...] = ()
    bind: str | None = None
    state_dir: str | None = None
    web: str | None = None
    token: str = ""
    auth_required: bool = False
    tls: TlsSpec | None = None

    coordinated: ClassVar[bool] = True
    hosted: ClassVar[bool] = True

    @property
    def backend(self) -> str:
        return "master"

    @property
    def endpoint(self) -> str:
        return join_address(self.host, self.port)

    @property
    def secret(self) -> str:
        return self.token


class Store(Kind, frozen=True, tag="store"):
    """The members of a store, as (host, port), and the credentials of this node. `name` is that of its backend.

    All keys of the job are below `prefix`. `tls` None means no encryption; without a `ca` the authorities of the system
    are used.
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str = DEFAULT_PREFIX
    user: str = ""
    password: str = ""
    tls: TlsSpec | None = None
    name: str = "etcd"

    coordinated: ClassVar[bool] = True
    leased: ClassVar[bool] = True

    @property
    def backend(self) -> str:
        return self.name


Rendezvous = Alone | Static | Master | Store
