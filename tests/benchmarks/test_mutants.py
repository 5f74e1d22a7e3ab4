"""The mutation study: its operators, its draw, and a study of a project of two small files."""

import contextlib
import json
import shutil
import time
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY

PYTHON = '''
"""Nothing of a docstring changes: 1 < 2."""
def f(a: int | None, b=True) -> str | None:
    try:
        while a and b:
            a.size += g(a, b, k=3)
            break
    except OSError:
        raise
    if not b:
        return f"{a + 1}"
    return a
'''
PYTHON_CHANGES = {
    ("constant replaced", "def f(a: int | None, b=False) -> str | None:"),
    ("sign replaced", "while a or b:"),
    ("condition negated", "while (not (a and b)):"),
    ("statement deleted", "pass"),  # twice: a.size, raise
    ("argument deleted", "a.size += g(a, b)"),
    ("arguments swapped", "a.size += g(b, a, k=3)"),
    ("constant replaced", "a.size += g(a, b, k=(4))"),
    ("constant replaced", "a.size += g(a, b, k=(2))"),
    ("statement replaced", "continue"),
    ("condition negated", "if (b):"),
    ("return value replaced", "return None"),
    ("return value replaced", "return ''"),
}
SHELL = """
# [[ -f a ]] && b
if [[ -f a ]]; then
  b || c
fi
cat <<'END'
  b && c
END
"""
SHELL_CHANGES = {
    ("test negated", "if [[ ! -f a ]]; then"),
    ("sign replaced", "b && c"),
    ("line deleted", ":"),
}


@pytest.fixture
def mutants(benchmark):
    return benchmark("mutants")


@pytest.fixture
def operators(benchmark):
    return benchmark("mutant_operators")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("a.py", PYTHON, PYTHON_CHANGES), ("run", SHELL, SHELL_CHANGES)],
    ids=["Python", "shell"],
)
def test_operators_make_these_changes_and_no_others(operators, tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    made = set()
    for one in operators.mutants_of(name, tmp_path):
        changed = one.apply(text.encode()).decode()
        if one.is_valid(text.encode()):
            made.add((one.operator, changed.splitlines()[one.line - 1].strip()))
            assert changed.splitlines()[: one.line - 1] == text.splitlines()[: one.line - 1]
    assert made == expected


def test_a_seed_draws_the_same_and_a_larger_number_more(mutants, tmp_path):
    for name in ("megakit/job/runs.py", "mnist/files.py", "run"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    few, same, many, others = (
        mutants.draw(tmp_path, number, seed) for number, seed in ((9, 1), (9, 1), (30, 1), (9, 2))
    )
    assert few == same != others
    assert set(few) < set(many)
    assert {one.file for one in few} == {"megakit/job/runs.py", "mnist/files.py", "run"}


def test_each_file_has_tests(mutants):
    for pattern in mutants.FOLDERS.values():
        for path in REPOSITORY.glob(pattern):
            found = mutants.tests_of(path.relative_to(REPOSITORY).as_posix(), REPOSITORY)
            assert all((REPOSITORY / test).exists() for test in found)
    assert mutants.tests_of("megakit/data/loader.py", REPOSITORY) == [
        "tests/megakit/data/test_loader.py"
    ]
    assert "tests/test_chain.py" in mutants.tests_of("model_predict.py", REPOSITORY)
    named = mutants.tests_of("megakit/data/foreign_images.py", REPOSITORY)
    assert "tests/mnist/test_hostile_pictures.py" in named


FILES = {
    "megakit/data/small.py": "def is_small(n):\n    return n < 3\n",
    "megakit/data/size.py": "SIZE = 1\n",
    # Its own test misses 3, which the whole suite tries; no test sees the size.
    "tests/megakit/data/test_small.py": """
from megakit.data.small import is_small
def test_small(): assert is_small(2)
""",
    "tests/test_three.py": """
from megakit.data import size, small
def test_three(): assert not small.is_small(3)
""",
}


@pytest.fixture
def tree(tmp_path: Path, mutants, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of two files and two tests, which need no plugin of pytest's but xdist."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(mutants, "PARALLEL", ["-p", "xdist", *mutants.PARALLEL])
    for name, text in FILES.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("chains", "second"), [("test_three.py", "tests/test_three.py"), ("absent.py", "tests")]
)
def test_an_interrupted_study_goes_on(mutants, tree, tmp_path, monkeypatch, chains, second):
    monkeypatch.setattr(mutants, "CHAINS", [chains])
    results = tmp_path / "mutants.jsonl"
    chosen = [
        one
        for file in ("megakit/data/small.py", "megakit/data/size.py")
        for one in mutants.mutants_of(file, tree)
        if one.new in (" <= ", "not (n < 3)", "(2)")
    ]
    changed = [one for one in chosen if (one.file, one.new) != ("megakit/data/small.py", "(2)")]
    record = mutants.Study._record

    def interrupted(*arguments) -> None:
        record(*arguments)
        if len(results.read_text().splitlines()) == 2:
            raise KeyboardInterrupt

    def run() -> None:
        study = mutants.Study(tree, results, tmp_path / str(time.monotonic_ns()), jobs=1)
        study.run(changed)

    with monkeypatch.context() as patch:
        patch.setattr(mutants.Study, "_record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    run()
    own, other = "tests/megakit/data/test_small.py", "tests/test_three.py"
    lines = map(json.loads, results.read_text().splitlines())
    found = [(line["mutant"]["new"], line["tests"], line["failed"]) for line in lines]
    expected = [
        (" <= ", [second], [other]),
        (" <= ", [own], []),
        ("(2)", ["tests"], []),
        ("(2)", [other], []),
        ("not (n < 3)", [own], [own]),
    ]
    assert sorted(found) == sorted(expected)
    assert mutants.table(changed, results)[-3:-1] == ["| all | 3 | 2 | 1 | 0 |", ""]
    assert {path.name for path in tree.rglob("*.py")} == {Path(name).name for name in FILES}
    assert all((tree / name).read_text() == text for name, text in FILES.items())


def test_tests_that_fail_without_a_mutant_end_the_study(mutants, tree, tmp_path):
    (tree / "megakit/data/small.py").write_text("def is_small(n):\n    return n < 1\n")
    study = mutants.Study(tree, tmp_path / "mutants.jsonl", tmp_path / "copies", jobs=1)
    with pytest.raises(SystemExit, match=r"Without a mutant, .*test_small\.py failed"):
        study.run(mutants.mutants_of("megakit/data/small.py", tree))


HANGING = """
import os, subprocess, sys
def test_hanging():
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(99)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True)
"""


def test_no_process_is_left_after_the_time_limit(mutants, tree, tmp_path):
    (tree / "tests/test_hanging.py").write_text(HANGING)
    copy = mutants.Copy(tree, tmp_path / "copy")
    limit = 1.0
    while not (copy.root / "pid").exists():
        limit *= 2
        assert copy.run(["tests/test_hanging.py"], limit) == ["time limit"]
    left = Path("/proc", (copy.root / "pid").read_text(), "stat")
    deadline = time.monotonic() + 60  # a killed process of a busy machine ends a little later
    with contextlib.suppress(OSError):  # it ended between two lines
        while left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)
