"""docs/reliability.md names a test for each promise; here each of these tests exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| (?!promise|-)", line)]
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def functions_of(name):
    path = ROOT / "tests" / f"{name}.py"
    if not path.exists():
        return {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_promise_names_tests_that_exist(row):
    promise, tests, figure = row
    names = NAMED.findall(tests)
    assert names and promise and figure
    missing = [f"{file}::{name}" for file, name in names if name not in functions_of(file)]
    assert not missing


def test_the_page_is_a_table_of_promises():
    assert len(ROWS) > 20
    assert "no_such_test" not in functions_of("test_health")  # the check can fail
