"""A data loader worker that is killed while a training goes on."""

import re
import subprocess
import sys

from tests.faults.harness import HOOK
from tests.scripts import REPOSITORY, environment


def test_the_job_ends_and_names_the_worker(tmp_path):
    fault = "torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch:2 SIGKILL 0"
    done = subprocess.run(
        [
            *(sys.executable, REPOSITORY / "model_pretrain.py", "--dataset", "digits"),
            *("--accelerator", "cpu", "--max-steps", "40", "--num-workers", "2"),
            *("--output-dir", tmp_path),
        ],
        env=environment(FAULT=fault, PYTHONPATH=str(HOOK)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(
        r"DataLoader worker \(pid\(?s?\)? ?\d+\) is killed by signal: Killed", done.stderr
    )
    assert "model_pretrain.py failed; the log is " in done.stderr
