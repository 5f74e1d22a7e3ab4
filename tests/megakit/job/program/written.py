"""Scripts with other modules, written into a folder, and the code of their runs."""

from pathlib import Path

from megakit.job.program import code_of

GUARD = 'if __name__ == "__main__":\n    '
F = "def f():\n    return 1"


def written(folder: Path, files: dict[str, str], run: str) -> dict[str, str]:
    """The code of a script that calls `run_script(None, Options, run)`, with other files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    imported = files.get("train.py", "")
    (folder / "train.py").write_text(f"{imported}\n{GUARD}run_script(None, None, {run})\n")
    return code_of(folder / "train.py")


def changes(
    folder: Path, train: str, others: dict[str, str], run: str, old: str, new: str
) -> tuple[dict[str, str], dict[str, str]]:
    """The code of a script before and after text was replaced in its files, once in each."""
    files = {"train.py": train, **others}
    assert any(old in text for text in files.values())
    before = written(folder, files, run)
    return before, written(folder, {n: t.replace(old, new, 1) for n, t in files.items()}, run)
