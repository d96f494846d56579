"""The web page of a master: what it loads, who can read it, and what a real browser shows while a job changes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from browser import PROGRAM, Browser
from support.harness import WAIT
from support.master_node import Bed, serving
from test_master_web import TOKEN, ask, body, with_web

from dlrover_run.coordination.records.activity import MemoryUse, NodeActivity, PhaseTimes
from dlrover_run.coordination.records.rules import JobRules
from dlrover_run.coordination.records.size_choice import DesiredServers, MeasuredSize, SizeChoice
from dlrover_run.events.timeline import TimePhase
from dlrover_run.features.operate.web import server as web
from dlrover_run.features.operate.web.server import PAGE, WebServer

CHOICE = SizeChoice(
    wanted_nodes=4,
    chosen_nodes=2,
    condition="Stop",
    sizes=(
        MeasuredSize(nodes=2, throughput=20.5, error=0.01, efficiency=0.12, blocks=9),
        MeasuredSize(nodes=3, failures=2),
    ),
)
RULES = JobRules(min_nodes=1, max_nodes=2, last_call_timeout=0.0, lost_after=0.0)


def test_the_page_runs_its_own_script_and_loads_nothing_from_elsewhere() -> None:
    async def look(bed: Bed, port: int) -> None:
        answer = await ask(port, "/")
        page = body(answer)
        assert page.encode() == PAGE.read_bytes()
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = re.findall(r"Content-Security-Policy: (.*)\r\n", answer)
        assert f"script-src 'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy
        # An XML namespace is not loaded.
        assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}
        assert "innerHTML" not in page

    with_web(look)


def test_the_page_reads_fields_that_a_choice_of_the_size_has() -> None:
    page = PAGE.read_text()
    for name, record in (("choice", SizeChoice), ("size", MeasuredSize), ("servers", DesiredServers)):
        used = set(re.findall(rf"\b{name}\.([a-z_]+)", page)) - {"length"}
        # What renders it for `status` has them too; a sentence needs no codes.
        assert used == set(record.__struct_fields__) - {"reasons"}


def test_the_page_knows_each_phase_of_the_ledger() -> None:
    page = PAGE.read_text()
    (names,) = re.findall(r"const phases = \[(.*?)\];", page)
    assert sorted(re.findall(r'"([a-z]+)"', names)) == sorted(TimePhase)
    (colors,) = re.findall(r":root \{\n  color-scheme.*?\n\}", page, re.DOTALL)
    assert set(re.findall(r"--([a-z]+):", colors)) >= {*TimePhase} - {TimePhase.UNKNOWN}


def in_browser(test: Callable[[Bed, Browser], Awaitable[None]], directory: Path, token: str = TOKEN) -> None:
    """Run a test with a master, and a browser that shows its page."""

    async def run() -> None:
        async with asyncio.timeout(WAIT), serving(token=token) as bed:
            server = WebServer(bed.server.jobs, token)
            port = await server.start("127.0.0.1", 0)
            browser = await asyncio.to_thread(Browser, directory / "profile", token)
            try:
                await asyncio.to_thread(browser.open, f"http://localhost:{port}/")
                await test(bed, browser)
                assert browser.problems == []
            finally:
                await asyncio.to_thread(browser.close)
                server.close()

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: make browser")
class TestInABrowser:
    def test_a_job_is_shown_as_it_changes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(web, "EVENT_INTERVAL", 0.0)

        async def look(bed: Bed, browser: Browser) -> None:
            a, b = await bed.joined("a", "b", rules=RULES, token=TOKEN)
            await a.take_ranks(1)
            await b.take_ranks(1)
            await asyncio.to_thread(browser.open, await asyncio.to_thread(browser.evaluate, "location.href"))
            shows = "document.body.innerText.includes(%r)"
            await asyncio.to_thread(browser.until, "document.querySelectorAll('#nodes tr').length == 2")
            b.cut()
            await asyncio.to_thread(browser.until, "document.querySelectorAll('#nodes tr').length == 1")
            await asyncio.to_thread(browser.until, shows % "lost")
            assert await asyncio.to_thread(browser.evaluate, "document.getElementById('live').textContent") == "live"
            rows = await asyncio.to_thread(browser.evaluate, "document.querySelectorAll('#changes tr').length")
            assert rows >= 2
            # The time of a change is that of the local clock, as in `events`.
            at = "document.querySelector('#changes td').textContent"
            await asyncio.to_thread(browser.until, rf"/^(\d{{4}}-\d\d-\d\d )?\d\d:\d\d:\d\d$/.test({at})")
            assert await asyncio.to_thread(browser.evaluate, "clock(new Date(2026, 0, 2, 3, 4, 5).getTime())") == (
                "2026-01-02 03:04:05"
            )
            assert await asyncio.to_thread(browser.evaluate, "document.getElementById('choice').hidden")
            legend = "document.getElementById('legend').innerText"
            assert "known" in await asyncio.to_thread(browser.evaluate, legend)
            times = PhaseTimes({"start": 30.0, "train": 60.0, "lost": 10.0}, {"train": 1})
            await a.report(activity=NodeActivity((), times=times))
            await asyncio.to_thread(browser.until, f"{legend}.includes('start 30 s')")
            text = await asyncio.to_thread(browser.evaluate, legend)
            assert [word for word in ("start 30 s", "train 1 m", "lost 10 s", "%") if word not in text] == []
            titles = "[...document.querySelectorAll('#bar span')].map((one) => one.title).join()"
            order = re.findall(r"(\w+) for", await asyncio.to_thread(browser.evaluate, titles))
            assert order == ["start", "train", "lost"]
            share = "parseFloat(document.querySelector('#bar span').style.flexGrow)"
            before = await asyncio.to_thread(browser.evaluate, share)
            # The phase that holds grows without a message.
            await asyncio.to_thread(browser.until, f"{share} < {before}")
            await a.report(
                activity=NodeActivity((), times=PhaseTimes({"start": 30.0, "restart": 30.0}, {"restart": 1}))
            )
            await asyncio.to_thread(browser.until, f"{legend}.includes('restart') && !{legend}.includes('lost')")
            choice = msgspec.json.encode(CHOICE).decode()
            shown = f"status.size_choice = {choice}; drawChoice(); document.getElementById('choice').innerText"
            text = await asyncio.to_thread(browser.evaluate, shown)
            assert all(word in text for word in ("4 wanted", "Stop", "20.50", "0.12", "failed 2 times"))
            assert await asyncio.to_thread(browser.evaluate, "document.getElementById('memory').hidden")
            use = msgspec.json.encode(MemoryUse(used=2**30, limit=2**31, waiting=1, waiting_bytes=2**20)).decode()
            shown = f"status.nodes[0].memory = {use}; drawNodes(); document.getElementById('nodes').innerText"
            text = await asyncio.to_thread(browser.evaluate, shown)
            assert "1.00 of 2.00 GiB, 1 file to write" in text
            assert await asyncio.to_thread(browser.evaluate, "document.getElementById('stacks').hidden")
            await asyncio.to_thread(browser.evaluate, "document.getElementById('ask').click()")
            await asyncio.to_thread(browser.until, "document.getElementById('stacks').innerText.includes('job job')")
            if picture := os.environ.get("PICTURE"):
                await asyncio.to_thread(browser.picture, Path(picture))

        in_browser(look, tmp_path)

    def test_a_node_id_with_markup_is_shown_as_text(self, tmp_path: Path) -> None:
        evil = "<img src=x onerror=alert(1)>"

        async def look(bed: Bed, browser: Browser) -> None:
            node = bed.node("a", token=TOKEN, host=evil)
            await node.join(RULES)
            await node.take_ranks(1)
            await asyncio.to_thread(browser.open, await asyncio.to_thread(browser.evaluate, "location.href"))
            await asyncio.to_thread(browser.until, f"document.querySelector('#nodes')?.innerText.includes({evil!r})")
            assert await asyncio.to_thread(browser.evaluate, "document.querySelectorAll('img').length") == 0

        in_browser(look, tmp_path)
