"""The codes of reasons and their bounds. The golden file `reasons.txt` has the text of every code."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path

import msgspec
import pytest
from support.command_lines import run_python
from support.golden import assert_answers

from dlrover_run.features.autoscale.text import AutoscaleCode
from dlrover_run.features.hangs.search.codes import GuiltCode
from dlrover_run.features.hangs.stragglers.text import StragglerCode
from dlrover_run.features.inspect.answers import WhyCode
from dlrover_run.features.node_check.text import NodeCheckCode
from dlrover_run.features.survivors.text import SurvivorsCode
from dlrover_run.words import reasons
from dlrover_run.words.reasons import (
    Code,
    Reason,
    ReasonCode,
    chain,
    codes,
    new_reasons,
    render,
    sentence,
    sentences,
    shown_names,
)
from tf_ps_runner.cluster.size_text import ServersCode, WorkersCode
from tf_ps_runner.cluster.text import ClusterCode

GOLDEN = Path(__file__).with_name("reasons.txt")

KINDS = (
    Code,
    NodeCheckCode,
    SurvivorsCode,
    AutoscaleCode,
    GuiltCode,
    StragglerCode,
    WhyCode,
    ClusterCode,
    WorkersCode,
    ServersCode,
)


def parse(chain: str) -> tuple[Reason, ...]:
    """Return the chain of a question of the golden file, as `lost(number=1), no_node_left()`."""
    tree = ast.parse(f"[{chain}]", mode="eval").body
    assert isinstance(tree, ast.List)
    calls = [node for node in tree.elts if isinstance(node, ast.Call)]
    return tuple(
        Reason(ast.unparse(call.func), {key.arg: ast.literal_eval(key.value) for key in call.keywords if key.arg})
        for call in calls
    )


def test_the_text_of_each_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    chains = [parse(question) for question in assert_answers(GOLDEN, lambda question: render(parse(question)))]
    monkeypatch.undo()
    time.tzset()
    for given in chains:
        assert msgspec.json.decode(msgspec.json.encode(given), type=tuple[Reason, ...]) == given
    assert {code.code for kind in KINDS for code in kind} == {reason.code for given in chains for reason in given}


_FIELD = re.compile(r"{(\w+)(?::([^{}]*(?:{[^}]*}[^{}]*)*))?}")

_COUNTS = ("number", "least", "answered")
"""Parameters that are a number of things where the template has no noun for them."""


@pytest.mark.parametrize("code", [code for kind in KINDS for code in kind], ids=lambda code: code.code)
def test_the_text_of_a_code_is_right_for_one_thing(code: ReasonCode) -> None:
    params: dict[str, object] = {}
    for name, form in _FIELD.findall(code.value):
        if form.startswith("#") or "|" in form or name in _COUNTS:
            params[name] = 1
        elif form.endswith(("g", "f")):
            params[name] = 30.0
        else:
            params[name] = {"join": ("a",), "clock": "2026-11-27T16:45:00+00:00"}.get(form, params.get(name, "x"))
    text = render((code(**params),))
    assert not re.search(r"\b1 (\w+ ){0,2}(are|have|were|do|others|nodes|workers|tasks|servers|restarts)\b", text), text


def test_no_two_codes_are_the_same() -> None:
    for kind in KINDS:
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
