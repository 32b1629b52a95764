"""The quickstart notebook runs from top to bottom, and what it shows is what the code gives."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def read_notebook():
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


def printed(notebook) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_stored_outputs_are_clean():
    notebook = read_notebook()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    assert "equals float:   True" in printed(notebook)


@pytest.mark.slow
def test_notebook_runs():
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    client = pytest.importorskip("nbclient").NotebookClient(
        read_notebook(), timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    text = printed(client.execute())
    assert "4 of 4 attention modules run in integers" in text
    assert "loaded equals quantized: True" in text
    assert "restored equals float:   True" in text
