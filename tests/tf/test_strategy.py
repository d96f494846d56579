"""`ParameterServerStrategy` through the bootstrap, with a script that is not aware of it, in real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interpreters import each_tensorflow
from scripted_cluster import Process, ScriptedCluster

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

SCRIPT = "strategy_train.py"


class Training:
    """A chief, two workers and some servers."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self.cluster = cluster

    def begin(self, servers: int) -> Process:
        """Start a new version. Return its chief once it has a complete model."""
        self.cluster.new_version(servers)
        for rank in range(2):
            self.cluster.start("worker", rank)
        return self.start_chief()

    def start_chief(self) -> Process:
        """Start another chief in the same version."""
        chief = self.cluster.start("chief", TF_PS_VERSION=str(self.cluster.version))
        chief.wait_for_message("restored")
        return chief

    def kill_server(self) -> None:
        """Kill the last of the servers."""
        next(one for one in reversed(self.cluster._processes) if one.name.startswith("ps")).kill()


def restored(chief: Process) -> tuple[str, int]:
    (message,) = chief.messages("restored")
    return message["how"], message["step"]


def finish(chief: Process, steps: int) -> None:
    """Check that it exits, and that each row was trained as often as the number of steps requires."""
    assert chief.wait_end() == 0, chief.output
    done = re.search(r"done at (\d+) seen=(\d+)\.\.(\d+)", chief.output)
    assert done is not None, chief.output
    assert int(done[1]) == steps
    assert steps // 16 <= int(done[2]) <= int(done[3]) <= -(-steps // 16)


@each_tensorflow
def test_a_restarted_chief_uses_the_live_model_and_a_planned_change_loses_no_step(
    tensorflow: Path, tmp_path: Path
) -> None:
    with ScriptedCluster(tensorflow, SCRIPT, tmp_path, workers=2, STEPS="160", STEP_SECONDS="0.02") as cluster:
        training = Training(cluster)
        chief = training.begin(servers=2)
        assert restored(chief) == ("fresh", 0)
        chief.wait_step(60)
        chief.kill()
        before = chief.step

        chief = training.start_chief()
        how, step = restored(chief)
        assert how == "live"
        assert step >= before > 50, "the last checkpoint is of step 50"
        chief.wait_step(step + 10)
        cluster.order(pause=True)
        assert chief.wait_end() == 75, chief.output
        assert "Traceback" not in chief.output
        saved = chief.messages("saved")[-1]["step"]
        assert saved >= chief.step

        chief = training.begin(servers=3)
        assert restored(chief) == ("checkpoint", saved), "no step is lost"
        finish(chief, 160)


@each_tensorflow
def test_a_chief_leaves_after_the_loss_of_a_server_and_resumes_from_the_newest_complete_checkpoint(
    tensorflow: Path, tmp_path: Path
) -> None:
    pace = {"STEPS": "200", "STEP_SECONDS": "0.02", "SAVE_EVERY": "20"}
    with ScriptedCluster(tensorflow, SCRIPT, tmp_path, workers=2, **pace) as cluster:
        training = Training(cluster)
        chief = training.begin(servers=2)
        chief.wait_for_message("saved", lambda message: message["step"] >= 60)
        training.kill_server()
        cluster.version += 1
        cluster.order()
        assert chief.wait_end() == 75, chief.output
        assert "Traceback" not in chief.output
        cluster.version -= 1

        paths = [message["path"] for message in chief.messages("saved")]
        # Each server has written its own part.
        parts = Path(paths[-1]).parent.glob(f"{Path(paths[-1]).name}.data-*")
        data = max(parts, key=lambda part: part.stat().st_size)
        data.write_bytes(data.read_bytes()[:100])
        whole = data.with_name(Path(paths[-2]).name)
        chief = training.begin(servers=1)
        # The script saves every 20 steps.
        assert restored(chief) == ("checkpoint", 20 * (len(paths) - 1))
        (message,) = chief.messages("restored")
        assert Path(message["path"]) == whole
        assert any(Path(paths[-1]).name in sentence for sentence in message["skipped"])
        assert data.exists(), "a damaged checkpoint is not deleted"
        finish(chief, 200)


def test_after_a_chief_that_dies_before_its_first_step_the_next_one_starts_anew(
    tensorflow: Path, tmp_path: Path
) -> None:
    with ScriptedCluster(tensorflow, SCRIPT, tmp_path, workers=1, STEPS="20") as cluster:
        cluster.new_version(1)
        cluster.start("worker")
        assert cluster.start("chief", DIE_BEFORE_STEPS="1").wait_end() == -9
        chief = cluster.start("chief")
        chief.wait_for_message("restored")
        assert restored(chief) == ("fresh", 0)
        finish(chief, 20)


@pytest.mark.parametrize("extra", ["extra:float64", "other:float32", ""])
def test_a_chief_that_restarts_with_other_variables_resumes_from_the_checkpoint(
    extra: str, tensorflow: Path, tmp_path: Path
) -> None:
    with ScriptedCluster(
        tensorflow, SCRIPT, tmp_path, STEPS="100", STEP_SECONDS="0.02", SAVE_EVERY="20", EXTRA="extra:float32"
    ) as cluster:
        cluster.new_version(1)
        cluster.start("worker")
        chief = cluster.start("chief")
        chief.wait_for_message("saved", lambda message: message["step"] >= 20)
        chief.kill()
        saved = chief.messages("saved")[-1]

        refused = cluster.start("chief", EXTRA=extra)
        assert refused.wait_end() == 75, refused.output
        assert refused.messages("restored") == [], "the position in the data is not restored either"
        assert "is not that of this script" in refused.output
        assert "extra:float32[4]" in refused.output or extra in refused.output

        chief = cluster.start("chief", EXTRA=extra)
        chief.wait_for_message("restored")
        assert restored(chief) == ("checkpoint", saved["step"])
        finish(chief, 100)


@each_tensorflow
def test_a_table_with_other_parts_than_the_checkpoint_is_not_trained(tensorflow: Path, tmp_path: Path) -> None:
    settings = {"LOOKUP": "mod", "STEPS": "100000", "SAVE_EVERY": "20", "STEP_SECONDS": "0.02"}
    with ScriptedCluster(tensorflow, SCRIPT, tmp_path, workers=2, **settings) as cluster:
        training = Training(cluster)
        chief = training.begin(servers=3)
        bounds = chief.wait_for_message("note", lambda message: "server_bounds" in message)["server_bounds"]
        assert bounds == {"least": 3, "most": 3, "table": "table", "parts": 3, "refused": 0}
        chief.wait_step(50)
        cluster.new_version(2)
        for rank in range(2):
            cluster.start("worker", rank)
        chief = cluster.start("chief", TF_PS_VERSION=str(cluster.version))
        assert chief.wait_end() == 75, chief.output
        note = chief.messages("note")[-1]
        assert note["server_bounds"] == {"least": 3, "most": 3, "table": "table", "parts": 3, "refused": 2}
        assert "is not restored: it holds 3 parts of the table 'table'" in note["text"]
        assert chief.messages("restored") == chief.messages("step") == chief.messages("saved") == []
        # The same number of servers reads it.
        chief = training.begin(servers=3)
        chief.wait_step(restored(chief)[1] + 5)
