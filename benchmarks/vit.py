"""The vision transformer of examples/vit: accuracy, time, memory; lines that the first lacks.

    python benchmarks/vit.py --data-dir PATH [--seeds 1 2 3] [--write]

Every figure comes from the scripts as a user runs them. `--write` puts them into RESULTS.md.
"""

import difflib
import tempfile
from pathlib import Path

from chain import chain_rows
from report import REPOSITORY, parser_of, publish
from times import SCRIPTS

VIT = REPOSITORY / "examples" / "vit"


def own_lines() -> list[str]:
    """A table of what is new in each file, beside the first model's that it was made from."""
    table = ["| file | lines | of these, lines that the tutorial's file lacks |", "|---|---|---|"]
    made_from = {script: script for script in SCRIPTS}
    made_from["vit_components.py"] = "model_components.py"
    for name, first in made_from.items():
        lines, theirs = (
            (path.read_text().splitlines()) for path in (VIT / name, REPOSITORY / first)
        )
        new = sum(line.startswith("+ ") for line in difflib.ndiff(theirs, lines))
        table.append(f"| {name} | {len(lines)} | {new} |")
    return table


def main() -> None:
    parser = parser_of("Accuracy, time and memory of examples/vit.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("options", nargs="*", help="for all three scripts, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        common = ["--data-dir", arguments.data_dir, *arguments.options]
        found = chain_rows(Path(folder), arguments.seeds, "examples/vit", common)
    title = "The vision transformer of examples/vit, on MNIST"
    publish("vit", title, found, arguments.write, "", *own_lines())


if __name__ == "__main__":
    main()
