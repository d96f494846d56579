"""The modules that scripts import, with the queues of an agent and without an agent; no TensorFlow is started."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tf_ps_runner import hooks
from tf_ps_runner.agent.protocol import Answer, answer_line, read_line
from tf_ps_runner.agent.queue_service import QueueService
from tf_ps_runner.cluster.model import Role, TaskKey
from tf_ps_runner.data.order import Part
from tf_ps_runner.data.queue import SavedState
from tf_ps_runner.worker import checkpoints, partitioning, shard_state, shards, strategy
from tf_ps_runner.worker.agent_connection import TaskOrder
from tf_ps_runner.worker.checkpoint_index import UNPARTITIONED
from tf_ps_runner.worker.patching import MissingAttribute
from tf_ps_runner.worker.shards import AgentQueue, DatasetBatches, OpenPart, OwnQueue, Reader, ShardSpec, batches

CHIEF, WORKER = TaskKey(Role.CHIEF, 0), TaskKey(Role.WORKER, 0)


class Requests:
    """The requests of one process to the queues of an agent, as the lines that it would send."""

    def __init__(self, service: QueueService, task: TaskKey) -> None:
        self.service = service
        self.task = task

    def request(self, what: str, **fields: Any) -> dict[str, Any]:
        """The answer, once there is one."""
        request = read_line(json.dumps({"request": 1, "type": what, **fields}).encode())
        assert isinstance(request, tuple)
        answer: Future[Answer] = Future()
        self.service.ask(self.task, request[1], answer.set_result)
        found: dict[str, Any] = json.loads(answer_line(1, answer.result(30)))
        return found


@pytest.fixture
def service() -> QueueService:
    return QueueService()


@pytest.fixture(autouse=True)
def clear_batches() -> Any:
    yield
    shards._given.clear()
    shards._of_datasets.clear()
    shards._stepped.clear()


def queue(service: QueueService, spec: ShardSpec, task: TaskKey = WORKER) -> AgentQueue:
    return AgentQueue(Requests(service, task), "train", spec)


def left(service: QueueService, spec: ShardSpec) -> list[tuple[int, int]]:
    """The parts that another process gets after the parts of a dead one were returned."""
    service.gone(WORKER)
    return [(batch.begin, batch.end) for batch in batches(queue(service, spec, CHIEF), None)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_parts_come_in_the_same_order_with_and_without_an_agent(service: QueueService, shuffle: bool) -> None:
    spec = ShardSpec(size=103, shard=10, epochs=3, seed=5, shuffle=shuffle)
    alone = [(batch.begin, batch.end) for batch in batches(OwnQueue(spec), None)]
    assert alone == [(batch.begin, batch.end) for batch in batches(queue(service, spec), None)]
    assert sorted(alone) == sorted([(n, min(n + 10, 103)) for n in range(0, 103, 10)] * 3)
    if shuffle:
        assert alone[:11] != alone[11:22] != sorted(alone[11:22])


def test_data_shards_cut_parts_into_batches_that_do_not_cross_them() -> None:
    data = hooks.DataShards("train", size=25, shard_size=10, epochs=1)
    assert list(data.batches(4)) == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20), (20, 24), (24, 25)]
    assert list(hooks.DataShards("train", 25, 10)) == [(0, 10), (10, 20), (20, 25)]


@pytest.mark.parametrize(("field", "wrong"), [("size", 0), ("shard_size", -1), ("epochs", 1.5), ("size", True)])
def test_data_shards_refuse_invalid_numbers(field: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"DataShards train: {field} must be a whole number from 1, not {wrong}"):
        hooks.DataShards("train", **{"size": 10, "shard_size": 2, field: wrong})


@pytest.mark.parametrize(
    ("batch", "steps", "rest"),
    [
        # A batch is used once the next one is requested.
        pytest.param(4, ["next", "next"], [(4, 10)], id="next requested"),
        # On exit, a batch with which a step was trained is reported, and an untrained one is returned.
        pytest.param(4, ["next", "made_step", "before_leaving"], [(4, 10)], id="step made"),
        pytest.param(4, ["next", "made_step", "next", "before_leaving"], [(4, 10)], id="not trained with"),
        # A whole part may take several steps.
        pytest.param(None, ["next", "made_step", "before_leaving"], [(0, 10)], id="whole part"),
    ],
)
def test_used_batches_are_not_given_again(
    service: QueueService, batch: int | None, steps: list[str], rest: list[tuple[int, int]]
) -> None:
    spec = ShardSpec(size=10, shard=10)
    given = batches(queue(service, spec), batch)
    for step in steps:
        next(given) if step == "next" else getattr(shards, step)()
    assert left(service, spec) == rest


def test_a_claimed_batch_is_used_only_when_its_result_is_available(service: QueueService) -> None:
    spec = ShardSpec(size=20, shard=10)
    own_task = batches(queue(service, spec), 5)
    scheduled = []
    for _ in range(3):
        next(own_task)
        scheduled += shards.claim()
    assert [batch.begin for batch in scheduled] == [0, 5, 10]
    scheduled[1].used()
    scheduled[2].used()
    scheduled[2].used()
    assert left(service, spec) == [(0, 10), (15, 20)], "the first batch is in progress, and no later one is reported"


def test_the_result_of_a_claimed_batch_may_arrive_while_its_thread_waits_for_the_last_parts(
    service: QueueService,
) -> None:
    spec = ShardSpec(size=5, shard=5)
    own_task = batches(queue(service, spec), 5)
    next(own_task)
    (batch,) = shards.claim()
    threading.Timer(0, batch.used).start()
    assert list(own_task) == []


def test_results_out_of_order_are_reported_without_gaps() -> None:
    part = OpenPart(Part(3, 10, 20, 0))
    assert [part.cut(4) for _ in range(4)] == [(10, 14), (14, 18), (18, 20), None]
    assert part.finish(14) is None
    assert part.finish(10) == 18
    assert part.finish(18) == 20


def test_after_a_rollback_the_rest_of_a_part_is_dropped_and_another_one_taken(service: QueueService) -> None:
    spec = ShardSpec(size=20, shard=10)
    reader = Reader(queue(service, spec), 4)
    first = reader.next()
    assert first is not None
    Requests(service, CHIEF).request("rollback", state=None)
    first.used()
    again = reader.next()
    assert again is not None
    assert (again.begin, again.end) == (0, 4)


def test_a_queue_with_another_spec_is_refused(service: QueueService) -> None:
    assert queue(service, ShardSpec(10, 5)).take() is not None
    with pytest.raises(RuntimeError, match="DataShards train: queue train exists already and hands out"):
        queue(service, ShardSpec(10, 2)).take()


def test_a_prefetched_batch_is_not_used_before_the_next_one_is_given(service: QueueService) -> None:
    spec = ShardSpec(size=20, shard=20)
    reader, outgoing = Reader(queue(service, spec), 5), DatasetBatches()
    loaded = [outgoing.loaded(batch) for _ in range(4) if (batch := reader.next()) is not None]
    assert reader.at_end_of_part
    outgoing.give(loaded[0])
    outgoing.give(loaded[1])
    assert left(service, spec) == [(5, 20)]


def test_the_last_batch_of_a_part_is_used_when_the_next_one_is_requested(service: QueueService) -> None:
    spec = ShardSpec(size=5, shard=5)
    reader, outgoing = Reader(queue(service, spec), 5), DatasetBatches()
    batch = reader.next()
    assert batch is not None
    outgoing.give(outgoing.loaded(batch))
    outgoing.give(0)
    assert left(service, spec) == []


class SavedStates:
    """A chief's checkpoints, with the state of the queues beside each."""

    def __init__(self, service: QueueService, folder: Path) -> None:
        self.folder = folder
        self.line = Requests(service, CHIEF)

    def path(self, number: object) -> str:
        return str(self.folder / f"model.ckpt-{number}")

    def state(self, number: object) -> Path:
        """The file with the state of a checkpoint."""
        return Path(self.path(number) + shard_state.SUFFIX)

    def save(self, number: object, step: int = 0) -> None:
        shard_state.take(self.path(number))
        Path(self.path(number) + ".index").touch()
        shard_state.store(self.path(number), step or int(str(number)))

    def restore(self, step: int) -> None:
        shard_state.restore(self.path(step), step, "checkpoint")


