"""The codes of reasons, their texts, and their bounds. Every text that people read is here, and only here."""

from __future__ import annotations

import json

import msgspec
import pytest
from command_lines import run_python

from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.features.hangs.search.guilt import GuiltCode
from dlrover_run.features.node_check.text import NodeCheckCode
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.words import reasons
from dlrover_run.words.reasons import (
    Code,
    Reason,
    chain,
    codes,
    new_reasons,
    render,
    sentence,
    sentences,
    shown_names,
)
from tf_ps_runner.cluster.text import ClusterCode

TEXTS: list[tuple[tuple[Reason, ...], str]] = [
    ((Code.NODES_HERE(number=2),), "2 nodes are here"),
    (
        (Code.NODES_HERE(number=3), Code.LAST_CALL_OVER(seconds=30.0)),
        "3 nodes are here, and no other node came for 30 s",
    ),
    (
        (Code.TOO_FEW_NODES(seconds=600.0, number=1, least=2, names=("a",)),),
        "after 600 s only 1 of at least 2 nodes is here (a)",
    ),
    (
        (
            Code.TOO_FEW_NODES(seconds=600.0, number=2, least=4, names=("node 1 (a)", "node 3 (b)")),
            Code.MISSING(names=("node 0", "node 2")),
        ),
        "after 600 s only 2 of at least 4 nodes are here (node 1 (a) and node 3 (b)); missing: node 0 and node 2",
    ),
    ((Code.LOST(names=("node 1 (b)",), number=1),), "node 1 (b) was lost"),
    (
        (
            Code.LOST(names=("node 1 (b)", "node 2 (c)"), number=2),
            Code.TOO_FEW_NODES(seconds=600.0, number=1, least=2, names=("node 0 (a)",)),
            Code.MISSING(names=("node 1 (b)", "node 2 (c)")),
        ),
        (
            "node 1 (b) and node 2 (c) were lost; after 600 s only 1 of at least 2 nodes is here (node 0 "
            "(a)); missing: node 1 (b) and node 2 (c)"
        ),
    ),
    (
        (Code.TRAINING(number=2), Code.NODES_PREPARE(number=1)),
        "2 nodes train; 1 node imports what its workers need, and then takes part",
    ),
    ((Code.SCALED_UP(names=("node 2 (d)",), after=3, before=2),), "node 2 (d) joined, so 3 nodes train instead of 2"),
    ((Code.STOPPED_ON_REQUEST(by="ann@n01"),), "ann@n01 stopped the job"),
    ((Code.LEFT_ON_REQUEST(names=("node 1 (b)",), number=1),), "node 1 (b) left, as it was asked to"),
    ((Code.ASKED_TO_LEAVE(names=("node 1 (b)",), number=1),), "node 1 (b) was asked to leave"),
    (
        (Code.LEFT_ON_REQUEST(names=("node 0 (a)",), number=1), Code.NO_NODE_LEFT()),
        "node 0 (a) left, as it was asked to, and no node is here any more",
    ),
    (
        (Code.WORKER_FAILED(rank=2, node="node 1 (b)", what="could not be started: no such file"),),
        "rank 2 on node 1 (b) could not be started: no such file",
    ),
    ((Code.ALL_SUCCEEDED(),), "every worker succeeded"),
    (
        (Code.WORKER_FAILED(rank=1, node="node 0 (b)", what="was killed by SIGKILL"), Code.RESTARTS_USED(most=2)),
        "rank 1 on node 0 (b) was killed by SIGKILL; all 2 restarts were used",
    ),
    (
        (
            Code.WORKER_FAILED(rank=1, node="node 1 (b)", what="was killed by SIGKILL"),
            Code.RESTARTS_OF_WINDOW_USED(most=1, window=60.0),
        ),
        "rank 1 on node 1 (b) was killed by SIGKILL; the one restart of 60 s was used",
    ),
    (
        (Code.WORKER_FAILED(rank=1, node="node 1 (b)", what="was killed by SIGKILL"), Code.EARLY_FAILURES(number=3)),
        (
            "rank 1 on node 1 (b) was killed by SIGKILL; 3 rounds in succession failed before any worker "
            "had got through init_process_group or written a checkpoint, so the job stops early "
            "(--rdzv-conf early_failure_limit=0 goes on)"
        ),
    ),
    (
        (Code.RANK0_SILENT(node="node 0 (a)", seconds=600.0),),
        "node 0 (a) should have led the next round, and did not answer for 600 s",
    ),
    ((Code.NODES_OF(number=1, wanted="2 to 4"), Code.NAMED(names=("a",))), "1 node of 2 to 4 is here: a"),
    (
        (
            Code.NODES_OF(number=2, wanted="3"),
            Code.NAMED(names=("node 0 (vm)", "node 2 (vm)")),
            Code.MISSING(names=("node 1",)),
        ),
        "2 nodes of 3 are here: node 0 (vm) and node 2 (vm); missing: node 1",
    ),
    (
        (
            Code.NODES_OF(number=1, wanted="2 to 3"),
            Code.NAMED(names=("node 0 (a)",)),
            Code.MISSING(names=("node 1 (b)", "node 2 (c)")),
        ),
        "1 node of 2 to 3 is here: node 0 (a); missing: node 1 (b) and node 2 (c)",
    ),
    (
        (Code.TRAINING(number=3), Code.SPARE_OF(number=2, wanted=1)),
        "3 nodes train; this one waits to step in, 2 spares in all (1 asked for)",
    ),
    ((Code.TRAINING(number=1), Code.JOINS_NEXT_ROUND()), "1 node trains; this one takes part in the next round"),
    (
        (Code.TRAINING(number=2), Code.JOINS_AT_CHECKPOINT()),
        "2 nodes train; this one takes part after the next checkpoint",
    ),
    (
        (Code.RESIZED(after=2, before=4), AutoscaleCode.TRYING(size=4, to=2)),
        "2 nodes train instead of 4; the throughput of 2 nodes is tried",
    ),
    (
        (Code.SCALED_DOWN(by="ann@n01", after=1, before=2),),
        "ann@n01 asked for fewer nodes, so 1 node trains instead of 2",
    ),
    (
        (NodeCheckCode.RESULTS(answered=1, number=2), Code.MISSING(names=("b",))),
        "node check: 1 of 2 nodes have computed; missing: b",
    ),
    ((NodeCheckCode.CHECKING(number=3, round=0),), "checks 3 nodes, round 0"),
    (
        (NodeCheckCode.ANSWERS(round=0, answered=2, number=3), Code.MISSING(names=("c",))),
        "node check, round 0: 2 of 3 nodes have answered; missing: c",
    ),
    (
        (
            NodeCheckCode.DISMISSED(host="a", why="failed to compute 2 times: its check process was killed by SIGKILL"),
            Code.NO_NODE_LEFT(),
        ),
        (
            "a was dismissed by the node check: failed to compute 2 times: its check process was killed by "
            "SIGKILL, and no node is here any more"
        ),
    ),
    (
        (
            NodeCheckCode.DISMISSED(host="b", why="failed to compute 2 times: its check process was killed by SIGKILL"),
            Code.NODES_LEFT(number=3),
        ),
        (
            "b was dismissed by the node check: failed to compute 2 times: its check process was killed by "
            "SIGKILL; 3 nodes are left"
        ),
    ),
    (
        (
            NodeCheckCode.DISMISSED(host="b", why="computes wrongly: a product was off by 3"),
            Code.NODES_OF(number=1, wanted="2"),
            Code.NAMED(names=("a",)),
        ),
        "b was dismissed by the node check: computes wrongly: a product was off by 3; 1 node of 2 is here: a",
    ),
    ((NodeCheckCode.PASSED(), Code.NO_NODE_LEFT()), "the nodes have passed their check, and no node is here any more"),
    (
        (
            NodeCheckCode.DISMISSED(host="a", why="computes wrongly: a product was off by 3"),
            Code.NO_NODE_CAME(seconds=100.0, least=1),
        ),
        (
            "a was dismissed by the node check: computes wrongly: a product was off by 3; after 100 s none "
            "of at least 1 node is here"
        ),
    ),
    (
        (Code.TRAINING(number=2), NodeCheckCode.CHECKED_DURING_TRAINING()),
        "2 nodes train; meanwhile the node check looks at those who have come",
    ),
    ((Code.NO_REPORT_YET(),), "no node has reported yet"),
    ((Code.EVERY_NODE_LEFT(),), "every node has left"),
    (
        (Code.QUORUM(number=3),),
        "3 are needed, because the others may train with the master before this one",
    ),
    ((Code.NODES_HERE(number=1),), "the one node is here"),
    ((Code.RECOVERED(),), "the job was running when its coordinator began"),
    ((Code.ENDED_BY_SIGNAL(names=("node 1 (b)",), number=1, signal="SIGTERM"),), "node 1 (b) was ended by SIGTERM"),
    (
        (Code.ENDED_BY_SIGNAL(names=("node 1 (b)", "node 2 (c)"), number=2, signal="SIGTERM"),),
        "node 1 (b) and node 2 (c) were ended by SIGTERM",
    ),
    (
        (Code.LEFT_AFTER_FAILURE(names=("node 1 (b)",), number=1, what="rank 3 was killed by SIGKILL"),),
        "node 1 (b) left: rank 3 was killed by SIGKILL",
    ),
    ((Code.LEFT_ON_REQUEST(names=("a", "b"), number=2),), "a and b left, as they were asked to"),
    ((Code.TRAINING(number=2), Code.SPARE(number=1)), "2 nodes train; this one waits to step in, 1 spare in all"),
    (
        (Code.TRAINING(number=2), Code.NOT_REQUESTED()),
        "2 nodes train, and this node was not asked for (--spares is 0, --nnodes has all of its nodes): it waits in "
        "case one is lost",
    ),
    (
        (Code.TRAINING(number=1), NodeCheckCode.PASSED_JOIN()),
        "1 node trains; those that have passed the node check take part in the next round",
    ),
    ((NodeCheckCode.THIS_NODE(),), "checking this node before training"),
    (
        (NodeCheckCode.DISMISSED(host="a", why="fault"), NodeCheckCode.MORE_DISMISSED(number=2)),
        "a was dismissed by the node check: fault; and 2 others",
    ),
    ((Code.RESTARTS_USED(most=1),), "the one restart was used"),
    ((Code.RESTARTS_OF_WINDOW_USED(most=3, window=60.0),), "all 3 restarts of 60 s were used"),
    ((SurvivorsCode.KEPT(round=2, kept=3, of=4),), "3 of 4 workers keep their processes in round 2"),
    (
        (SurvivorsCode.NO_BLOCK(worker="rank 0"),),
        "rank 0 forms its group without a block of Survivor, so all workers restart with each round",
    ),
    (
        (SurvivorsCode.UNABLE(node="node 1 (b)"), SurvivorsCode.OLDER_TORCH(version="2.13.0")),
        "a worker on node 1 (b) cannot keep its process, so all workers restart with each round: torch 2.13.0 cannot "
        "form a process group in place; 2.14 and later can",
    ),
    (
        (SurvivorsCode.WITHOUT(node="node 1 (b)"),),
        "node 1 (b) was started without --survivors=keep, so all workers restart with each round",
    ),
    (
        (SurvivorsCode.TOO_LARGE(workers=2048, most=1024),),
        "2048 workers are more than the 1024 that keep their processes, so all restart with each round",
    ),
    ((SurvivorsCode.NO_UUID(round=2097152),), "round 2097152 has no uuid left, so all workers restart with it"),
]


