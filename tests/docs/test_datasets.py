"""The code blocks of docs/datasets.md run, in their order, as one program."""

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "datasets.md"


def test_code_blocks_run():
    text = DOCUMENT.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {"__name__": "datasets_md"}
    for block in blocks:
        # Line numbers in a traceback are then those of the document.
        first_line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * first_line + block[1], DOCUMENT, "exec"), namespace)