@pytest.fixture
def states(service: QueueService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedStates:
    found = SavedStates(service, tmp_path)
    monkeypatch.setattr(shard_state, "agent", lambda: found.line)
    return found


def parts(*begins: int) -> list[tuple[int, int]]:
    """Whole parts of ten."""
    return [(begin, begin + 10) for begin in begins]


def use_one(service: QueueService, spec: ShardSpec) -> None:
    part = queue(service, spec).take()
    assert part is not None
    queue(service, spec).use(part.number, part.end)


SPEC = ShardSpec(size=40, shard=10)


@pytest.mark.parametrize(
    ("how", "step", "rest"), [("checkpoint", 1, (10, 20, 30)), ("live", 5, (20, 30)), ("fresh", 0, (0, 10, 20, 30))]
)
def test_the_state_of_the_data_is_restored_with_the_model(
    service: QueueService, states: SavedStates, how: str, step: int, rest: tuple[int, ...]
) -> None:
    use_one(service, SPEC)
    states.save(1)
    use_one(service, SPEC)
    shard_state.restore(states.path(1) if how == "checkpoint" else None, step, how)
    assert left(service, SPEC) == parts(*rest)


def test_the_state_is_taken_before_the_variables_are_read(service: QueueService, states: SavedStates) -> None:
    use_one(service, SPEC)
    shard_state.take(states.path(1))
    use_one(service, SPEC)
    shard_state.store(states.path(1), 1)
    states.restore(1)
    assert left(service, SPEC) == parts(10, 20, 30)


@pytest.mark.parametrize(
    ("damage", "clause"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_text('{"version":1,"que'), "is damaged"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda path: path.write_text("[]"), "is damaged"),
        (lambda path: path.write_text('{"queues":{}}' + " " * 70_000), "is damaged"),
    ],
)
def test_a_checkpoint_without_its_state_uses_that_of_the_newest_older_one(
    service: QueueService, states: SavedStates, capfd: pytest.CaptureFixture[str], damage: Any, clause: str
) -> None:
    for step in (1, 2, 3):
        use_one(service, SPEC)
        states.save(step)
    damage(states.state(3))
    states.restore(3)
    assert left(service, SPEC) == parts(20, 30)
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert f"model.ckpt-3 {clause}" in printed
    assert "that of model.ckpt-2 is used, and nothing is lost" in printed


