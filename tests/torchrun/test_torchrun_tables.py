"""Every flag, variable and key of each compared torchrun is here too, or the docs name its absence.

The tables come from `scripts/record_torchrun.py`; torch itself is not needed.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from support.torchrun_tables import VERSIONS, Torchrun, default_of, differences, takes_a_value, torchrun

from dlrover_run import __file__ as package
from dlrover_run.api import LaunchConfig
from dlrover_run.cli import parse
from dlrover_run.command_line import rdzv_keys
from dlrover_run.command_line.flags import BY_DEST, TABLE
from dlrover_run.spec import SpecError

ROOT = Path(__file__).parents[2]

READ = {
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "LOGLEVEL",
    "OMP_NUM_THREADS",
    "PYTHON_EXEC",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
"""Variables with the same meaning for dlrover-run as for torchrun."""

SET_FOR_WORKERS = {
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE",
}
"""Variables that torchrun's agent sets, and ours too."""

WITHOUT_EFFECT = {
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_ETCD_BINARY_PATH",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_ELASTIC_WORKER_IDENTICAL",
    "USE_LIBUV",
}
"""Variables that dlrover-run does not read; docs/torchrun-differences.md names each."""


@pytest.fixture(scope="module", params=VERSIONS)
def theirs(request: pytest.FixtureRequest) -> Torchrun:
    """The recorded table of one torchrun."""
    table = torchrun(request.param)
    assert table.version == request.param
    return table


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def test_every_flag_of_torchrun_is_here(theirs: Torchrun) -> None:
    """With its spellings, its variable, its default and its choices."""
    found = {dest: differences(row, BY_DEST.get(dest)) for dest, row in theirs.flags.items()}
    assert {dest: wrong for dest, wrong in found.items() if wrong} == {}


def test_every_flag_that_is_listed_as_torchruns_is_in_the_torchruns_since_then(theirs: Torchrun) -> None:
    def number(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:2]]

    offered = {flag.dest for flag in TABLE if not flag.extension and number(flag.since) <= number(theirs.version)}
    assert offered == theirs.flags.keys()


def test_a_value_of_the_wrong_type_is_refused(theirs: Torchrun) -> None:
    """As a flag and as a variable, where torchrun's parser wants a number or one of a few words."""
    checked = []
    for dest, row in theirs.flags.items():
        if not takes_a_value(row) or not (row.get("type") in ("int", "float") or row.get("choices")):
            continue
        checked.append(dest)
        with pytest.raises(SpecError):
            parse([f"{row['spellings'][-1]}=nonsense", "train.py"], {})
        if row["variable"] is not None:
            with pytest.raises(SpecError, match=row["variable"]):
                parse(["train.py"], {row["variable"]: "nonsense"})
    assert {"max_restarts", "node_rank", "numa_binding"} <= set(checked)


def test_an_explicit_default_changes_nothing(theirs: Torchrun) -> None:
    implied = msgspec.structs.replace(parse(["train.py"], {}), run_id="")
    # An explicit port keeps one node on static; the name of a single-node job is a new one.
    for dest, row in theirs.flags.items():
        if takes_a_value(row) and default_of(row) and dest not in ("master_port", "rdzv_id"):
            given = parse([f"{row['spellings'][-1]}={row['default']}", "train.py"], {})
            assert msgspec.structs.replace(given, run_id="") == implied


def test_every_variable_is_read_or_set_or_documented_to_have_no_effect(theirs: Torchrun) -> None:
    assert set(theirs.variables) - READ - SET_FOR_WORKERS - WITHOUT_EFFECT == set()
    names = {name for path in Path(package).parent.rglob("*.py") for name in READ if name in path.read_text()}
    assert names == READ
    differences = (ROOT / "docs/torchrun-differences.md").read_text()
    assert {name for name in WITHOUT_EFFECT if f"`{name}" not in differences} == set()


def test_every_own_flag_is_named_among_the_differences() -> None:
    lines = (ROOT / "docs/torchrun-differences.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| flags of our own |"))
    assert re.findall(r"`--([a-z-]+)`", row) == [flag.name for flag in TABLE if flag.extension]


def test_every_key_of_rdzv_conf_is_known(theirs: Torchrun) -> None:
    assert set(theirs.rendezvous_keys) - {key.name for key in rdzv_keys.TABLE} == set()


def test_launch_config_has_every_field_in_the_same_order(theirs: Torchrun) -> None:
    assert [field.name for field in dataclasses.fields(LaunchConfig)][: len(theirs.launch_config)] == list(
        theirs.launch_config
    )


def test_a_table_is_read_from_the_sources_and_a_new_kind_of_value_is_an_error(tmp_path: Path) -> None:
    """A value that the recorder cannot read must not be missing from the table without an error."""
    parser = """
        def get_args_parser():
            parser = ArgumentParser()
            parser.add_argument("-n", "--new-flag", "--new_flag", action=env, type=int, default={default})
    """
    files = {
        "torch/version.py": "__version__ = '9.1.2+cpu'",
        "torch/distributed/launcher/api.py": "class LaunchConfig:\n    one: int = 1",
        "torch/distributed/elastic/agent/server/local_elastic_agent.py": "worker_env = {'RANK': '0'}",
        "scripts/record_torchrun.py": (ROOT / "scripts/record_torchrun.py").read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "tests").mkdir()
    for default, code in (("7", 0), ("compute()", 1)):
        (tmp_path / "torch/distributed/run.py").write_text(textwrap.dedent(parser.format(default=default)))
        script = tmp_path / "scripts/record_torchrun.py"
        done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
    recorded = (tmp_path / "tests/torchrun/9.1.2.json").read_text()
    assert "PET_NEW_FLAG" in recorded
    assert '"default": 7' in recorded
