"""The master's read-only web server: a page, `/metrics`, `/v1/status`, `/v1/events` and `/v1/stacks`.

It takes GET alone, and costs nothing without a request. A client proves the job's token, as a bearer token or as the
password of any user. Without a token it serves the own machine only, and no name but the machine's own, so that a web
page in a browser here cannot reach it under another name.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec

from dlrover_run.background import TimeLimit, wait_for_event
from dlrover_run.features.operate.web.metrics import CONTENT_TYPE, JobFigures, render_metrics
from dlrover_run.features.operate.web.scrapes import SCRAPES, ScrapeTimes
from dlrover_run.job_status.history import JobHistory
from dlrover_run.job_status.questions import StackQuery
from dlrover_run.job_status.status import JobState, JobStatus
from dlrover_run.processes.connection_server import ConnectionServer
from dlrover_run.transport.messages import Answered

MAX_HEAD = 8192
"""Bytes of a request up to its empty line."""

HEAD_TIMEOUT = 5.0
"""Seconds that a client has to send a request, and to read what it was sent."""

MAX_CONNECTIONS = 64
"""Connections at one time; further ones are closed."""

EVENT_INTERVAL = 1.0
"""The least number of seconds between two events of one stream."""

KEEP_ALIVE_INTERVAL = 15.0
"""Seconds without a change after which a stream gets a comment, by which a client that is gone is noticed."""

PAGE = Path(__file__).with_name("page.html")
"""The page that shows a job in a browser. It loads nothing, and gets the events of this server."""

HTML = "text/html; charset=utf-8"
JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain; charset=utf-8"


class JobSource(Protocol):
    """The jobs of a master."""

    def names(self) -> Sequence[str]:
        """The names of all jobs."""
        ...

    def report(self, name: str) -> tuple[JobStatus, JobHistory] | None:
        """The status and the history of a job; None if there is none of that name."""
        ...

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after each change of a job; returns what ends that."""
        ...

    def on_end(self, call: Callable[[JobStatus, JobHistory], None]) -> None:
        """Call that with the last status and history of each job that is over."""
        ...

    async def stacks(self, name: str, query: StackQuery) -> Answered:
        """The stacks of the workers of a job, which its nodes are asked for."""
        ...