def test_an_older_checkpoint_is_one_of_a_lower_step_whatever_its_number(
    service: QueueService, states: SavedStates
) -> None:
    for number, step in ((393, 100), (8, 200), (7, 300), (9, 400)):
        use_one(service, SPEC)
        states.save(number, step)
    states.state(7).unlink()
    shard_state.restore(states.path(7), 300, "checkpoint")
    assert left(service, SPEC) == parts(20, 30)


def test_the_state_of_a_checkpoint_of_another_name_is_neither_used_nor_removed(
    service: QueueService, states: SavedStates, capfd: pytest.CaptureFixture[str]
) -> None:
    use_one(service, SPEC)
    states.save("best-1", step=1)
    Path(states.path("best-1") + ".index").unlink()
    use_one(service, SPEC)
    states.save(2)
    assert states.state("best-1").exists()
    states.state(2).unlink()
    states.restore(2)
    assert left(service, SPEC) == parts(0, 10, 20, 30)
    assert capfd.readouterr().err == ""


def test_without_any_state_the_data_starts_anew_with_a_message(
    service: QueueService, states: SavedStates, capfd: pytest.CaptureFixture[str]
) -> None:
    use_one(service, SPEC)
    states.state(7).write_text("no json")
    states.restore(7)
    assert left(service, SPEC) == parts(0, 10, 20, 30)
    assert "all data is used from the beginning, and nothing is lost" in capfd.readouterr().err