@pytest.mark.parametrize(("given", "text"), TEXTS, ids=[text[:60] for _, text in TEXTS])
def test_the_text_of_a_chain(given: tuple[Reason, ...], text: str) -> None:
    assert render(given) == text
    assert msgspec.json.decode(msgspec.json.encode(given), type=tuple[Reason, ...]) == given


@pytest.mark.parametrize("kind", [Code, NodeCheckCode, SurvivorsCode])
def test_every_code_has_its_text_here(kind: type[reasons.ReasonCode]) -> None:
    shown = {one.code for given, _ in TEXTS for one in given}
    assert {code.code for code in kind} - shown <= {Code.SENTENCE.code}


def test_no_two_codes_are_the_same() -> None:
    for kind in (Code, NodeCheckCode):
        assert len(kind.__members__) == len(list(kind))


def test_a_reason_of_another_version_is_shown_by_its_code() -> None:
    assert render((Reason("unheard_of", {"number": 3}), Code.LOST())) == "unheard_of (number=3); lost"


def test_a_reader_that_has_imported_no_policy_shows_the_texts_of_all() -> None:
    """`why` printed "health.passed" of a job that is over."""
    reasons = (NodeCheckCode.PASSED(), ClusterCode.NODES_HERE(number=2), GuiltCode.STOPPED())
    script = (
        "import json, sys; from dlrover_run.words.reasons import Reason, render\n"
        "print(json.dumps([render((Reason(**one),)) for one in json.loads(sys.argv[1])]))"
    )
    done = run_python("-c", script, json.dumps([msgspec.to_builtins(one) for one in reasons]))
    assert json.loads(done.stdout) == [render((one,)) for one in reasons]


