"""The benchmark of mutated checkpoints: its judge sees crimes, and its mutations are mutations."""

import hashlib
import os
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from megakit.checkpoints.folders import list_checkpoints
from megakit.runtime.accelerator import use_accelerator
from tests.benchmarks.conftest import BENCHMARKS
from tests.scripts import run_script

#: What a plain pickle.loads gets to run without torch, and what of it the judge has to tell.
PAYLOADS = {
    **dict.fromkeys(("os.system", "posix.system, GLOBAL", "INST", "OBJ", "getattr"), "os.system"),
    **dict.fromkeys(("partial", "partial, BUILD", "methodcaller", "pickle.loads"), "os.system"),
    **dict.fromkeys(("os.popen", "subprocess.Popen"), "subprocess.Popen"),
    **{"os.remove": "os.remove", "exec": "writes", "eval": "writes", "socket": "connects to"},
    **{"import_module": "imports this", "ctypes.CDLL": "loads"},
    **dict.fromkeys(("open", "io.FileIO", "dotted name", "runpy"), "runs a payload"),
    **dict.fromkeys(("code object", "code, runsource", "timeit"), "runs a payload"),
}


@pytest.fixture
def runs(benchmark):
    return benchmark("attack_runs")


@pytest.fixture
def watch(benchmark):
    return benchmark("attack_watch")


@pytest.fixture
def pickles(benchmark):
    return benchmark("attack_pickles")


@pytest.fixture
def mutations(benchmark):
    return benchmark("attack_mutations")


@pytest.fixture
def watched(runs, watch, tmp_path) -> Callable[..., object]:
    """Does something in a fork under the judge's eyes; returns how it ended."""

    def watched(work: Callable[[], object], classes: tuple[object, ...] = ()) -> object:
        sandbox = watch.Sandbox(tmp_path)
        sandbox.out.mkdir()
        child = os.fork()
        if child == 0:
            _work(watch, sandbox, work, classes)
        began = time.monotonic()
        while (end := runs.finish(child, began, sandbox)) is None:
            time.sleep(0.005)
        return end

    return watched