def test_an_invalid_state_is_refused_and_the_data_starts_anew(
    service: QueueService, states: SavedStates, capfd: pytest.CaptureFixture[str]
) -> None:
    use_one(service, SPEC)
    states.save(1)
    state = json.loads(states.state(1).read_text())
    state["queues"]["train"]["next"] = 99
    states.state(1).write_text(json.dumps(state))
    states.restore(1)
    assert left(service, SPEC) == parts(0, 10, 20, 30)
    assert "more parts were handed out than there are" in capfd.readouterr().err


def test_a_script_without_data_shards_has_no_states_and_no_messages(
    states: SavedStates, capfd: pytest.CaptureFixture[str]
) -> None:
    states.save(1)
    states.restore(1)
    assert [path.name for path in states.folder.iterdir()] == ["model.ckpt-1.index"]
    assert capfd.readouterr().err == ""


def test_states_of_removed_checkpoints_are_removed(service: QueueService, states: SavedStates) -> None:
    use_one(service, SPEC)
    for step in (9, 10, 11):
        states.save(step)
    Path(states.path(9) + ".index").unlink()
    states.save(12)
    names = sorted(path.name for path in states.folder.glob("*.shards.json"))
    assert names == [f"model.ckpt-{step}.shards.json" for step in (10, 11, 12)]


def test_the_agent_can_read_a_stored_state(service: QueueService, states: SavedStates) -> None:
    use_one(service, SPEC)
    states.save(1)
    stored = json.loads(states.state(1).read_bytes())
    assert stored.pop("step") == 1
    msgspec.convert(stored, SavedState).check()


def test_a_process_knows_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"cluster": {"ps": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(stated))
    monkeypatch.setenv("WORKER_ID", "4")
    monkeypatch.setenv("TF_PS_VERSION", "3")
    assert (hooks.task(), hooks.rank(), hooks.version()) == (hooks.Task("worker", 1, 4), 1, 3)


def test_without_a_cluster_a_process_is_a_single_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CONFIG", "WORKER_ID", "TF_PS_VERSION"):
        monkeypatch.delenv(name, raising=False)
    assert (hooks.task(), hooks.version(), hooks.save()) == (hooks.Task("chief", 0, 0), 0, 0)


@pytest.mark.parametrize("wrong", ["{", "[]"])
def test_an_invalid_tf_config_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("TF_CONFIG", wrong)
    with pytest.raises(ValueError, match="TF_CONFIG is no JSON"):
        hooks.rank()


class Partitioned(list[Any]):
    name = "user_table"


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (Partitioned([1, 2]), ("user_table", 2)),
        (Partitioned([1]), ("user_table", 1)),
        ([SimpleNamespace(name="items/part_0:0"), SimpleNamespace(name="items/part_1:0")], ("items", 2)),
        ([SimpleNamespace(name="whole:0")], ("", 0)),
        (SimpleNamespace(name="whole:0"), ("", 0)),
    ],
)
def test_the_parts_of_a_table_are_counted(params: Any, count: tuple[str, int]) -> None:
    listed = params if isinstance(params, list) else [params]
    table = partitioning.table_of(listed, params, Partitioned)
    assert ((table.name, table.parts) if table is not None else ("", 0)) == count


@pytest.mark.parametrize(
    ("parts", "present", "safe"),
    [
        (3, 3, (3, 3)),
        (1, 1, (1, 1)),
        # Limited by the size of the table, or the script's own number: the checkpoint does not show which.
        (2, 3, (2, partitioning.MAX_SERVERS)),
        (4, 3, (1, partitioning.MAX_SERVERS)),
        (1, 3, (1, partitioning.MAX_SERVERS)),
    ],
)
def test_the_safe_numbers_of_servers_follow_from_the_parts(parts: int, present: int, safe: tuple[int, int]) -> None:
    assert partitioning.bounds(parts, present) == safe


