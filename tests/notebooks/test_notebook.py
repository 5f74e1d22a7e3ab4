"""The notebook: stored executed, in step with its text form, and still giving what it shows."""

import ast
import copy
from pathlib import Path
from typing import Any

import jupytext
import pytest
from nbformat.v4 import new_output

from notebooks.renew import NOTEBOOK, TEXT, execute, machine_paths, normalise, numbers
from tests.scripts import REPOSITORY


@pytest.fixture(scope="module")
def stored() -> Any:
    return jupytext.read(NOTEBOOK)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def definitions(source: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(source).body if isinstance(node, kinds)}


class TestStored:
    def test_executed_from_top_to_bottom_without_a_fault(self, stored: Any) -> None:
        counts = [cell.execution_count for cell in code_cells(stored)]
        assert counts == list(range(1, len(counts) + 1))
        kinds = {output.output_type for cell in code_cells(stored) for output in cell.outputs}
        assert kinds == {"stream", "execute_result", "display_data"}

    def test_nothing_on_standard_error(self, stored: Any) -> None:
        outputs = [output for cell in code_cells(stored) for output in cell.outputs]
        assert [o.text for o in outputs if o.get("name") == "stderr"] == []

    def test_in_step_with_its_text_form(self, stored: Any) -> None:
        text = jupytext.read(TEXT)
        assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
            (cell.cell_type, cell.source) for cell in text.cells
        ]
        assert [cell.metadata for cell in stored.cells] == [cell.metadata for cell in text.cells]

    def test_names_no_path_of_a_machine(self, stored: Any) -> None:
        assert machine_paths(stored) == []

    def test_a_machine_s_path_would_be_noticed(self, stored: Any) -> None:
        spoilt = copy.deepcopy(stored)
        output = next(o for cell in code_cells(spoilt) for o in cell.outputs if "text" in o)
        output.text += "in /home/me/data"
        assert machine_paths(spoilt) == ["/home/me/data"]

    def test_small_enough_to_read_on_the_web(self) -> None:
        assert NOTEBOOK.stat().st_size < 700_000

    def test_cells_are_short(self, stored: Any) -> None:
        assert max(len(cell.source.splitlines()) for cell in code_cells(stored)) <= 22

    def test_every_part_shows_something(self, stored: Any) -> None:
        shown = {output.output_type for cell in code_cells(stored) for output in cell.outputs}
        assert "display_data" in shown
        assert len(numbers(stored)) >= 10
        pictures = [
            o
            for cell in code_cells(stored)
            for o in cell.outputs
            if "image/png" in o.get("data", {})
        ]
        assert len(pictures) >= 7


class TestImports:
    def test_model_components_is_imported_and_not_copied(self) -> None:
        text = TEXT.read_text()
        assert "from model_components import" in text
        for module in ("model_components.py", "model_pretrain.py", "model_finetune.py"):
            theirs = definitions((REPOSITORY / module).read_text())
            assert theirs
            assert not definitions(text) & theirs, module


class TestNormalise:
    def test_takes_out_what_differs(self, stored: Any, tmp_path: Path) -> None:
        notebook = copy.deepcopy(stored)
        cell = next(cell for cell in code_cells(notebook) if cell.outputs)
        shown = cell.outputs[0].text
        cell.metadata["execution"] = {"iopub.status.busy": "2026-11-21"}
        cell.outputs[0].text += f"{tmp_path}/pretrain and {REPOSITORY}/data"
        cell.outputs.append(new_output("stream", name="stderr", text="a warning"))
        assert normalise(notebook, tmp_path) == ["a warning"]
        assert cell.outputs[0].text == f"{shown}runs/pretrain and data"
        cell.outputs[0].text = shown
        assert notebook == stored


@pytest.mark.long
def test_gives_what_it_shows(
    stored: Any, mnist_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MNIST, as the stored one. Counts are exact; losses and accuracies vary with the CPU."""
    monkeypatch.setenv("MNIST_DATA_DIR", str(mnist_dir))
    notebook = copy.deepcopy(stored)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    execute(notebook, tmp_path)
    assert normalise(notebook, tmp_path) == []
    assert machine_paths(notebook) == []
    expected, found = numbers(stored), numbers(notebook)
    assert [list(part) for part in found] == [list(part) for part in expected]
    for before, after in zip(expected, found, strict=True):
        for name, value in before.items():
            if isinstance(value, int):
                assert after[name] == value, name
            elif name == "accuracy":
                assert after[name] == pytest.approx(value, abs=0.02)
            else:
                assert after[name] == pytest.approx(value, rel=0.3), name
