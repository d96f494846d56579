"""The alert rules have the fields that Prometheus accepts, which refuses a whole file for one that it does not know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((Path(__file__).parent / "prometheus_rules.schema.json").read_text())


def read_rules() -> Any:
    return yaml.safe_load((ROOT / "examples" / "monitoring" / "alerts.yml").read_text())


def test_the_file_is_one_of_rules() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(read_rules(), SCHEMA)


@pytest.mark.parametrize(
    ("field", "value"), [("for", "10 minutes"), ("expr", ""), ("severity", "warning"), ("labels", {}), ("alert", None)]
)
def test_a_rule_with_another_field_or_value_is_refused(field: str, value: object) -> None:
    rules = read_rules()
    rules["groups"][0]["rules"][0][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(rules, SCHEMA)


def test_each_alert_has_its_own_name_and_brackets_that_match() -> None:
    rules = [rule for group in read_rules()["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        text = re.sub(r'"[^"]*"', "", rule["expr"])
        for opens, closes in ("()", "{}", "[]"):
            assert text.count(opens) == text.count(closes), rule["alert"]
        for annotation in rule["annotations"].values():
            assert set(re.findall(r"{{ *([^}]*?) *}}", annotation)) <= {"$labels.dlrover_job", "$value"}