def parts_at(*begins: int) -> frozenset[tuple[int, ...]]:
    return frozenset((begin, 0) for begin in begins)


TWO = partitioning.Table("table", 2, True, ("table/part_0", "table/part_1"))
ASKED = {"table/part_0": ("table", (0, 0)), "table/part_1": ("table", (6, 0))}
ONE = partitioning.Table("table", 1, False, ("table",))


@pytest.mark.parametrize(
    ("table", "asked", "held", "found"),
    [
        (TWO, ASKED, {"table": parts_at(0, 6)}, None),
        (TWO, ASKED, {"table": parts_at(0, 4, 8)}, (3, 2)),
        # The same number of parts, and different ones.
        (TWO, ASKED, {"table": parts_at(0, 8)}, (2, 2)),
        (TWO, ASKED, {"table": UNPARTITIONED}, (1, 2)),
        # A new table of the script.
        (TWO, ASKED, {"other": UNPARTITIONED}, None),
        (TWO, ASKED, None, (0, 2)),
        (TWO, {}, {"table": parts_at(0)}, None),
        (TWO, {"table/part_0": ("a", ()), "table/part_1": ("b", ())}, {}, None),
        (ONE, {"table": ("table", ())}, {"table": parts_at(0, 6)}, (2, 1)),
        (ONE, {"table": ("table", ())}, {"table": parts_at(0)}, None),
        (ONE, {"table": ("table", ())}, {"table": UNPARTITIONED}, None),
        (ONE, {"table": ("table", ())}, {}, None),
        (ONE, {"table": ("table", ())}, None, None),
        # Saved under another name, as averages are.
        (TWO, {part: ("mean", begin) for part, (_, begin) in ASKED.items()}, {"mean": parts_at(0, 4, 8)}, (3, 2)),
    ],
)
def test_the_parts_of_a_checkpoint_are_compared_with_those_of_the_graph(
    table: partitioning.Table, asked: Any, held: Any, found: tuple[int, int] | None
) -> None:
    expected = [partitioning.Mismatch("table", *found)] if found is not None else []
    assert partitioning.mismatches([table], asked, held) == expected


class Saver:
    """Like a saver of TensorFlow that has nothing to save."""

    saver_def = None

    def restore(self, sess: Any, save_path: Any) -> str:
        return f"{save_path} by TensorFlow itself"


def test_a_missing_attribute_of_a_saver_is_detected_before_it_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = SimpleNamespace(tensor_util=SimpleNamespace(__name__="tensor_util"))
    monkeypatch.setitem(sys.modules, "tensorflow.python.framework", framework)
    with pytest.raises(MissingAttribute, match="constant_value"):
        partitioning.change_saver(SimpleNamespace(Saver=Saver))


def test_a_missing_attribute_of_the_lookups_is_detected_before_they_are_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = SimpleNamespace(py_checkpoint_reader=SimpleNamespace(__name__="py_checkpoint_reader"))
    monkeypatch.setitem(sys.modules, "tensorflow.python.training", training)
    with pytest.raises(MissingAttribute, match="NewCheckpointReader"):
        partitioning.change_lookups(SimpleNamespace())


def test_a_saver_that_has_nothing_to_save_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_util = SimpleNamespace(constant_value=None.__class__)
    monkeypatch.setitem(sys.modules, "tensorflow.python.framework", SimpleNamespace(tensor_util=tensor_util))
    monkeypatch.setattr(partitioning, "is_chief", lambda: True)
    (patch,) = partitioning.change_saver(SimpleNamespace(Saver=Saver))
    graph = SimpleNamespace(**{partitioning._ATTRIBUTE: {"table": TWO}})
    assert patch.replacement(Saver(), SimpleNamespace(graph=graph), "ckpt-1") == "ckpt-1 by TensorFlow itself"  # type: ignore[operator]


