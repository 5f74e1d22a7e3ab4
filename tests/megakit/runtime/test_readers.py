"""readers.md lists every place that could read a checkpoint's files; how a file is read."""

import ast
import errno
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megakit.errors import USE_ANOTHER, UserError, brief, first, printable, reading

#: What a load passes through.
SEARCHED = (
    "megatron/core/dist_checkpointing",
    "megatron/core/extensions",
    "megatron/core/msc_utils.py",
    "megatron/core/optimizer",
    "megatron/core/transformer",
    "nemo/lightning",
    "nemo/collections/llm/modelopt",
    "torch/distributed/checkpoint",
    "lightning/fabric/plugins/io",
    "lightning/fabric/utilities/cloud_io.py",
    "lightning/pytorch/trainer/connectors/checkpoint_connector.py",
    "lightning/pytorch/utilities/migration",
)
#: Last names of functions that open a file, read a serialized value, or import by a name.
READS = {
    *("open", "open_file", "fdopen", "create_stream", "safe_open", "mmap", "memmap", "fromfile"),
    *("load", "loads", "load_file", "load_json", "load_yaml", "safe_load", "unsafe_load"),
    *("full_load", "loadtxt", "read_csv", "read_text", "read_bytes", "from_file", "genfromtxt"),
    *("Unpickler", "_Unpickler", "unpickle", "from_pretrained"),
    *("import_module", "__import__", "locate", "get_class", "find_spec", "exec_module"),
}
#: Of these, a method of the same name is something else: `module.eval()`.
READS_BY_PLAIN_NAME = {"eval", "exec", "compile"}

SCOPES = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)

Place = tuple[str, str, str]


def called(function: ast.expr) -> str:
    """The dotted name of what is called, as far as it is written there."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return f"{called(function.value)}.{function.attr}"
    return "..."


def places_in(source: str, file: str) -> Iterator[Place]:
    """File, function and call of each place in a source."""

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[Place]:
        for child in ast.iter_child_nodes(node):
            scope = (child.name,) if isinstance(child, SCOPES) else ()
            if isinstance(child, ast.Call):
                name = called(child.func)
                if name.rpartition(".")[2] in READS or name in READS_BY_PLAIN_NAME:
                    yield file, ".".join(inside) or "(module)", name
            yield from visit(child, (*inside, *scope))

    yield from visit(ast.parse(source), ())


def installed_places() -> set[Place]:
    """Every place in what is installed."""
    found: set[Place] = set()
    for searched in SEARCHED:
        package = searched.partition("/")[0]
        spec = importlib.util.find_spec(package)  # of a package at the top, imports nothing
        assert spec is not None
        assert spec.submodule_search_locations is not None
        root = Path(next(iter(spec.submodule_search_locations))).parent
        path = root / searched
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert files, searched
        for file in files:
            found |= set(places_in(file.read_text(), str(file.relative_to(root))))
    return found


def listed_places() -> dict[Place, str]:
    """The rows of the document's tables: place and guard."""
    listed: dict[Place, str] = {}
    for line in Path(__file__).with_name("readers.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 3:
            continue
        file = cells[0].strip("`")
        for entry in cells[1].split("<br>"):
            function, calls = entry.split(":", 1)
            for call in re.findall(r"`([^`]+)`", calls):
                listed[file, function.strip().strip("`"), call] = cells[2]
    return listed


def test_every_place_is_listed_and_every_row_is_a_place() -> None:
    installed, listed = installed_places(), listed_places()
    assert len(installed) > 50
    assert sorted(installed - listed.keys()) == [], "places that readers.md does not list"
    assert sorted(listed.keys() - installed) == [], "rows of readers.md without a place"
    assert all(listed.values())


def test_whatever_a_parser_raises_is_one_printable_line() -> None:
    with pytest.raises(UserError) as caught, reading("a\nfile", "Use another."):
        raise RecursionError("too\x1bdeep\nin line 7")
    expected = "a\\nfile: cannot be read (RecursionError: too\\x1bdeep). Use another."
    assert caught.value.problems == [expected]


def test_what_the_system_refuses_is_not_called_damage() -> None:
    with pytest.raises(UserError) as caught, reading("weights", USE_ANOTHER):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert (
        str(caught.value) == "weights: cannot be read (Permission denied). Use another checkpoint."
    )


def test_texts_are_printable_and_short() -> None:
    kept = "r\u00e9sum\u00e9 \u00a0\u2003\u6f22 7"
    assert printable(f"{kept}\t\x1b[31m\u2028\ud800") == f"{kept}\\t\\x1b[31m\\u2028\\ud800"
    assert brief("a" * 101 + "b" * 100) == "a" * 100 + "..." + "b" * 60
    problems = [str(number) for number in range(1021)]
    assert first(problems) == [*problems[:20], "1,001 more like these."]
