"""The Python code that pages show runs: datasets.md, parallelism.md, porting.md."""

import re
from typing import Any

import pytest

from megakit.testing import Ranks
from tests.scripts import REPOSITORY, run_python

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_datasets() -> None:
    """The blocks run in their order, as one program."""
    path = REPOSITORY / "docs" / "datasets.md"
    text = path.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {"__name__": "datasets_md"}
    for block in blocks:
        # Line numbers in a traceback are then those of the page.
        first_line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * first_line + block[1], path, "exec"), namespace)


def test_parallelism(ranks: Ranks) -> None:
    page = (REPOSITORY / "docs" / "parallelism.md").read_text()
    on_ranks, on_fake_ranks = BLOCK.findall(page)
    names: dict[str, Any] = {"__name__": "example"}
    exec(on_ranks, names)
    names["test_every_rank_has_half"](ranks)
    # In a process of its own, which has not used Megatron yet.
    run_python("-c", f"{on_fake_ranks}\ntest_a_rank_of_1024()\n").output()


@pytest.mark.usefixtures("megatron")
def test_porting() -> None:
    """The imports of its table, which show where the names of the documents are."""
    page = (REPOSITORY / "docs" / "porting.md").read_text()
    table = page.partition("<!-- names: begin -->")[2].partition("<!-- names: end -->")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    imports = {code for cell in cells for code in re.findall(r"`((?:from|import) [^`]+)`", cell)}
    assert len(imports) > 15
    for code in sorted(imports):
        exec(code, {})
