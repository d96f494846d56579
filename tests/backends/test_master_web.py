"""The web server of a master: the metrics, the status and the events, and who gets them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import itertools
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.harness import WAIT
from support.master_node import Bed, serving
from support.virtual_torch import TorchJob
from support.virtual_torch import rules as virtual_rules

from dlrover_run.coordination.records.activity import MemoryUse, NodeActivity, TaskActivity
from dlrover_run.coordination.records.plan import Plan, PlanPhase
from dlrover_run.coordination.records.report import NodePhase
from dlrover_run.coordination.records.round import RoundKey
from dlrover_run.features.operate.display.text import PROBLEMS
from dlrover_run.features.operate.web import server as web
from dlrover_run.features.operate.web.metrics import CONTENT_TYPE, JobFigures, render_metrics
from dlrover_run.features.operate.web.scrapes import ScrapeTimes
from dlrover_run.features.operate.web.server import HttpError, HttpRequest, WebServer, check_access, parse_head
from dlrover_run.job_status import stacks
from dlrover_run.job_status.history import CAUSES, JobHistory, round_cause
from dlrover_run.job_status.stacks import StackProblem
from dlrover_run.job_status.status import JobState, JobStatus
from dlrover_run.master.command import _tls_context, read_options
from dlrover_run.rendezvous.kinds import TlsSpec
from dlrover_run.spec import SpecError
from dlrover_run.words.reasons import Code

TOKEN = "a token that is long enough"
MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """The samples of each metric by their labels, as the official parser reads them: it raises ValueError for what is
    not of the format."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
            assert labels not in found.setdefault(sample.name, {}), "each sample is there once"
            found[sample.name][labels] = sample.value
    return found


