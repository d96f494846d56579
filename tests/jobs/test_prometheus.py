"""A real Prometheus scrapes two jobs with the configuration and the alert rules of `examples/monitoring`.

Only the intervals and the address are changed. One job has a worker that is stopped, the other trains, at a size that
an operator has asked for.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cluster import quiet_port
from support.harness import OURS, WAIT, finish, run, start, until

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "examples" / "monitoring"
PROGRAM = shutil.which("prometheus")
TOKEN = "a token that is long enough"

FAILS = """
import os, time
from dlrover_run.training import report
while not os.path.exists("fail"):
    time.sleep(0.05)
    report(1, 8)
raise SystemExit(3)
"""
TRAINS = """
import time
from dlrover_run.training import report
while True:
    time.sleep(0.05)
    report(1, 8)
"""


class Prometheus:
    """A Prometheus that scrapes these ports each second, and keeps everything in `directory`."""

    def __init__(self, directory: Path, port: int, targets: list[int]) -> None:
        directory.mkdir()
        config = (MONITORING / "prometheus.yml").read_text()
        rules = (MONITORING / "alerts.yml").read_text()
        config = re.sub(r"_interval: 15s", "_interval: 1s", config)
        config = config.replace("[localhost:9400]", json.dumps([f"localhost:{target}" for target in targets]))
        # The rule of a step that is missing for 10 minutes fires after 5 seconds, and all of them at once.
        rules = re.sub(r"for: \d+m", "for: 0s", rules).replace("> 600", "> 5")
        (directory / "prometheus.yml").write_text(config)
        (directory / "alerts.yml").write_text(rules)
        (directory / "token").write_text(TOKEN)
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._log = (directory / "log").open("w")
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT)
        self._log.close()

    def ask(self, path: str, **query: str) -> Any:
        """What its API answers; None while it starts."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def labels_of(self, query: str) -> list[dict[str, str]]:
        """The labels of each series in the answer to a query."""
        found = self.ask("query", query=query)
        return [] if found is None else [series["metric"] for series in found["result"]]

    def firing(self, name: str) -> set[str]:
        """The jobs for which an alert fires."""
        found = self.ask("alerts")
        return {
            alert["labels"]["dlrover_job"]
            for alert in (found or {"alerts": []})["alerts"]
            if alert["labels"]["alertname"] == name and alert["state"] == "firing"
        }


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.skipif(PROGRAM is None, reason="no Prometheus here: make prometheus")
def test_a_job_that_fails_is_seen_and_its_endpoint_and_port_are_free_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "trains.py").write_text(TRAINS)
    meets, web, port = (quiet_port() for _ in range(3))
    environ = {"DLROVER_RDZV_TOKEN": TOKEN}
    flags = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{meets}", "--rdzv-id=aa"]
    flags += [f"--rdzv-conf=web={web},last_call_timeout=1"]
    processes = [start(OURS, [*flags, tmp_path / "fails.py"], cwd=tmp_path, env=environ)]
    prometheus = Prometheus(tmp_path / "prometheus", port, [web])
    shown = 'count_over_time(dlrover_job_state{state="%s"}[10m:1s])'
    try:
        until(lambda: len(prometheus.labels_of(shown % "training")) == 1, "the job is scraped")
        # A master that was scraped once only does not know how long to wait for the next scrape.
        twice = "count_over_time(dlrover_steps_total[10m]) > 1"
        until(lambda: len(prometheus.labels_of(twice)) == 1, "it is scraped more than once")
        (tmp_path / "fail").touch()
        assert finish(processes[0]).code == 3
        # At once, while its master may still show that it has failed.
        flags[flags.index("--rdzv-id=aa")] = "--rdzv-id=bb"
        processes.append(start(OURS, [*flags, tmp_path / "trains.py"], cwd=tmp_path, env=environ))
        until(lambda: prometheus.firing("DlroverJobFailed") == {"aa"}, "the failure is seen")
        until(
            lambda: [labels["dlrover_job"] for labels in prometheus.labels_of("dlrover_steps_total")] == ["bb"],
            "the next job has metrics",
        )
    finally:
        prometheus.close()
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait(WAIT)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.skipif(PROGRAM is None, reason="no Prometheus here: make prometheus")
def test_the_alerts_and_the_labels_of_two_jobs(tmp_path: Path) -> None:
    ports = [quiet_port() for _ in range(5)]
    (tmp_path / "trains.py").write_text(TRAINS)
    environ = {"DLROVER_RDZV_TOKEN": TOKEN}
    jobs, processes = {}, []
    for name, meets, web in (("aa", ports[0], ports[1]), ("bb", ports[2], ports[3])):
        jobs[name] = [
            "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{meets}", f"--rdzv-id={name}",
        ]  # fmt: skip
        flags = ["--nnodes=1:2", *jobs[name], f"--rdzv-conf=web={web},last_call_timeout=1"]
        processes.append(start(OURS, [*flags, tmp_path / "trains.py"], cwd=tmp_path, env=environ))
    prometheus = Prometheus(tmp_path / "prometheus", ports[4], [ports[1], ports[3]])
    try:
        until(lambda: len(prometheus.labels_of("dlrover_steps_total")) == 2, "both jobs are scraped")
        info = prometheus.labels_of("dlrover_job_info")
        assert {labels["dlrover_job"] for labels in info} == {"aa", "bb"}
        assert {labels["job"] for labels in info} == {"dlrover-run"}
        assert not any(label.startswith("exported_") for labels in info for label in labels)

        until(lambda: prometheus.firing("DlroverJobBelowItsSize") == {"aa", "bb"}, "one node of 1:2")
        for flags in jobs.values():
            scaled = run(OURS, ["scale", "--nodes=1", *flags], cwd=tmp_path, env=environ)
            assert scaled.code == 0, scaled
        until(lambda: prometheus.firing("DlroverJobBelowItsSize") == set(), "an operator wants one node")

        (worker,) = [
            each
            for each in psutil.Process(processes[0].pid).children(recursive=True)
            if any(word.endswith("trains.py") for word in each.cmdline()[:3]) and each.environ().get("RANK") == "0"
        ]
        worker.send_signal(signal.SIGSTOP)
        until(lambda: prometheus.firing("DlroverJobStalls") == {"aa"}, "the worker that hangs")
        until(
            lambda: prometheus.firing("DlroverJobMakesNoSteps") == {"aa"}, "no step for 5 s, beside a job that trains"
        )
        worker.send_signal(signal.SIGCONT)
        assert prometheus.firing("DlroverJobFailed") == set()
    finally:
        prometheus.close()
        for process in processes:
            process.terminate()
            process.wait(WAIT)
