"""`events --otlp` against a collector on this machine, which decodes what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.harness import OURS, Finished, only_long, run

from dlrover_run import exit_codes
from dlrover_run.events import records
from dlrover_run.events.reader import AgentLog
from dlrover_run.events.writer import EventFile
from dlrover_run.features.inspect.spans import UNFINISHED, build_trace
from dlrover_run.features.operate.commands.asker import REFUSED
from dlrover_run.words.reasons import sentence

BEGAN = datetime(2026, 11, 22, 4, 0, tzinfo=UTC)
SECOND = 1_000_000_000
START = int(BEGAN.timestamp()) * SECOND
HEAD = records.LogOpened(
    time=BEGAN, mono=100.0, schema=1, job="j", host="n01", node_id="a", pid=1, workers=2, began=99.5
)  # fmt: skip


def at(seconds: float, event: records.Event, clock: float = 0.0) -> records.Event:
    """The event `seconds` after the first line, by a clock that is wrong by as much."""
    severity = records.severity_of(event)
    time = BEGAN + timedelta(seconds=seconds + clock)
    return msgspec.structs.replace(event, time=time, mono=100.0 + seconds, severity=severity)


def worker(rank: int, number: int = 1) -> dict[str, Any]:
    return {"round": number, "rank": rank, "local_rank": rank}


def formed(number: int) -> records.RoundFormed:
    return records.RoundFormed(
        round=number, epoch=1, node=0, nodes=1, first_rank=0, workers=2, world_size=2, restarts=number - 1
    )


FAILS = [
    at(1, formed(1)),
    *(at(2, records.WorkerStarted(**worker(rank), pid=10 + rank, since=101.5)) for rank in (0, 1)),
    at(5, records.WorkerStalled(**worker(1), since=103.0, reasons=sentence("it waits"))),
    at(6, records.CheckpointSeen(round=1, step=7)),
    at(8, records.WorkerExited(**worker(1), pid=11, code=-9)),
    at(8, records.WorkerFailed(**worker(1), pid=11, code=-9, cause="signal", what="was killed")),
    at(9, records.WorkerExited(**worker(0), pid=10, code=-15, stopped_with="SIGTERM"), clock=3600),
    at(9, records.RoundClosed(round=1, epoch=1, failed=True), clock=3600),
    at(10, formed(2), clock=3600),
]
"""A round that a worker ends after a stall, and the next one, of which no more is known; the clock is set meanwhile."""


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    file = EventFile(tmp_path / "logs" / records.FILE_NAME, HEAD)
    for event in FAILS:
        file.append(event)
    file.close()
    return tmp_path / "logs"


class Collector:
    """Takes what is sent to it, or answers each request with an error."""

    def __init__(self, answer: int) -> None:
        self.spans: list[Any] = []
        self.records: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if answer == 200:
                    outer.take(self.path, body)
                self.send_response(answer)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(values(group.resource.attributes))
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
        elif path == "/v1/logs":
            for group in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.records += [record for scope in group.scope_logs for record in scope.log_records]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    opened = Collector(getattr(request, "param", 200))
    yield opened
    opened.close()


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def export(here: Path, *words: str) -> Finished:
    return run(OURS, ("events", *words), cwd=here)


def test_a_collector_gets_spans_below_each_other_and_records_in_them(collector: Collector, logs: Path) -> None:
    ended = export(logs, f"--otlp={collector.url}/", str(logs))
    assert (ended.code, ended.err) == (exit_codes.SUCCESS, "")
    assert "6 spans and 2 log records" in ended.out

    assert {span.trace_id for span in collector.spans} == {record.trace_id for record in collector.records}
    names = {span.span_id: f"{span.name} {values(span.attributes).get('dlrover.rank', '')}" for span in collector.spans}
    assert len(names) == 6
    seconds = [
        (names[one.span_id], names.get(one.parent_span_id, ""), *((each - START) / SECOND for each in
         (one.start_time_unix_nano, one.end_time_unix_nano)), one.status.message)
        for one in collector.spans
    ]  # fmt: skip
    assert sorted(seconds) == [
        ("agent ", "", -0.5, 10.0, ""),
        ("round ", "agent ", 1.0, 9.0, "round 1"),
        ("round ", "agent ", 10.0, 10.0, ""),
        ("stall 1", "worker 1", 3.0, 8.0, ""),
        ("worker 0", "round ", 1.5, 9.0, ""),
        ("worker 1", "round ", 1.5, 8.0, "was killed"),
    ]
    unfinished = {names[one.span_id] for one in collector.spans if UNFINISHED in values(one.attributes)}
    assert unfinished == {"agent ", "round "}
    assert {one["dlrover.job"] for one in collector.resources} == {"j"}

    assert [(one.event_name, names[one.span_id], one.severity_text) for one in collector.records] == [
        ("dlrover.checkpoint.seen", "round ", "INFO"),
        ("dlrover.worker.failed", "worker 1", "ERROR"),
    ]
    assert values(collector.records[0].attributes) == {"dlrover.round": 1, "dlrover.step": 7}


def test_what_is_sent_again_has_the_same_identifiers(collector: Collector, logs: Path) -> None:
    for _ in range(2):
        assert export(logs, f"--otlp={collector.url}", str(logs)).code == exit_codes.SUCCESS
    identifiers = [(span.trace_id, span.span_id) for span in collector.spans]
    assert identifiers[:6] == identifiers[6:]


def test_what_ended_earlier_is_left_out(collector: Collector, logs: Path) -> None:
    since = (BEGAN + timedelta(seconds=9.5)).isoformat()
    assert export(logs, f"--otlp={collector.url}", f"--since={since}", str(logs)).code == exit_codes.SUCCESS
    assert sorted(span.name for span in collector.spans) == ["agent", "round"]
    assert collector.records == []


@pytest.mark.parametrize("collector", [400], indirect=True)
def test_a_collector_that_refuses_is_named(collector: Collector, logs: Path) -> None:
    ended = export(logs, f"--otlp={collector.url}", str(logs))
    assert ended.code == REFUSED
    assert f"{collector.url}/v1/traces" in ended.err
    assert "400" in ended.err


def test_a_collector_that_is_not_there_is_named(logs: Path) -> None:
    ended = export(logs, "--otlp=http://127.0.0.1:1", "--timeout=1", str(logs))
    assert ended.code == REFUSED
    assert "http://127.0.0.1:1/v1/traces" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ("--otlp=localhost:4318", "logs"),
        ("--otlp=http://localhost:4318", "--json", "logs"),
        ("--otlp=http://localhost:4318", "absent/logs"),
        *only_long(
            (("--otlp=http://", "logs"),),
            (("--otlp=http://a:b", "logs"),),
            (("--otlp=http://localhost:4318?x=1", "logs"),),
            (("--otlp=http://localhost:4318", "--by-node", "logs"),),
        ),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path: Path, logs: Path, words: tuple[str, ...]) -> None:
    assert export(tmp_path, *words).code == exit_codes.BAD_COMMAND_LINE


def test_without_the_packages_the_message_names_them(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = logs / "sitecustomize.py"
    blocker.write_text("import sys\nsys.modules['opentelemetry'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(logs))
    ended = export(logs, "--otlp=http://localhost:4318", str(logs))
    assert ended.code == exit_codes.BAD_COMMAND_LINE
    assert "dlrover-run[otel]" in ended.err
    assert export(logs, str(logs)).code == exit_codes.SUCCESS


def test_ends_without_a_begin_are_records() -> None:
    """The files with the begins were rotated away."""
    spans, found = build_trace(
        AgentLog(HEAD, (FAILS[5], FAILS[8], at(11, records.AgentEnded(exit_code=1, reason="x"))))
    )
    assert [(span.name, span.error) for span in spans] == [("agent", "exit code 1: x")]
    assert [record.span for record in found] == [spans[0].id] * 2


def test_a_task_without_a_round_is_below_its_agent() -> None:
    task = records.WorkerStarted(round=1, rank=0, local_rank=3, role="ps", pid=5)
    spans, _ = build_trace(AgentLog(HEAD, (at(1, task), at(2, records.StragglerFound(**worker(3))))))
    agent, ps, straggler = spans
    assert (ps.parent, straggler.parent) == (agent.id, ps.id)
    assert ps.attributes["dlrover.role"] == "ps"
