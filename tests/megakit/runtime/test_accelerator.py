"""Which accelerator is found, and why not another; how many threads a CPU uses."""

import os
import re

import pytest

from megakit.runtime import Accelerator, find_accelerator, use_accelerator
from megakit.runtime import accelerator as accelerator_module
from megakit.runtime.accelerator import WORK_OF_A_THREAD, has_fast_bfloat16, limit_threads
from tests.scripts import output_of


def test_cpu_is_found_by_name() -> None:
    found = find_accelerator("cpu")
    assert found == Accelerator("cpu", found.device, len(os.sched_getaffinity(0)), remark=None)
    assert found.device


def test_without_a_driver_the_answer_needs_no_torch() -> None:
    """`--accelerator gpu` on a laptop is refused at once, not after seconds of importing."""
    told = output_of(
        "import sys\n"
        "from megakit.errors import UserError\n"
        "from megakit.runtime import accelerator, find_accelerator\n"
        "accelerator._has_gpu_driver = lambda: False\n"
        "assert find_accelerator('auto') == find_accelerator('cpu')\n"
        "try:\n"
        "    find_accelerator('gpu')\n"
        "except UserError as error:\n"
        "    print('torch' in sys.modules, error)\n"
    )
    assert re.match(r"False --accelerator gpu: .* no NVIDIA GPU .*--accelerator cpu", told)


def test_a_gpu_that_cannot_be_used_is_passed_over_with_a_reason() -> None:
    """A driver is there (here: is said to be), yet torch finds no GPU that it can use."""
    told = output_of(
        "from megakit.errors import UserError\n"
        "from megakit.runtime import accelerator, find_accelerator\n"
        "accelerator._has_gpu_driver = lambda: True\n"
        "assert find_accelerator('cpu').remark is None\n"
        "found = find_accelerator('auto', 'auto')\n"
        "print(found.name, found.remark)\n"
        "try:\n"
        "    find_accelerator('gpu', '32')\n"
        "except UserError as error:\n"
        "    print(error)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    auto, gpu = told.splitlines()
    reason = r"this machine's GPU cannot compute with {} \(.*(NVIDIA|CUDA).*\)\."
    assert re.fullmatch(r"cpu The GPU is not used: " + reason.format("bf16-mixed"), auto)
    end = r" Use --accelerator cpu, or auto\."
    assert re.fullmatch("--accelerator gpu: " + reason.format("32") + end, gpu)


def test_bfloat16_is_only_fast_where_torch_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN reads this variable: it then computes as on a processor with nothing newer."""
    import torch

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert not has_fast_bfloat16() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not has_fast_bfloat16()


@pytest.mark.parametrize(
    ("entry", "flags", "expected"),
    [
        ("flags", "avx2 avx512f avx512dq avx512bw avx512vl", False),
        ("flags", "avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16", True),
        ("Features", "fp asimd", False),
        ("Features", "fp asimd bf16", True),
    ],
)
def test_processors_with_fast_bfloat16(
    monkeypatch: pytest.MonkeyPatch, entry: str, flags: str, expected: bool
) -> None:
    info = {entry: flags}
    monkeypatch.setattr(accelerator_module, "_cpuinfo", lambda name: info.get(name, ""))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert has_fast_bfloat16() == expected


def test_another_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'tpu': expected 'cpu' or 'gpu'"):
        use_accelerator("tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("work", "processes", "given", "expected"),
    [
        (2 * WORK_OF_A_THREAD - 1, 1, None, "1"),
        (2 * WORK_OF_A_THREAD, 1, None, "2"),
        (2 * WORK_OF_A_THREAD, 1, "7", "7"),
        (100 * WORK_OF_A_THREAD, 8, None, "8"),  # of 64 cores
    ],
)
def test_threads(
    monkeypatch: pytest.MonkeyPatch,
    work: int,
    processes: int,
    given: str | None,
    expected: str | None,
) -> None:
    environment = {} if given is None else {"OMP_NUM_THREADS": given}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "environ", environment)
    limit_threads(work, processes)
    assert environment.get("OMP_NUM_THREADS") == expected
    assert ("OMP_WAIT_POLICY" in environment) == (given is None and expected is not None)