async def ask(port: int, path: str, token: str = TOKEN, host: str = "localhost", method: str = "GET") -> str:
    """The whole answer to a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bearer = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\n{bearer}\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


def with_web(test: Callable[[Bed, int], Awaitable[None]], token: str = TOKEN) -> None:
    async def run() -> None:
        async with asyncio.timeout(WAIT), serving(token=token) as bed:
            server = WebServer(bed.server.jobs, token)
            port = await server.start("127.0.0.1", 0)
            try:
                await test(bed, port)
            finally:
                server.close()

    asyncio.run(run())


def body(answer: str) -> str:
    assert answer.startswith("HTTP/1.1 200 "), answer
    return answer.partition("\r\n\r\n")[2]


def test_the_status_and_the_metrics_of_a_job() -> None:
    async def look(bed: Bed, port: int) -> None:
        assert (await ask(port, "/v1/status")).startswith("HTTP/1.1 404 ")
        for node in await bed.joined("a", "b", token=TOKEN):
            await node.take_ranks(1)
        assert json.loads(body(await ask(port, "/v1/jobs"))) == ["job"]
        status = json.loads(body(await ask(port, "/v1/status?job=job")))
        assert (status["state"], status["round_nodes"]) == ("training", 2)
        metrics = parse_metrics(body(await ask(port, "/metrics")))
        assert metrics["dlrover_job_state"]['dlrover_job="job",state="training"'] == 1
        assert sum(metrics["dlrover_job_state"].values()) == 1
        assert sum(metrics["dlrover_job_nodes"].values()) == 2
        assert metrics["dlrover_rounds_total"]['dlrover_job="job",reason="start"'] == 1

    with_web(look)


def test_the_stacks_of_a_job_are_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "NODE_TIMEOUT", 0.1)

    async def look(bed: Bed, port: int) -> None:
        assert (await ask(port, "/v1/stacks")).startswith("HTTP/1.1 404 ")
        for node in await bed.joined("a", "b", token=TOKEN):
            await node.take_ranks(1)
        text = body(await ask(port, "/v1/stacks?job=job"))
        head, _, *silent = text.splitlines()
        assert head.startswith("job job   round 1   stacks of 0 of 0 workers   2 nodes")
        assert [line.rpartition(": ")[2] for line in silent] == [PROBLEMS[StackProblem.NODE_NO_ANSWER]] * 2

    with_web(look)


def test_a_stream_has_the_history_then_each_change_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "EVENT_INTERVAL", 0.0)

    async def look(bed: Bed, port: int) -> None:
        a, b = await bed.joined("a", "b", token=TOKEN)
        await a.take_ranks(1)
        await b.take_ranks(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")

        async def event() -> tuple[str, dict[str, object]]:
            name, data = (await reader.readuntil(b"\n\n")).decode().strip().split("\n")
            return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

        name, change = await event()
        assert (name, change["round"], change["state"]) == ("change", 1, "training")
        b.cut()
        while not (change["state"] == "waiting" and name == "change"):
            name, change = await event()
        writer.close()

    with_web(look)


def test_only_who_knows_the_token_gets_an_answer() -> None:
    async def look(bed: Bed, port: int) -> None:
        for token in ("", "another", f"{TOKEN} "[:-2]):
            for path in ("/metrics", "/v1/status", "/v1/events", "/v1/stacks", "/v1/jobs", "/"):
                answer = await ask(port, path, token)
                assert answer.startswith("HTTP/1.1 401 "), path
                assert TOKEN not in answer
        assert (await ask(port, "/metrics", method="POST")).startswith("HTTP/1.1 405 ")
        assert (await ask(port, "/other")).startswith("HTTP/1.1 404 ")

    with_web(look)


def test_without_a_token_no_web_page_can_ask_under_another_name() -> None:
    async def look(bed: Bed, port: int) -> None:
        assert (await ask(port, "/metrics", "")).startswith("HTTP/1.1 200 ")
        assert (await ask(port, "/metrics", "", host="evil.example")).startswith("HTTP/1.1 403 ")

    with_web(look, token="")


@pytest.mark.parametrize(
    "authorization",
    [f"Bearer {TOKEN}", f"bearer {TOKEN}", "Basic " + base64.b64encode(f"any:{TOKEN}".encode()).decode()],
)
def test_the_token_may_be_a_bearer_token_or_a_password(authorization: str) -> None:
    check_access(HttpRequest("GET", "/", {}, {"authorization": authorization}), TOKEN)


@pytest.mark.parametrize(
    "authorization",
    ["", TOKEN, "Basic ???", "Basic \xe9", "Bearer \xe9", "Basic " + base64.b64encode(b"any:x").decode()],
)
def test_anything_else_is_refused(authorization: str) -> None:
    with pytest.raises(HttpError):
        check_access(HttpRequest("GET", "/", {}, {"authorization": authorization}), TOKEN)


@pytest.mark.parametrize("head", [b"", b"\r\n\r\n", b"GET /\r\n\r\n", b"GET / FTP/1\r\n\r\n", b"\xff\xfe\x00\r\n\r\n"])
def test_what_is_no_request_is_refused(head: bytes) -> None:
    with pytest.raises(HttpError):
        parse_head(head)


def test_a_client_that_sends_nothing_or_too_much_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEAD_TIMEOUT", 0.05)

    async def look(bed: Bed, port: int) -> None:
        for data in (b"", b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * web.MAX_HEAD):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert (await ask(port, "/v1/jobs")).startswith("HTTP/1.1 200 ")

    with_web(look)


def test_requests_without_the_token_leave_the_server_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 3)

    async def look(bed: Bed, port: int) -> None:
        head = "GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Basic \xe9\r\n\r\n".encode("latin-1")
        for _ in range(2 * web.MAX_CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
            writer.close()
        assert (await ask(port, "/metrics")).startswith("HTTP/1.1 200 ")

    with_web(look)


def test_an_error_of_our_own_is_answered_reported_and_takes_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 3)

    async def look(bed: Bed, port: int) -> None:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context.get("exception")))
        with monkeypatch.context() as broken:
            broken.setattr(bed.server.jobs, "names", lambda: {}["planted"])
            for _ in range(2 * web.MAX_CONNECTIONS):
                answer = await ask(port, "/v1/jobs")
                assert answer.startswith("HTTP/1.1 500 ")
                assert answer.endswith("internal error: KeyError('planted')\n")
        assert (await ask(port, "/v1/jobs")).startswith("HTTP/1.1 200 ")
        gc.collect()
        assert [type(each) for each in reported] == [KeyError] * 2 * web.MAX_CONNECTIONS

    with_web(look)


@pytest.mark.parametrize(
    ("scrapes", "now", "seconds"),
    [
        ((), 100.0, 0.0),
        ((100.0,), 101.0, 0.0),
        ((100.0, 115.0), 116.0, 31.0),
        # Two servers in turn.
        ((100.0, 100.5, 115.0, 115.5), 116.0, 30.0),
        # Nothing scrapes any more.
        ((100.0, 115.0), 200.0, 0.0),
        ((0.0, 600.0), 610.0, 150.0),
    ],
)
def test_how_long_a_failure_is_shown(scrapes: tuple[float, ...], now: float, seconds: float) -> None:
    times = ScrapeTimes()
    for each in scrapes:
        times.note(each)
    assert times.linger(now) == seconds


FAILED = JobStatus(
    job="job", state=JobState.FAILED, seconds=1.0, age=9.0, epoch=1, round=1, min_nodes=2, max_nodes=2,
    node_counts={}, nodes=(),
)  # fmt: skip


def test_a_job_that_has_failed_is_shown_for_two_scrapes_and_only_where_something_scrapes() -> None:
    async def look(bed: Bed, port: int) -> None:
        server = WebServer(bed.server.jobs, TOKEN)
        port = await server.start("127.0.0.1", 0)

        async def states() -> dict[str, float]:
            return parse_metrics(body(await ask(port, "/metrics"))).get("dlrover_job_state", {})

        try:
            bed.server.jobs._on_end(FAILED, JobHistory())
            await server.linger()
            assert await states() == {}, "nothing had scraped"
            await states()
            bed.server.jobs._on_end(msgspec.structs.replace(FAILED, state=JobState.SUCCEEDED), JobHistory())
            assert await states() == {}
            bed.server.jobs._on_end(FAILED, JobHistory())
            lingers = asyncio.create_task(server.linger())
            await asyncio.sleep(0)
            assert (await states())['dlrover_job="job",state="failed"'] == 1
            assert not lingers.done()
            await states()
            await lingers
        finally:
            server.close()

    with_web(look)


def test_rounds_are_counted_by_their_cause() -> None:
    history = JobHistory()
    plans = [
        Plan(),
        Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, 1), reasons=(Code.NODES_HERE(number=2),)),
        Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, 2), reasons=(Code.WORKER_FAILED(rank=1, node="a", what="x"),)),
        Plan(phase=PlanPhase.GATHERING, key=RoundKey(1, 2), reasons=(Code.LOST(names=("a",), number=1),)),
        Plan(phase=PlanPhase.TRAINING, key=RoundKey(1, 3), reasons=(Code.LOST(names=("a",), number=1),)),
    ]
    for before, plan in itertools.pairwise(plans):
        history.follow(before, plan)
        history.follow(plan, plan)
    assert history.rounds == {"start": 1, "failure": 1, "node_lost": 1}
    assert [change.number for change in history.changes] == [1, 2, 3, 4]
    assert round_cause(()) in CAUSES


ACTIVITY = NodeActivity(
    (TaskActivity("rank 0", 12, 0.25, 0.1, 3.0), TaskActivity("rank 1", 11, 0.5, None, 4.0, "stall.locked")),
    MemoryUse(used=2000, limit=3000, waiting=1, waiting_bytes=1000),
)


def metrics_of(name: str, activity: NodeActivity | None = ACTIVITY) -> str:
    """The metrics of a job of one node."""
    job = TorchJob(virtual_rules(1, 1))
    job.come("a", host='quoted "host"')
    job.report("a", phase=NodePhase.RUNNING, ranks=job.coordinator.ranks(job.statuses["a"].key), activity=activity)
    job.wait(2)
    return render_metrics([JobFigures(job.coordinator.status(name, job.now), {"start": 1})], now=1_800_000_000.0)


def test_a_parser_of_prometheus_reads_each_metric() -> None:
    name = 'a "job"\n\\'
    families = {family.name: family for family in text_string_to_metric_families(metrics_of(name))}
    assert all(sample.labels["dlrover_job"] == name for family in families.values() for sample in family.samples)

    def value(family: str) -> float:
        (sample,) = families[family].samples
        assert sample.labels == {"dlrover_job": name, "node": "0"}
        return float(sample.value)

    assert value("dlrover_steps") == 11
    # Rank 1 has stalled, so that the pace of the past is not that of now.
    assert list(families["dlrover_step_duration_seconds"].samples) == []
    assert value("dlrover_data_wait_ratio") == 0.1
    assert value("dlrover_last_progress_timestamp_seconds") == 1_800_000_000.0 - 5
    assert value("dlrover_stalled_workers") == 1
    assert value("dlrover_checkpoint_memory_bytes") == 2000
    assert value("dlrover_checkpoint_memory_limit_bytes") == 3000
    assert value("dlrover_checkpoint_unwritten_bytes") == 1000


def test_no_label_is_one_that_prometheus_sets_for_a_target() -> None:
    """It would rename ours, so that a rule by `job` mixes all jobs of a scrape configuration."""
    families = text_string_to_metric_families(metrics_of("job"))
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert "dlrover_job" in labels
    # The first two by itself, the others by the Prometheus Operator's PodMonitor.
    assert not labels & {"job", "instance", "namespace", "pod", "container", "endpoint"}


def test_the_content_type_is_the_one_of_that_parser() -> None:
    """Prometheus chooses the parser by it; OpenMetrics, for example, names counters in another way."""
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4;")


def test_the_alert_rules_and_the_dashboard_ask_for_metrics_that_exist() -> None:
    # The label that names a job, too.
    names = {*parse_metrics(metrics_of("job")), "dlrover_job"}
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    asked = [rule["expr"] for rule in rules]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(rules) == 6
    for expression in asked:
        used = set(re.findall(r"dlrover_[a-z_]+", expression))
        assert used, expression
        assert used <= names, expression


def test_the_flag_of_a_master_serves_other_machines_only_with_a_token() -> None:
    listen = ["--listen", "127.0.0.1:0"]
    assert read_options([*listen, "--web", "9400"], {}).web == ("127.0.0.1", 9400)
    with pytest.raises(SpecError):
        read_options([*listen, "--web", "10.0.0.1:9400"], {})
    variables = {"DLROVER_RDZV_TOKEN": TOKEN}
    assert read_options([*listen, "--web", "10.0.0.1:9400"], variables).web == ("10.0.0.1", 9400)


def test_the_master_writes_no_secrets_of_its_connections_to_a_file(
    etcd_certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who sets SSLKEYLOGFILE for a browser, or for a worker, has not asked the master for its TLS secrets."""
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    files = TlsSpec(**{name: str(etcd_certificates / file) for name, file in TLS_FILES.items()})
    assert _tls_context(files).keylog_filename is None
    assert not (tmp_path / "keys").exists()


TLS_FILES = {"ca": "ca.pem", "cert": "server.pem", "key": "server.key"}
