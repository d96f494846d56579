"""The status of a master's jobs over HTTP (`--web`): its start, also later, and how long it outlives the jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlrover_run.background import Background
from dlrover_run.features import FEATURES
from dlrover_run.spec import SpecError
from dlrover_run.words.log_level import internal_error, log_frames
from dlrover_run.words.text import join_address

if TYPE_CHECKING:
    import ssl

    from dlrover_run.master.jobs import Jobs

RETRY_INTERVAL = 2.0
"""Seconds between two attempts of a launched master to serve at a port that was taken."""

ATTEMPTS = 90
"""These attempts last longer than an earlier master lingers there (`scrapes.MAX_LINGER`)."""


class MasterWeb:
    """Serves the jobs of a master at an address, encrypted with `tls`. `log` is the master's log, and what keeps a
    launched master from serving is also sent to its launcher, with `log_to_launcher`."""

    def __init__(
        self,
        jobs: Jobs,
        token: str,
        address: tuple[str, int],
        tls: ssl.SSLContext | None,
        log: Callable[[str], None],
        log_to_launcher: Callable[[str], None],
    ) -> None:
        self._jobs = jobs
        self._token = token
        self._address = address
        self._tls = tls
        self._log = log
        self._log_to_launcher = log_to_launcher
        self._server: Any = None
        self._background = Background(self._note_failure)

    async def start(self, is_launched: bool) -> None:
        """Serve. Raises SpecError, and OSError if it cannot listen there; a launched master warns of that, and tries
        again in the background, because its job does not need it."""
        try:
            await self._listen()
        except OSError as error:
            if not is_launched:
                raise
            # A master without a console can tell it only to its launcher.
            self._log_to_launcher(f"warning: {error}")
            self._background.start(self._start_when_free())

    async def close(self, lingers: bool) -> None:
        """Serve no more. If it `lingers`, jobs that have just failed are shown until they have been scraped."""
        await self._background.close()
        if self._server is not None:
            if lingers:
                await self._server.linger()
            self._server.close()

    async def _listen(self) -> None:
        serving = next((row for row in FEATURES if row.web), None)
        if serving is None:
            raise SpecError("--web is not possible: this installation has no feature that serves the status.")
        server = import_module(serving.module("web.server")).WebServer(self._jobs, self._token)
        try:
            port = await server.start(*self._address, self._tls)
        except OSError as error:
            where = join_address(*self._address)
            raise OSError(f"--web {where}: cannot listen there ({error.strerror or error})") from None
        self._server = server
        self._log(f"serves http{'s' if self._tls else ''}://{join_address(self._address[0], port)}/ and /metrics")

    async def _start_when_free(self) -> None:
        """The master of a job that has failed may show that for some time yet."""
        for _ in range(ATTEMPTS):
            await asyncio.sleep(RETRY_INTERVAL)
            with contextlib.suppress(OSError):
                await self._listen()
                return

    def _note_failure(self, error: Exception) -> None:
        self._log_to_launcher(f"warning: no page is served: {internal_error(error)}")
        log_frames(self._log, error)
