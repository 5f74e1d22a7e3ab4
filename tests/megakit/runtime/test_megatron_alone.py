"""megakit without NeMo and Lightning, on the tutorial's Megatron-Core and on a later version."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, output_of, run

LATER = REPOSITORY / "build/venv-newest/bin/python"
NEMO = "nemo lightning lightning_fabric pytorch_lightning lightning_utilities torchmetrics"
PRELOADED = f"""
import sys
sys.modules |= dict.fromkeys({NEMO!r}.split())
import megakit.testing.forked_from
"""


def told_by(python: object, *folders: Path) -> dict[str, Any]:
    """What `megatron_alone.py` says where no import finds NeMo; a file not refused ends it."""
    folders[0].mkdir()
    changes: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    module = "tests.megakit.runtime.megatron_alone"
    done = run(python, "-m", module, *folders, cwd=REPOSITORY, BLOCKED=NEMO, **changes)
    told: dict[str, Any] = json.loads(done.output().splitlines()[-1])
    assert told["children"] == []
    assert "File too large" in told["error"]
    return told


def test_it_imports_and_reads_and_saves_without_nemo(tmp_path: Path) -> None:
    told = told_by(sys.executable, tmp_path / "one")
    assert told["imports"] == {}
    assert told["places"] == [[".metadata", "common.pt", "extra/shard_0_1", "weight"]]


@pytest.mark.long
def test_a_later_megatron_has_the_same_guarantees(tmp_path: Path) -> None:
    if not LATER.exists():
        pytest.skip("tests/ladder/test_newest.py installs the environment")
    told_by(sys.executable, tmp_path / "one")
    told = told_by(LATER, tmp_path / "two", tmp_path / "one" / "saved")
    assert told["version"] == "0.19.2"
    assert told["imports"] == {}
    places = [".metadata", "common.pt", "extra/shard_0_1", "weight"]
    assert told["places"] == [sorted([*places, "common_state/shard_0_1"]), places]
    for python in (sys.executable, LATER):
        assert run(python, "-c", PRELOADED, cwd=REPOSITORY, CUDA_VISIBLE_DEVICES="").status == 0


NEMO_LATER = """
import json, sys
from megakit.runtime import use_accelerator
from megakit.runtime.patching import PATCHES

use_accelerator("cpu", uses_nemo=False)
before = ["nemo" in sys.modules, len(PATCHES)]
use_accelerator("cpu")
from megakit.runtime import fused_adam, writer_threads
fused_adam.patch_optimizers()  # NeMo's strategy asks for these two
writer_threads.write_in_threads()
names = [f"{one.owner}.{one.name}" for one in PATCHES]
print(json.dumps([before, "nemo" in sys.modules, names]))
"""


@pytest.mark.long
def test_a_program_may_use_nemo_later() -> None:
    (was_there, number), is_there, names = json.loads(output_of(NEMO_LATER).splitlines()[-1])
    assert (was_there, is_there) == (False, True)
    assert len(names) == len(set(names))
    code = NEMO_LATER.replace('use_accelerator("cpu", uses_nemo=False)', "")
    assert sorted(names) == sorted(json.loads(output_of(code).splitlines()[-1])[2])
    assert 0 < number < len(names)
