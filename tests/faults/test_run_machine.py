"""Whatever is done to a run between its starts: done is done, and nothing else comes out."""

import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from megakit.checkpoints import manifest
from megakit.checkpoints.manifest import METRICS, checkpoint_name, list_checkpoints
from megakit.checkpoints.select import best_of, own_checkpoints, readable_checkpoints
from megakit.job.run_directory import RunDirectory
from tests.faults.recorded import (
    KILLED,
    REFUSED,
    STAGE,
    STOPPED,
    WEIGHTS,
    Options,
    find_whole,
    start,
)
from tests.refusals import snapshot

SEEDS = (1, 2)
RUN_FILE, SUMMARY = "run.json", "summary.json"
FILES = st.sampled_from((RUN_FILE, SUMMARY, METRICS))
LAST = checkpoint_name(Options.max_steps)


@cache
def never_disturbed(seed: int) -> Path:
    """The directory of a run that nothing happened to, with a checkpoint of every second step."""
    folder = Path(tempfile.mkdtemp())
    options = Options(output_dir=folder, seed=seed)
    kept = folder / "kept"
    for step in (2, 4):
        assert start(options, stop_after=step).status == STOPPED
        name = checkpoint_name(step)
        shutil.copytree(folder / "train" / "checkpoints" / name, kept / name)
    shutil.rmtree(folder / "train")
    assert start(options).status == 0
    shutil.copytree(folder / "train" / "checkpoints" / LAST, kept / LAST)
    return folder


def identity_of(seed: int) -> Any:
    return json.loads((never_disturbed(seed) / STAGE.name / RUN_FILE).read_text())


class Runs(RuleBasedStateMachine):
    """Starts of one command, and what users, disks and attackers do in between."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.options = Options(output_dir=self.folder, seed=1)
        self.directory = RunDirectory(self.folder / STAGE.name)
        self.checkpoints = self.directory.checkpoints

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(fresh=st.booleans())
    def start(self, fresh: bool) -> None:
        status = self._start(replace(self.options, fresh=fresh))
        assert status in ((0,) if fresh else (0, REFUSED))
        if status == 0:
            self._check_done()

    @rule(step=st.integers(1, 6))
    def start_and_stop(self, step: int) -> None:
        assert self._start(self.options, stop_after=step) in (0, STOPPED, REFUSED)

    @rule(change=st.integers(1, 80), fresh=st.booleans())
    def start_and_kill(self, change: int, fresh: bool) -> None:
        status = self._start(replace(self.options, fresh=fresh), kill_at=change)
        assert status in (0, KILLED, REFUSED)

    @rule(seed=st.sampled_from(SEEDS))
    def change_option(self, seed: int) -> None:
        self.options = replace(self.options, seed=seed)

    def _start(self, options: Options, **fault: Any) -> int:
        before = snapshot(self.folder)
        in_checkpoints = [one.run for one in readable_checkpoints(self.checkpoints).values()]
        own = [run for run in in_checkpoints if run["seed"] == options.seed]
        has_to_go_on = options.fresh or own or not in_checkpoints
        good = find_whole(self.folder)
        ended = start(options, **fault)
        assert ended.status in (0, KILLED, STOPPED, REFUSED), ended.message
        if ended.status == REFUSED:
            assert not has_to_go_on, ended.message
            assert snapshot(self.folder) == before
        self._check_nothing_good_is_lost(good, find_whole(self.folder))
        return ended.status

    def _check_done(self) -> None:
        """The last step's checkpoint is there, whole, of this run, and as if nothing had been."""
        seed, last = self.options.seed, self.checkpoints / LAST
        undisturbed = never_disturbed(seed) / STAGE.name
        assert manifest.verify(last).run["seed"] == seed
        expected = (undisturbed / "checkpoints" / LAST / WEIGHTS).read_text()
        assert (last / WEIGHTS).read_text() == expected
        assert (last / METRICS).read_text() == (undisturbed / METRICS).read_text()

    def _check_nothing_good_is_lost(self, before: dict[str, Path], after: dict[str, Path]) -> None:
        """A start removes only its own run's checkpoints that are neither the best nor the last."""
        for digest in before.keys() - after.keys():
            step = int((before[digest].name.rpartition("=")[2]).partition(".")[0])
            own = own_checkpoints(self.checkpoints, STAGE.name, identity_of(self.options.seed))
            if before[digest].name.startswith("."):
                continue  # an earlier start was killed before it had this one's name, or after
            assert before[digest].parent == self.checkpoints
            assert max(manifest.read_manifest(path).step for path in own) >= step, (
                "the last was lost"
            )
            assert best_of(own, "val_loss") is not None

    def _choose(self, number: int) -> Path | None:
        found = list_checkpoints(self.checkpoints)
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 5))
    def remove_checkpoint(self, number: int) -> None:
        if (checkpoint := self._choose(number)) is not None:
            shutil.rmtree(checkpoint)

    @rule(number=st.integers(0, 5), step=st.integers(1, 8))
    def rename_checkpoint(self, number: int, step: int) -> None:
        checkpoint = self._choose(number)
        to = self.checkpoints / checkpoint_name(step)
        if checkpoint is not None and not to.exists():
            checkpoint.rename(to)

    @rule(seed=st.sampled_from(SEEDS), step=st.sampled_from((2, 4, 6)), name=st.integers(1, 8))
    def copy_in(self, seed: int, step: int, name: int) -> None:
        to = self.checkpoints / checkpoint_name(name)
        if not to.exists():
            shutil.copytree(never_disturbed(seed) / "kept" / checkpoint_name(step), to)

    @rule(
        number=st.integers(0, 5),
        name=st.sampled_from(("manifest.json", str(WEIGHTS), METRICS)),
        keeps_size=st.booleans(),
    )
    def damage(self, number: int, name: str, keeps_size: bool) -> None:
        checkpoint = self._choose(number)
        if checkpoint is not None and (path := checkpoint / name).is_file():
            content = path.read_bytes()
            half = content[: len(content) // 2]
            path.write_bytes(half.ljust(len(content)) if keeps_size else half)

    @rule(name=FILES, content=st.sampled_from((None, "", "{", '{"steps": 6}', "step\nx\n")))
    def spoil_file(self, name: str, content: str | None) -> None:
        path = self.directory.path / name
        if content is None:
            path.unlink(missing_ok=True)
        elif path.parent.is_dir():
            path.write_text(content)

    @rule(what=st.sampled_from(("", "checkpoints")))
    def remove_folder(self, what: str) -> None:
        shutil.rmtree(self.directory.path / what, ignore_errors=True)


@pytest.mark.parametrize("examples", [10, pytest.param(40, marks=pytest.mark.long)])
def test_every_history(examples: int) -> None:
    how: dict[str, Any] = {"stateful_step_count": 15, "deadline": None, "database": None}
    how |= {"print_blob": True, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(Runs, settings=settings(max_examples=examples, **how))
