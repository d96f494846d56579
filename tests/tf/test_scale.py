"""`tf-ps-run scale`: what it asks of a job on this machine, what it says of the answer, and when it gives up."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from command_lines import isolate

from dlrover_run import exit_codes
from dlrover_run.policies.parameter_servers.model import DesiredReplicas
from dlrover_run.spec import SpecError
from tf_ps_runner import scale, scale_protocol
from tf_ps_runner.cli import main
from tf_ps_runner.command_line import options
from tf_ps_runner.scale_protocol import ScaleReply

LIMIT = 60.0
"""Seconds that a test waits for what it started before it gives up."""

Answer = Callable[[DesiredReplicas], "bytes | None"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and no variable of the machine that could change what is asked."""
    isolate(tmp_path, monkeypatch)
    for name in [name for name in os.environ if name.startswith(options.PREFIX)]:
        monkeypatch.delenv(name)


class FakeScaleServer:
    """Stands in for the agent of a job: listens at its name and answers each request with `answer`."""

    def __init__(self, run_id: str, answer: Answer) -> None:
        self.requests: list[DesiredReplicas] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(scale_protocol.socket_address(os.geteuid(), run_id))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as lines:
                request = scale_protocol.read_request(lines.readline())
                self.requests.append(request)
                if (answer := self._answer(request)) is None:
                    # Silent until the other side closes the connection.
                    lines.readline()
                else:
                    connection.sendall(answer)

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)


@pytest.fixture
def servers() -> Iterator[Callable[[str, Answer], FakeScaleServer]]:
    """Creates stand-ins for agents."""
    made: list[FakeScaleServer] = []

    def make(run_id: str, answer: Answer) -> FakeScaleServer:
        made.append(FakeScaleServer(run_id, answer))
        return made[-1]

    yield make
    for server in made:
        server.close()


def name_of(test: str) -> str:
    """A job's name that no other test run at the same time has."""
    return f"{test}-{os.getpid()}"


def test_an_accepted_request_is_printed_with_its_consequences(
    servers: Callable[[str, Answer], FakeScaleServer], capsys: pytest.CaptureFixture[str]
) -> None:
    job = name_of("heard")
    server = servers(
        job, lambda request: scale_protocol.reply_line(ScaleReply(granted=True, text="a new set is started"))
    )
    assert main(["scale", "--ps=3", "--workers=2", f"--rdzv-id={job}"]) == exit_codes.SUCCESS
    assert server.requests == [DesiredReplicas(ps=3, workers=2)]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out == f"tf-ps-run scale: the job {job!r} accepts: a new set is started.\n"


def test_a_number_that_is_not_given_is_left_as_it_is(servers: Callable[[str, Answer], FakeScaleServer]) -> None:
    job = name_of("one")
    server = servers(job, lambda request: scale_protocol.reply_line(ScaleReply(granted=True)))
    assert main(["scale", "--workers=0", f"--rdzv-id={job}"]) == exit_codes.SUCCESS
    assert server.requests == [DesiredReplicas(ps=None, workers=0)]


