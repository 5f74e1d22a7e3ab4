"""The notebook: stored executed, in step with its text form, and still giving what it shows."""

import ast
import copy
import re
import textwrap
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


def sources(notebook: Any) -> list[tuple[str, ...]]:
    """What `show_source` showed: name, file, line and code."""
    form = re.compile(r"`([\w.]+)`: (\S+), line (\d+)\n\n```python\n(.*)\n```", re.DOTALL)
    texts = [o.data.get("text/markdown", "") for o in outputs(notebook) if "data" in o]
    return [match.groups() for text in texts if (match := form.fullmatch(text))]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def sections(notebook: Any) -> dict[str, list[Any]]:
    """The cells below each heading, by heading; the last heading of a cell counts."""
    found: dict[str, list[Any]] = {}
    for cell in notebook.cells:
        headings = re.findall(r"^#+ (.*)$", cell.source, re.MULTILINE)
        if headings and cell.cell_type == "markdown":
            found[headings[-1]] = []
        found[list(found)[-1]].append(cell)
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a cell of text, without headings; each item of a list is one."""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    items = re.split(r"\n\s*\n|\n(?=- )", prose)
    parts = [part for item in items for part in re.split(r"(?<=[.?!])\s+", item.strip())]
    return [part for part in parts if re.search(r"\w", part)]


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


class TestText:
    """What STYLE asks of the notebook's text can be counted."""

    def test_cells_of_text_are_short(self, stored: Any) -> None:
        texts = [cell.source for cell in stored.cells if cell.cell_type == "markdown"]
        assert [text for text in texts if len(sentences(text)) > 5] == []

    def test_sentences_are_short(self, stored: Any) -> None:
        texts = [cell.source for cell in stored.cells if cell.cell_type == "markdown"]
        every = [sentence for text in texts for sentence in sentences(text)]
        assert len(every) > 80
        assert [sentence for sentence in every if len(sentence.split()) > 25] == []

    def test_sentences_are_counted(self) -> None:
        text = "# A heading. Two\n\nOne `a.b` and\nmore. Two, this.\n\n- Four\n- Five. Six!\n"
        assert len(sentences(text)) == 5


class TestShown:
    def test_sources_are_those_of_today(self, stored: Any) -> None:
        found = sources(stored)
        assert len(found) >= 20
        for name, file, _, code in found:
            lines = (REPOSITORY / file).read_text().splitlines()
            count = len(code.splitlines())
            windows = ("\n".join(lines[i : i + count]) for i in range(len(lines) - count + 1))
            assert any(textwrap.dedent(window) == code for window in windows), (
                f"{name} in {file} differs; renew the notebook: ./run notebook --renew"
            )

    def test_most_sources_are_of_the_model(self, stored: Any) -> None:
        files = [file for _, file, _, _ in sources(stored)]
        assert files.count("model_components.py") > len(files) / 2

    def test_each_requirement_has_a_source_and_a_result(self, stored: Any) -> None:
        parts = sections(stored)
        title, *requirements, last = parts
        assert title.startswith("What NeMo and Megatron")
        assert last == "Next steps"
        assert len(requirements) >= 14
        for name in requirements:
            part = copy.deepcopy(stored)
            part.cells = parts[name]
            assert sources(part), f"{name}: no source"
            results = [o for o in outputs(part) if o.output_type != "display_data"]
            pictures = [o for o in outputs(part) if "image/png" in o.get("data", {})]
            assert results or pictures, f"{name}: no result"

    def test_each_picture_has_a_text_of_its_own(self, stored: Any) -> None:
        texts = []
        for cell in code_cells(stored):
            for picture, below in zip(cell.outputs, cell.outputs[1:], strict=False):
                if "image/png" in picture.get("data", {}):
                    texts.append(picture.metadata["image/png"]["alt"])
                    assert below.data["text/markdown"] == f"*{texts[-1]}*"
        pictures = [o for o in outputs(stored) if "image/png" in o.get("data", {})]
        assert len(texts) == len(pictures) == len(set(texts))
        assert min(map(len, texts)) > 40


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
    assert sources(notebook) == sources(stored), "renew: ./run notebook --renew"
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
