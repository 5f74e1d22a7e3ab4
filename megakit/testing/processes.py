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

Difference = Callable[[Any, Any], str | None]

_READ = "from megakit.testing.processes import read_samples; read_samples()"

_DIFFERENT_EVERY_TIME = (
    "It differs from process to process; likely through a generator without a seed, the time, the "
    "process id, or the order of threads. Seed it, or work it out from the index alone."
)
_DIFFERENT_BY_HASH_SEED = (
    "It depends on Python's hash seed; likely through hash() or the order of a set. Use hashlib or "
    "zlib.crc32, and sort."
)
_DIFFERENT_HERE = (
    "Fresh processes agree among themselves; likely it depends on what was done in this one "
    "before, or on its hash seed. Work everything out from the index alone."
)


def check_workers(
    dataset: Any, indices: list[Any], samples: list[Any], difference: Difference
) -> None:
    """Check that one worker and two workers of torch's loader read the same samples."""
    for num_workers in (1, 2):
        order: Any = indices
        loader = DataLoader(
            dataset, batch_size=None, sampler=order, num_workers=num_workers, collate_fn=_as_it_is
        )
        try:
            from_workers = list(loader)
        except Exception as error:
            raise AssertionError(
                f"The dataset cannot be read by {num_workers} workers of torch's loader: {error!r}"
            ) from error
        for index, sample, from_worker in zip(indices, samples, from_workers, strict=True):
            found = difference(sample, from_worker)
            if found:
                raise AssertionError(
                    f"dataset[{index}] differs when one of {num_workers} workers reads it: "
                    f"{found}. Likely it uses torch.utils.data.get_worker_info(), a worker's seed, "
                    "or something that each process has for itself; work everything out from the "
                    "index alone."
                )


def check_interpreters(
    source: Any, indices: list[Any], samples: list[Any], difference: Difference
) -> None:
    """Check that fresh interpreters with other hash seeds read the same samples.

    Args:
        source: The dataset, or a function without arguments that returns the dataset.
        indices: The indices to read.
        samples: This process's samples at these indices.
        difference: Returns a description of the first difference of two samples, or None.
    """
    try:
        request = cloudpickle.dumps((source, indices))
    except Exception as error:
        raise AssertionError(
            f"The dataset cannot be sent to another process: {error!r}. Likely it holds an open "
            "file or a connection; open it when first read, or pass a factory."
        ) from error
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(partial(_samples_elsewhere, request), ("1", "2"))
    for place, index in enumerate(indices):
        found = difference(samples[place], first[place]) or difference(first[place], second[place])
        if found:
            again = _samples_elsewhere(request, "1")
            if difference(first[place], again[place]):
                cause = _DIFFERENT_EVERY_TIME
            elif difference(first[place], second[place]):
                cause = _DIFFERENT_BY_HASH_SEED
            else:
                cause = _DIFFERENT_HERE
            raise AssertionError(f"dataset[{index}] differs in another process: {found}. {cause}")


def importing_nemo(load: Callable[[], Any]) -> Any:
    """Calls `load`, which may import NeMo or Megatron, and returns its result.

    Without a GPU or without all parts of NeMo, both can be imported only after `use_accelerator`,
    which takes time. So `use_accelerator` is called only if `load` fails after an import of NeMo or
    Megatron.
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
    """Read the samples that a request file names, and write them to a file; runs in a new process.

    The paths of both files are the process's arguments.
    """
    request, answer = map(Path, sys.argv[1:])
    source, indices = importing_nemo(lambda: pickle.loads(request.read_bytes()))
    dataset = source() if callable(source) else source
    answer.write_bytes(cloudpickle.dumps([dataset[index] for index in indices]))


def _samples_elsewhere(request: bytes, hash_seed: str) -> list[Any]:
    search_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": search_path}
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
                "The dataset cannot be made or read in a fresh process:\n" + result.stderr[-2000:]
            )
        samples: list[Any] = pickle.loads(answer.read_bytes())
        return samples


def _as_it_is(sample: Any) -> Any:
    return sample
