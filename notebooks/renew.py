"""Executes the notebook in a fresh kernel, and writes it and its text form anew.

`./run notebook --renew` starts this script. MNIST_DATA_DIR names the folder that contains
MNIST/raw; without the variable, the notebook uses the same folder as the scripts.
"""

import ast
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
NOTEBOOK = FOLDER / "mnist_megatron.ipynb"
TEXT = NOTEBOOK.with_suffix(".py")
#: What a path of somebody's machine begins with.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|Users|work|mnt|opt|usr|var)/\S*")


def execute(notebook: Any, runs: Path) -> None:
    """Runs all cells in order, in a fresh kernel of this Python; fills in their outputs.

    Args:
        notebook: An nbformat notebook.
        runs: Folder for checkpoints and metrics.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    from nbclient import NotebookClient

    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute(env={**os.environ, "NOTEBOOK_RUNS": str(runs), "JPY_SESSION_NAME": ""})


def normalise(notebook: Any, runs: Path) -> list[str]:
    """Takes out what differs from one machine, or one time, to the next.

    Args:
        notebook: An executed notebook.
        runs: The folder that it wrote to.

    Returns:
        What was written to standard error and left out: warnings that no reader needs.
    """
    dropped = []
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02}"
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags"}
        if cell.cell_type != "code":
            continue
        dropped += [output.text for output in cell.outputs if output.get("name") == "stderr"]
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = output.text.replace(str(runs), "runs").replace(
                    f"{FOLDER.parent}/", ""
                )
    return dropped


def numbers(notebook: Any) -> list[dict[str, float]]:
    """What the cells tagged `numbers` end with: a dict each, by which two executions compare."""
    return [
        ast.literal_eval(cell.outputs[-1].data["text/plain"])
        for cell in notebook.cells
        if "numbers" in cell.metadata.get("tags", ())
    ]


def machine_paths(notebook: Any) -> list[str]:
    """Paths of somebody's machine in cells and outputs."""
    texts = [cell.source for cell in notebook.cells]
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        texts += [output.get("text", ""), str(output.get("data", {}).get("text/plain", ""))]
    return [path for text in texts for path in MACHINE_PATH.findall(text)]


def main() -> None:
    """Renews both files."""
    import jupytext
    from jupytext.cli import jupytext as command_line

    sys.path.insert(0, str(FOLDER.parent))  # started as a script, it finds only its own folder
    from mnist.data_dir import find_data_dir

    # Chosen here, because a choice in the notebook would print the folder's path into it.
    chosen = find_data_dir(FOLDER.parent / "runs", default=FOLDER.parent / "data")
    os.environ["MNIST_DATA_DIR"] = str(chosen.absolute())

    command_line(["--quiet", "--sync", str(TEXT)])  # the newer of the two is what the author means
    notebook = jupytext.read(NOTEBOOK)
    print("Executing the notebook; this takes a minute or two.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
        dropped = normalise(notebook, Path(folder))
    if dropped:
        print("Left out, as it went to standard error:\n" + "".join(dropped), file=sys.stderr)
    if found := machine_paths(notebook):
        sys.exit(f"renew.py: not written, as it names paths of this machine: {', '.join(found)}")
    jupytext.write(notebook, NOTEBOOK)
    command_line(["--quiet", "--sync", str(NOTEBOOK)])
    print(f"Renewed {NOTEBOOK} and {TEXT.name}.", file=sys.stderr)


if __name__ == "__main__":
    main()