def test_the_parts_of_a_deleted_checkpoint_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: str) -> dict[str, Any]:
        raise FileNotFoundError(path)

    refused: list[list[partitioning.Mismatch]] = []
    table = partitioning.Table("table", 2, True, begins=parts_at(0, 6), shape=(12, 4))
    tables = partitioning._Tables(seen={"table": table}, read_shapes=gone)
    monkeypatch.setattr(partitioning, "_tables", tables)
    monkeypatch.setattr(partitioning, "refuse", lambda path, found: refused.append(found))
    partitioning._compare_without_graph("/deleted/ckpt-1")
    assert refused == [[partitioning.Mismatch("table", 0, 2)]]


@pytest.mark.parametrize(
    ("found", "present", "servers"),
    [
        ([(3, 2)], 2, 3),
        ([(6, 4)], 2, 3),
        ([(5, 4)], 2, 0),
        ([(3, 2)], 3, 0),
        ([(0, 2)], 2, 0),
        ([(3, 2), (4, 2)], 2, 0),
        ([(3, 2), (6, 4)], 2, 3),
        ([(3, 2)], 0, 0),
    ],
)
def test_the_number_of_servers_that_creates_the_parts_of_the_checkpoint(
    found: list[tuple[int, int]], present: int, servers: int
) -> None:
    mismatches = [partitioning.Mismatch("table", *one) for one in found]
    assert partitioning.matching_servers(mismatches, present) == servers


class Tracked:
    def __init__(self, **children: Any) -> None:
        self.children = children

    def _trackable_children(self) -> dict[str, Any]:
        return self.children


def counter(value: int, integer: bool = True, rank: int = 0) -> Any:
    kind, shape = SimpleNamespace(is_integer=integer), SimpleNamespace(rank=rank)
    return SimpleNamespace(dtype=kind, shape=shape, numpy=lambda: value)


def test_the_step_is_that_of_the_variable_nearest_to_the_top() -> None:
    optimizer = Tracked(_iterations=counter(7), step=counter(1, integer=False))
    assert checkpoints.read_step([], [Tracked(model=Tracked(optimizer=optimizer))]) == 7
    assert checkpoints.read_step([], [Tracked(model=Tracked(optimizer=optimizer), global_step=counter(9))]) == 9


def test_the_step_counter_of_a_manager_has_precedence() -> None:
    assert checkpoints.read_step([SimpleNamespace(_step_counter=counter(3))], [Tracked(step=counter(9))]) == 3


def test_a_script_without_a_step_counter_has_no_step_even_with_cycles() -> None:
    one = Tracked(step=counter(3, rank=1))
    one.children["self"] = one
    assert checkpoints.read_step([], [one]) is None


def test_the_model_is_restored_before_a_part_is_taken(
    service: QueueService, states: SavedStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_one(service, SPEC)
    states.save(1)
    use_one(service, SPEC)
    monkeypatch.setattr(shards, "_before_take", [lambda: states.restore(1)])
    batch = next(batches(queue(service, SPEC), 5))
    assert (batch.begin, batch.end) == (10, 15), "the model is restored first, and its data with it"


def test_a_chief_that_waits_for_a_part_leaves_when_the_servers_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_from: list[bool] = []
    line = SimpleNamespace(wait_for=lambda is_reached: is_reached(TaskOrder(pause=True)))
    monkeypatch.setattr(strategy, "agent", lambda: line)
    monkeypatch.setattr(strategy, "_leave", lambda: left_from.append(shards.is_taking()))

    def take() -> None:
        # What was dropped is not used any more, so there would be no answer.
        strategy._watch()

    reader = Reader(SimpleNamespace(take=take, use=lambda number, offset: True), 1)
    assert reader.next() is None
    strategy._watch()
    assert left_from == [True]


def test_a_script_that_still_calls_rebuild_gets_a_hint() -> None:
    with pytest.raises(AttributeError, match="--preload"):
        hooks.rebuild  # noqa: B018