class HttpRequest(NamedTuple):
    """The head of a request; the names of headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


class HttpError(Exception):
    """A request that is answered with an error: the status line and a sentence."""

    def __init__(self, status: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def parse_head(data: bytes) -> HttpRequest:
    """The request of a head. Raises HttpError."""
    try:
        first, *lines = data.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, target, protocol = first.split(" ")
        url = urlsplit(target)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        query = {name: texts[-1] for name, texts in parse_qs(url.query).items()}
    except ValueError:
        raise HttpError("400 Bad Request", "not a request") from None
    if not protocol.startswith("HTTP/1."):
        raise HttpError("505 HTTP Version Not Supported", "only HTTP/1.1 is served")
    if method != "GET":
        raise HttpError("405 Method Not Allowed", "only GET is answered")
    return HttpRequest(method, url.path, query, headers)


def check_access(request: HttpRequest, token: str) -> None:
    """Raise HttpError unless the client knows the token, or is on this machine where there is none."""
    if not token:
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if host.strip("[]").lower() not in ("localhost", "127.0.0.1", "::1"):
            raise HttpError("403 Forbidden", "without a token only localhost is served")
        return
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    given = text.strip()
    if kind.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:
            # No base64, no ASCII, or no UTF-8 in it.
            given = ""
    elif kind.lower() != "bearer":
        given = ""
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HttpError("401 Unauthorized", "the job's token is needed, as a bearer token or as a password")


class WebServer:
    """Serves the jobs of `source`."""

    def __init__(self, source: JobSource, token: str) -> None:
        self._source = source
        self._token = token
        self._connections = ConnectionServer(self._answer, MAX_CONNECTIONS)
        self._scrapes = ScrapeTimes()
        self._failed: dict[str, tuple[JobFigures, float]] = {}
        self._scraped = asyncio.Event()
        source.on_end(self._note_end)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the port. Raises OSError."""
        accept = self._connections.accept
        self._connections.server = server = await asyncio.start_server(accept, host, port, limit=MAX_HEAD, ssl=tls)
        return int(server.sockets[0].getsockname()[1])

    async def linger(self) -> None:
        """Wait until the jobs that have failed just now have been scraped, or are not shown any more."""
        for _ in range(SCRAPES):
            until = max((until for _, until in self._failed.values()), default=0.0)
            left = until - time.monotonic()
            if left <= 0:
                return
            self._scraped.clear()
            await wait_for_event(self._scraped, left)

    def _note_end(self, status: JobStatus, history: JobHistory) -> None:
        now = time.monotonic()
        linger = self._scrapes.linger(now)
        if status.state is JobState.FAILED and linger > 0:
            self._failed[status.job] = JobFigures(status, history.rounds), now + linger

    def _figures(self) -> list[JobFigures]:
        """All jobs, and those that have failed since the last scrapes, unless there is another one of that name."""
        names, now = self._source.names(), time.monotonic()
        self._scrapes.note(now)
        self._scraped.set()
        self._failed = {name: known for name, known in self._failed.items() if known[1] > now and name not in names}
        reports = [report for name in names if (report := self._source.report(name)) is not None]
        ended = [figures for figures, _ in self._failed.values()]
        return [*(JobFigures(status, history.rounds) for status, history in reports), *ended]

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._connections.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with TimeLimit(HEAD_TIMEOUT):
            head = await reader.readuntil(b"\r\n\r\n")
        try:
            request = parse_head(head)
            check_access(request, self._token)
            if request.path == "/v1/events":
                name = self._job_name(request)
                await _send(writer, _head("200 OK", EVENTS))
                async with contextlib.aclosing(self._events(name)) as events:
                    async for event in events:
                        await _send(writer, event)
                return
            if request.path == "/v1/stacks":
                kind, body, more = TEXT, await self._stacks(self._job_name(request)), ""
            else:
                kind, body, more = self._body(request)
        except HttpError as error:
            more = 'WWW-Authenticate: Basic realm="dlrover-run"\r\n' if error.status.startswith("401") else ""
            text = f"{error}\n".encode()
            await _send(writer, _head(error.status, TEXT, len(text), more) + text)
            return
        except (OSError, EOFError):
            raise
        except Exception as error:
            text = f"internal error: {error!r}"[:MAX_HEAD].encode(errors="replace") + b"\n"
            await _send(writer, _head("500 Internal Server Error", TEXT, len(text)) + text)
            raise
        await _send(writer, _head("200 OK", kind, len(body), more) + body)

    def _body(self, request: HttpRequest) -> tuple[str, bytes, str]:
        """The type and the content of a path, and further headers. Raises HttpError."""
        if request.path == "/":
            page = PAGE.read_bytes()
            return HTML, page, _page_policy(page)
        if request.path == "/metrics":
            return CONTENT_TYPE, render_metrics(self._figures(), time.time()).encode(), ""
        if request.path == "/v1/jobs":
            return JSON, msgspec.json.encode(list(self._source.names())), ""
        if request.path == "/v1/status":
            return JSON, msgspec.json.encode(self._report(self._job_name(request))[0]), ""
        raise HttpError("404 Not Found", "there are /, /metrics, /v1/jobs, /v1/status, /v1/events and /v1/stacks")

    async def _stacks(self, name: str) -> bytes:
        """What the command `stacks` prints. Raises HttpError."""
        # Imported when it is asked for, as few jobs are.
        from dlrover_run.features.operate.display.text import render_stacks
        from dlrover_run.job_status.stacks import JobStacks

        answer = await self._source.stacks(name, StackQuery())
        if answer.refusal:
            raise HttpError("503 Service Unavailable", answer.refusal)
        return f"{render_stacks(msgspec.json.decode(answer.stacks, type=JobStacks))}\n".encode()

    def _job_name(self, request: HttpRequest) -> str:
        """The job that a request names, or the only one. Raises HttpError."""
        names = self._source.names()
        if (name := request.query.get("job")) is not None:
            if name not in names:
                raise HttpError("404 Not Found", "there is no job of that name")
            return name
        if len(names) != 1:
            problem = "there is no job now" if not names else "there are several jobs: add ?job=NAME (see /v1/jobs)"
            raise HttpError("404 Not Found", problem)
        return names[0]

    def _report(self, name: str) -> tuple[JobStatus, JobHistory]:
        report = self._source.report(name)
        if report is None:
            raise HttpError("404 Not Found", "there is no job of that name")
        return report

    async def _events(self, name: str) -> AsyncGenerator[bytes, None]:
        """The history of a job, then its status after each change, until the job is gone."""
        changed = asyncio.Event()
        changed.set()
        stop_listening = self._source.listen(changed.set)
        sent = 0
        last = b""
        try:
            while (report := self._source.report(name)) is not None:
                status, history = report
                for change in [each for each in history.changes if each.number > sent]:
                    sent = change.number
                    yield _event("change", msgspec.json.encode(change))
                changed.clear()
                # Ages grow without a change of the job.
                shape = msgspec.json.encode(
                    msgspec.structs.replace(status, age=None, seconds=None, waiting_seconds=None)
                )
                if shape != last:
                    last = shape
                    yield _event("status", msgspec.json.encode(status))
                await asyncio.sleep(EVENT_INTERVAL)
                if not await wait_for_event(changed, KEEP_ALIVE_INTERVAL):
                    yield b": still there\n\n"
            yield _event("end", b"{}")
        finally:
            stop_listening()


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _page_policy(page: bytes) -> str:
    """The header by which a browser runs the page's own script and nothing else, and asks this server alone."""
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"Content-Security-Policy: default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n"
    )


def _head(status: str, kind: str, length: int | None = None, more: str = "") -> bytes:
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{size}{more}Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    ).encode()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with TimeLimit(HEAD_TIMEOUT):
        await writer.drain()
