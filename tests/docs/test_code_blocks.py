"""The Python code that pages show runs: datasets.md, parallelism.md, porting.md."""

import re
from typing import Any

import pytest

from megakit.testing import Ranks
from tests.docs.pages import blocks, read_page
from tests.scripts import run_python


def test_datasets() -> None:
    """The blocks run in their order, as one program."""
    program = "\n".join(blocks(read_page("docs/datasets.md"), "python"))
    assert program.count("\nclass ") > 1
    exec(program, {"__name__": "datasets_md"})


@pytest.mark.long
def test_parallelism(ranks: Ranks) -> None:
    on_ranks, on_fake_ranks = blocks(read_page("docs/parallelism.md"), "python")
    names: dict[str, Any] = {"__name__": "example"}
    exec(on_ranks, names)
    names["test_every_rank_has_half"](ranks)
    # In a process of its own, which has not used Megatron yet.
    run_python("-c", f"{on_fake_ranks}\ntest_a_rank_of_1024()\n").output()


@pytest.mark.usefixtures("megatron")
def test_porting() -> None:
    """The imports of its table, which show where the names of the documents are."""
    page = read_page("docs/porting.md")
    table = page.partition("<!-- names: begin -->")[2].partition("<!-- names: end -->")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    imports = {code for cell in cells for code in re.findall(r"`((?:from|import) [^`]+)`", cell)}
    assert len(imports) > 15
    for code in sorted(imports):
        exec(code, {})
