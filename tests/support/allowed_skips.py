"""The tests that may be skipped where every test is expected to run, as in CI (`CI` is set to anything).

A skipped test shows nothing, so a run in CI fails if it skips a test that is not named here.
"""

from __future__ import annotations

import os
import re
import shutil

import pytest

ALLOWED = (
    # No shell but bash is part of every machine.
    r"test_application.py::test_a_shell_completes_with_the_printed_script\[(zsh|tcsh|fish)\]",
    # Flags of a torch that is newer than the installed one.
    r"test_cli_differential.py::.*",
    r"test_log_contract.py::test_the_prefix_template_of_the_command_line_names_the_host\[torchrun\]",
    r"test_worker_contract.py::test_a_virtual_local_rank_uses_the_variable_of_rocm_first\[torchrun\]",
    # A torch that is newer than the installed one, see `make test-torch`.
    r"test_torch_survivors.py::.*",
    # Names its interpreter by a variable, see `make test-tensorflow`.
    r"test_seams.py::test_the_tensorflow_of_tf_python_has_all_patched_attributes",
    # Some machines forbid user namespaces.
    r"test_jobs_in_namespaces.py::test_a_job_in_a_pid_namespace_is_listed_and_named_by_its_pid_here",
    # Compile a library, with the compiler of the system.
    *(() if shutil.which("cc") or shutil.which("gcc") else (r"test_device_(lab|shape).py::.*",)),
    # `make slurm`, `make browser` and `make prometheus` install Debian's packages; other systems may have none.
    *(
        ()
        if shutil.which("apt-get")
        else (
            r"test_slurm.py::.*",
            r"test_fake_launchers.py::test_mpirun",
            r"test_master_page.py::TestInABrowser::.*",
            r"test_prometheus.py::.*",
        )
    ),
)


def is_allowed(node_id: str) -> bool:
    """Whether the test with that node id may be skipped."""
    return any(re.search(f"(^|/){pattern}$", node_id) for pattern in ALLOWED)


class SkipGuard:
    """A pytest plugin that fails a run in CI for every skipped test that is not allowed to be."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and not is_allowed(report.nodeid):
            self.unexpected.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected and os.environ.get("CI"):
            terminalreporter.section("skipped, and not allowed to be (tests/support/allowed_skips.py)")
            for node_id in self.unexpected:
                terminalreporter.line(node_id)