def _work(watch, sandbox, work, classes) -> None:
    try:
        descriptor = os.open(sandbox.err, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        watch.watch(sandbox, list(classes))
        work()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(0)


@pytest.mark.parametrize("name", PAYLOADS)
def test_the_judge_sees_a_payload_run(name, watched, watch, pickles, runs, tmp_path):
    sandbox = watch.Sandbox(tmp_path)
    sandbox.canary.touch()
    (tmp_path / "evil.py").write_text(f"open({str(sandbox.trace)!r}, 'w').close()\n")
    payload = pickles.plain(pickles.DANGEROUS[name](sandbox.trace))
    end = watched(lambda: pickle.loads(payload))
    assert PAYLOADS[name] in " ".join(end.crimes)
    assert any("crime" in one for one in runs.problems(end, "model_predict.py", lambda: None))


@pytest.mark.parametrize("attribute", ["PosixPath.name", "PosixPath.rename"])
def test_the_judge_sees_a_class_overwritten(attribute, watched, pickles, tmp_path):
    payload = pickles.plain(
        pickles.set_attribute(
            pickles.found("pathlib", "PosixPath"), attribute.partition(".")[2], pickles.text("x")
        )
    )
    end = watched(lambda: pickle.loads(payload), (pathlib.PosixPath, pathlib.Path))
    assert end.crimes == [f"overwrites {attribute}"]


def test_the_judge_sees_files_touched_outside(watched, watch, tmp_path):
    sandbox = watch.Sandbox(tmp_path)
    sandbox.canary.write_text("canary")
    (tmp_path / "link").symlink_to(sandbox.canary)

    def work() -> None:
        (tmp_path / "link").read_text()
        (tmp_path / "outside").write_text("")
        (tmp_path / "folder").mkdir()
        (tmp_path / "outside").unlink()

    text = " ".join(watched(work).crimes)
    for crime in ("opens the canary", "writes", "os.mkdir", "os.remove"):
        assert crime in text


def test_the_judge_accepts_what_scripts_do(watched, tmp_path):
    def work() -> None:
        path = tmp_path / "out" / "file"
        path.write_text("")
        path.rename(tmp_path / "out" / "other")
        shutil.rmtree(tmp_path / "out")
        pickle.loads(pickle.dumps({"a": Path("x")}))

    assert watched(work, (pathlib.PosixPath,)).crimes == []


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (None, {}),
        (None, {"status": 0, "err": ""}),
        ("status 1", {"status": 1}),
        ("status 139", {"status": 139}),
        ("did not end", {"status": None}),
        ("traceback", {"log": "Traceback (most recent call last):\n"}),
        ("traceback", {"err": "model_predict.py: x\nTraceback (most recent call last):\n"}),
        ("control character", {"err": "model_predict.py: \x1b[31m\n"}),
        ("no message", {"err": "x\n"}),
        ("no message", {"err": "model_predict.py: " + "x" * 10_000}),
        ("GB", {"peak": 1 << 40}),
        ("crime", {"crimes": ["os.system"]}),
    ],
)
def test_the_judge_sees_how_a_run_ended(runs, problem, changes):
    refused = {"status": 2, "err": "model_predict.py: damaged.\n", "log": "", "crimes": []}
    end = runs.End(**{**refused, "seconds": 1.0, "peak": 0, **changes})
    found = runs.problems(end, "model_predict.py", lambda: None)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_status_0_needs_the_right_result(runs):
    end = runs.End(status=0, err="", log="", crimes=[], seconds=1.0, peak=0)
    assert runs.problems(end, "model_predict.py", lambda: "differs") == ["differs"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A real one, of two steps."""
    folder = tmp_path_factory.mktemp("attacked")
    options = ("--dataset", "digits", "--accelerator", "cpu", "--max-steps", 2)
    run_script("model_pretrain.py", *options, "--output-dir", folder, timeout=300).output()
    return list_checkpoints(folder / "pretrain" / "checkpoints")[-1]


@pytest.fixture
def mutated(benchmark, mutations, checkpoint, tmp_path):
    """Applies a mutation to a copy; returns what the copy then consists of."""
    use_accelerator("cpu")  # some mutations read the metadata as Megatron does
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    for path in other.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1] + b"\n\n")

    def mutated(mutation, seed: int = 1) -> dict[str, str]:
        folder = tmp_path / "attack"
        shutil.copytree(checkpoint, folder / checkpoint.name)
        (folder / "canary").write_bytes(b"")
        victim = benchmark("attack_victim").Victim(
            folder=folder / checkpoint.name,
            trace=folder / "trace",
            canary=folder / "canary",
            other=other,
            sibling=other,
            dice=random.Random(seed),
        )
        mutations.attack(mutation, victim)
        found = _contents(victim.folder)
        shutil.rmtree(folder)
        return found

    return mutated


def _contents(folder: Path) -> dict[str, str]:
    """Kind and content of all that is below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        what = f"{status.st_mode} {status.st_nlink}"
        if path.is_symlink():
            what = f"to {path.readlink()}"
        elif path.is_file():
            is_sparse = status.st_size > 1 << 30
            content = b"sparse" if is_sparse else path.read_bytes()
            what += f" {status.st_size} {hashlib.sha256(content).hexdigest()}"
        found[os.fsdecode(path.relative_to(folder))] = what
    return found


def test_every_kind_of_mutation_changes_the_checkpoint(mutations, mutated, checkpoint):
    kinds = {one.kind for one in mutations.all_mutations()}
    chosen = mutations.in_turn(seed=1, number=8 * len(kinds))
    assert {one.kind for one in chosen} == kinds
    original = _contents(checkpoint)
    unchanged = [(one.kind, one.name) for one in chosen if mutated(one) == original]
    assert unchanged == []


def test_a_mutated_checkpoint_has_a_right_manifest(
    benchmark, mutations, mutated, checkpoint, tmp_path, monkeypatch
):
    from megakit.checkpoints.manifest import verify

    monkeypatch.setattr(shutil, "rmtree", lambda _: None)  # keeps it
    one = next(m for m in mutations.all_mutations() if m.kind == "pickle in common.pt")
    mutated(one)
    attacked = tmp_path / "attack" / checkpoint.name
    assert verify(attacked).files != verify(checkpoint).files


def test_a_seed_decides_all(mutations, mutated):
    def names(seed: int) -> list[str]:
        return [f"{one.kind} {one.name}" for one in mutations.in_turn(seed, 40)]

    assert names(1) == names(1) != names(2)
    for one in mutations.in_turn(1, 40):
        assert mutated(one) == mutated(one), one.name
    dicing = next(m for m in mutations.all_mutations() if m.kind == "random bytes")
    assert mutated(dicing, seed=1) != mutated(dicing, seed=2)


@pytest.mark.long
def test_thirty_attacks_are_refused_or_harmless():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "attacks.py", "--attacks", "30"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "30 of 30 refused or harmless" in done.stdout
