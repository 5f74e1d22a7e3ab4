"""Checks that a dataset gives the same samples in other processes."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from megakit.testing.samples import DatasetDistributedNondeterministic, Difference

_READ = "from megakit.testing.workers import read_samples; read_samples()"

_BY_PROCESS = (
    "It differs from process to process. Likely causes: a generator without a seed, the time, the "
    "process id, or the order of threads. Compute the sample from the index alone."
)
_BY_HASH_SEED = (
    "It depends on Python's hash seed, likely through hash() or the order of a set. Use hashlib or "
    "zlib.crc32, and sort."
)
_BY_THIS_PROCESS = (
    "Fresh processes agree with each other. Likely the sample depends on what this process did "
    "before, or on its hash seed. Compute the sample from the index alone."
)


def check_workers(
    dataset: Any, indices: list[Any], samples: list[Any], difference: Difference
) -> None:
    """Check that one worker and two workers of torch's loader read the same samples."""
    for workers in (1, 2):
        order: Any = indices
        loader = DataLoader(
            dataset, batch_size=None, sampler=order, num_workers=workers, collate_fn=_unchanged
        )
        try:
            read = list(loader)
        except Exception as error:
            raise AssertionError(
                f"The dataset cannot be read by {workers} workers of torch's loader: {error!r}"
            ) from error
        for index, sample, from_worker in zip(indices, samples, read, strict=True):
            if found := difference(sample, from_worker):
                raise DatasetDistributedNondeterministic(
                    f"dataset[{index}] differs when one of {workers} workers reads it: {found}. "
                    "Likely it uses torch.utils.data.get_worker_info(), or another value that "
                    "differs between processes. Compute the sample from the index alone."
                )


def check_interpreters(
    source: Any, indices: list[Any], samples: list[Any], difference: Difference
) -> None:
    """Check that fresh interpreters with other hash seeds read the same samples.

    `source` is the dataset, or a function without arguments that returns the dataset.
    """
    try:
        request = cloudpickle.dumps((source, indices))
    except Exception as error:
        raise AssertionError(
            f"The dataset cannot be sent to another process: {error!r}. Likely it contains an open "
            "file or a connection. Open it at the first read, or pass a factory."
        ) from error
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(partial(_samples_elsewhere, request), ("1", "2"))
    for place, index in enumerate(indices):
        by_seed = difference(first[place], second[place])
        if found := difference(samples[place], first[place]) or by_seed:
            cause = _BY_HASH_SEED if by_seed else _BY_THIS_PROCESS
            if difference(first[place], _samples_elsewhere(request, "1")[place]):
                cause = _BY_PROCESS
            raise DatasetDistributedNondeterministic(
                f"dataset[{index}] differs in another process: {found}. {cause}"
            )


def importing_nemo(load: Callable[[], Any]) -> Any:
    """Calls `load` and returns its result; calls `use_accelerator` if NeMo needs it.

    Without a GPU or without all parts of NeMo, NeMo and Megatron can be imported only after
    `use_accelerator`, which takes seconds. So it is called only if `load` fails after such an
    import.
    """
    try:
        return load()
    except Exception:
        if not {"megatron", "nemo"} & set(sys.modules):
            raise
    from megakit.runtime import use_accelerator

    use_accelerator("cpu")
    return load()


def read_samples() -> None:
    """Read the samples of a request file and write them to a file; both are arguments."""
    request, answer = map(Path, sys.argv[1:])
    source, indices = importing_nemo(lambda: pickle.loads(request.read_bytes()))
    dataset = source() if callable(source) else source
    answer.write_bytes(cloudpickle.dumps([dataset[index] for index in indices]))


def search_path() -> str:
    """Returns the PYTHONPATH for a child process that imports what this process can import.

    PYTHONPATH comes first: another `sitecustomize` of this Python must not hide that of PYTHONPATH.
    """
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*inherited, *(entry or "." for entry in sys.path)])


def _samples_elsewhere(request: bytes, hash_seed: str) -> list[Any]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": search_path()}
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "request"), Path(folder, "answer")
        question.write_bytes(request)
        result = subprocess.run(
            [sys.executable, "-c", _READ, str(question), str(answer)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise AssertionError(
                "The dataset cannot be built or read in a new process:\n" + result.stderr[-2000:]
            )
        samples: list[Any] = pickle.loads(answer.read_bytes())
        return samples


def _unchanged(sample: Any) -> Any:
    return sample
