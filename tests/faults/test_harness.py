"""The harness itself: it notices a fault that does not come."""

from pathlib import Path

import pytest

from tests.faults.harness import Fault, Training


def test_a_fault_that_does_not_come_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def make_step(): pass\n")
    script = tmp_path / "model_work.py"
    script.write_text("import work\nwork.make_step()\nwork.make_step()\n")
    training = Training(tmp_path, str(script))
    assert training.start(Fault("work:make_step", 2)).status == -9
    for never in (Fault("work:make_step", 3), Fault("other:make_step")):
        with pytest.raises(AssertionError, match=r"no SIGKILL at call \d of make_step: status 0"):
            training.start(never)


def test_a_hook_of_the_environment_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own comes before it on PYTHONPATH, and has the same name."""
    (tmp_path / "sitecustomize.py").write_text("print('another hook', flush=True)\n")
    (tmp_path / "work.py").write_text("def make_step(): pass\n")
    script = tmp_path / "model_work.py"
    script.write_text("import work\nwork.make_step()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = Training(tmp_path, str(script)).start(Fault("work:make_step"))
    assert (start.status, start.out) == (-9, "another hook\n")