def test_a_long_chain_keeps_its_cause_and_its_last_reasons() -> None:
    long = chain((Code.RECOVERED(),), *(Code.NODES_HERE(number=number) for number in range(20)))
    assert len(long) == reasons.MAX_REASONS
    assert (long[0], long[-1]) == (Code.RECOVERED(), Code.NODES_HERE(number=19))
    assert codes(long)[:2] == ("recovered", "nodes_here")


def test_what_a_reason_holds_is_within_the_bounds_of_its_reader() -> None:
    given = (Code.LEFT_AFTER_FAILURE(names=["x" * 1000] * 9, number=9, what="y" * 100_000), *sentence("z" * 100_000))
    assert msgspec.json.decode(msgspec.json.encode(given), type=reasons.BoundedReasons) == given


def test_of_many_names_two_are_shown() -> None:
    assert shown_names(["a", "b", "c"]) == ("a", "b", "c")
    assert shown_names(["a", "b", "c", "d"]) == ("a", "b", "2 others")
    assert shown_names(["a", "b", "c"], 100) == ("a", "b", "98 others")


def test_a_text_that_ends_with_a_colon_introduces_the_next_one() -> None:
    lost = (ClusterCode.VERSION(number=2), ClusterCode.LOST(task="ps-0", what="was killed"), *sentence("ps-1 is next"))
    assert render(lost) == "version 2: ps-0 was killed; ps-1 is next"
    assert sentences(lost) == [lost[:2], lost[2:]]


def test_what_was_added_to_a_chain_is_new_where_it_is_a_sentence_of_its_own() -> None:
    before = (ClusterCode.VERSION(number=2), Code.NODES_HERE(number=2))
    restored = (*before, ClusterCode.RESTORED(step=5), ClusterCode.NO_STEP_LOST())
    assert new_reasons(before, restored) == restored[2:]
    assert new_reasons((), restored) == restored
    continued = (*before, Code.LAST_CALL_OVER(seconds=30.0))
    assert new_reasons(before, continued) == continued
    assert new_reasons(before, (Code.NODES_HERE(number=1),)) == (Code.NODES_HERE(number=1),)
    assert new_reasons(before, before) == before