def test_a_refused_request_is_a_sentence_and_exit_code_1(
    servers: Callable[[str, Answer], FakeScaleServer], capsys: pytest.CaptureFixture[str]
) -> None:
    job = name_of("refused")
    servers(
        job, lambda request: scale_protocol.reply_line(ScaleReply(granted=False, text="there is no \x1b[2Jroom now"))
    )
    assert main(["scale", "--ps=5", f"--rdzv-id={job}"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        f"tf-ps-run scale: the job {job!r} refuses: there is no [2Jroom now.\n",
    )


def test_a_job_that_does_not_answer_is_waited_for_until_the_timeout(
    servers: Callable[[str, Answer], FakeScaleServer], capsys: pytest.CaptureFixture[str]
) -> None:
    job = name_of("silent")
    servers(job, lambda request: None)
    assert main(["scale", "--ps=2", f"--rdzv-id={job}", "--timeout=0.2"]) == 1
    assert "has not received the request within 0.2 s (--timeout)" in capsys.readouterr().err


def test_a_job_that_ends_meanwhile_has_not_received_the_request(
    servers: Callable[[str, Answer], FakeScaleServer], capsys: pytest.CaptureFixture[str]
) -> None:
    job = name_of("ended")
    servers(job, lambda request: b"")
    assert main(["scale", "--ps=2", f"--rdzv-id={job}"]) == 1
    assert capsys.readouterr().err == f"tf-ps-run scale: the job {job!r} ended before it received the request.\n"


def test_an_invalid_answer_is_reported(
    servers: Callable[[str, Answer], FakeScaleServer], capsys: pytest.CaptureFixture[str]
) -> None:
    job = name_of("strange")
    servers(job, lambda request: b"what?\n")
    assert main(["scale", "--ps=2", f"--rdzv-id={job}"]) == 1
    assert "is not a tf-ps-run of this version" in capsys.readouterr().err


def test_a_job_that_is_not_here_may_be_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    job = name_of("absent")
    assert main(["scale", "--ps=2", f"--rdzv-id={job}"]) == 1
    printed = capsys.readouterr().err
    assert f"no job {job!r} of yours runs on this machine" in printed
    assert "--rdzv-backend" in printed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--ps=0", "tf-ps-run scale: --ps '0' is out of range"),
        ("--ps=2 train.py", "train.py"),
        ("--pss=2", "--pss"),
        ("--ps", "--ps"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", *text.split()]) == exit_codes.BAD_COMMAND_LINE
    *sentences, hint = capsys.readouterr().err.splitlines()
    assert sentence in (sentences[0] if sentences else hint)
    assert len(sentences) <= 1


def listed(proc: Path, *names: str) -> Path:
    """A /proc that shows unix sockets of these names."""
    lines = ["Num       RefCount Protocol Flags    Type St Inode Path"]
    lines += [f"0000000000000000: 00000002 00000000 00010000 0001 01 1234{n} {name}" for n, name in enumerate(names)]
    lines.append("0000000000000000: 00000002 00000000 00000000 0002 01 99999")
    (proc / "net").mkdir(parents=True)
    (proc / "net" / "unix").write_text("\n".join(lines) + "\n")
    return proc


def test_the_one_job_of_a_user_needs_no_name(tmp_path: Path) -> None:
    mine, anothers = "@tf-ps-run-1000-ads of today", "@tf-ps-run-1001-other"
    proc = listed(tmp_path, "/run/some.sock", anothers, mine, mine, "@tf-ps-run-0f0f0f", "@dlrover")
    assert scale.only_job(1000, proc) == "ads of today"


def test_several_jobs_are_listed_so_that_one_can_be_named(tmp_path: Path) -> None:
    proc = listed(tmp_path, "@tf-ps-run-1000-b", "@tf-ps-run-1000-a", "@tf-ps-run-1000-\x1b[2Jc")
    with pytest.raises(scale.ScaleFailed, match="give --rdzv-id, one of a, b"):
        scale.only_job(1000, proc)
    with pytest.raises(scale.ScaleFailed, match="no job of yours runs on this machine"):
        scale.only_job(1002, proc)


def test_a_job_that_listens_is_found_by_its_user(servers: Callable[[str, Answer], FakeScaleServer]) -> None:
    job = name_of("found")
    servers(job, lambda request: None)
    assert job in scale.job_names(os.geteuid(), Path("/proc"))


def test_the_longest_name_of_a_job_has_a_socket_of_its_own() -> None:
    one, other = scale_protocol.socket_address(0, "a" * 255), scale_protocol.socket_address(0, "a" * 254 + "b")
    assert one != other
    assert max(len(one), len(other)) <= 108
    assert scale_protocol.socket_address(0, "a" * 60) == b"\0tf-ps-run-0-" + b"a" * 60


def test_an_invalid_line_is_no_request() -> None:
    assert scale_protocol.read_request(scale_protocol.request_line(DesiredReplicas(ps=2))) == DesiredReplicas(ps=2)
    for line in (b"", b"{", b"[]", b'{"ps":-1}', b'{"ps":2,"more":1}', b'{"ps":1e9}', b'{"ps":"2"}'):
        with pytest.raises(msgspec.DecodeError):
            scale_protocol.read_request(line)


@pytest.mark.parametrize("backend", [["--rdzv-backend=master"], []])
def test_a_remote_request_is_sent_to_the_master_that_the_flags_name(
    monkeypatch: pytest.MonkeyPatch, backend: list[str]
) -> None:
    from tf_ps_runner import scale_remote

    sent = []

    async def request_remotely(spec: object, request: DesiredReplicas, timeout: float, warn: object) -> ScaleReply:
        sent.append((spec, request, timeout))
        return ScaleReply(granted=True, text="a new set is started")

    monkeypatch.setattr(scale_remote, "request_remotely", request_remotely)
    monkeypatch.setenv("DLROVER_RDZV_TOKEN", "a secret")
    words = ["scale", "--ps=3", *backend, "--rdzv-endpoint=node0:4000", "--rdzv-id=ads", "--timeout=5"]
    assert main(words) == exit_codes.SUCCESS
    ((spec, request, timeout),) = sent
    assert isinstance(spec, scale_remote.JobSpec)
    assert spec.master is not None
    assert (spec.run_id, spec.master.host, spec.master.port, spec.master.token) == ("ads", "node0", 4000, "a secret")
    # A client starts no master, and waits for one until its own timeout.
    assert (spec.master.is_host, spec.rules.join_timeout, request, timeout) == (False, 5, DesiredReplicas(ps=3), 5)
    assert "DLROVER_RDZV_TOKEN" not in os.environ


def test_a_failed_remote_request_is_a_sentence_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tf_ps_runner import scale_remote

    async def request_remotely(*_: object) -> ScaleReply:
        raise scale_protocol.ScaleFailed("no node of a job 'ads' is here.")

    monkeypatch.setattr(scale_remote, "request_remotely", request_remotely)
    words = ["scale", "--ps=3", "--rdzv-backend=master", "--rdzv-endpoint=node0", "--rdzv-id=ads"]
    assert main(words) == 1
    assert capsys.readouterr().err == "tf-ps-run scale: no node of a job 'ads' is here.\n"


def test_a_package_may_not_suit_remote_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from tf_ps_runner import scale_remote

    async def request_remotely(*_: object) -> ScaleReply:
        raise SpecError("the installed protobuf does not fit.")

    monkeypatch.setattr(scale_remote, "request_remotely", request_remotely)
    words = ["scale", "--ps=3", "--rdzv-backend=master", "--rdzv-endpoint=node0"]
    assert main(words) == exit_codes.BAD_COMMAND_LINE
