"""The number of threads follows the work of an operation, unless the user says otherwise."""

import os

import pytest

from megakit.runtime.threads import WORK_OF_A_THREAD, limit_threads

AUTOENCODER = 128 * 64 * 64  # a micro batch of 128 images, width 64
LANGUAGE_MODEL = 32 * 128 * 128 * 128  # 32 texts of 128 tokens, width 128
WIDE = 4096 * 4096 * 4096


@pytest.mark.parametrize(
    ("work", "cores", "processes", "given", "expected"),
    [
        (AUTOENCODER, 64, 1, None, "1"),
        (AUTOENCODER, 64, 1, "2", "2"),
        (2 * WORK_OF_A_THREAD - 1, 64, 1, None, "1"),
        (2 * WORK_OF_A_THREAD, 64, 1, None, "2"),
        (LANGUAGE_MODEL, 2, 2, None, "1"),
        (WIDE, 64, 8, None, "8"),
        (WIDE, 64, None, None, None),  # srun assigns the cores
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    work: int,
    cores: int,
    processes: int | None,
    given: str | None,
    expected: str | None,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # for monkeypatch to restore it
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    limit_threads(work, processes)
    assert os.environ.get("OMP_NUM_THREADS") == expected
    waits = None if given or expected is None else "PASSIVE"
    assert os.environ.get("OMP_WAIT_POLICY") == waits
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        os.environ.pop(name, None)
