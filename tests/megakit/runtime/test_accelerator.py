"""Which accelerator is found, and why not another."""

import os
import re
from pathlib import Path

import pytest

from megakit.errors import UserError
from megakit.runtime import Accelerator, find_accelerator, use_accelerator
from megakit.runtime import accelerator as accelerator_module
from tests.scripts import output_of


def python(code: str, **changes: str) -> str:
    """What a fresh process prints, which sees no GPU unless its environment says so."""
    return output_of(code, **{"CUDA_VISIBLE_DEVICES": "", **changes})


def test_cpu_is_found_by_name() -> None:
    found = find_accelerator("cpu")
    assert found == Accelerator("cpu", found.device, len(os.sched_getaffinity(0)), remark=None)
    assert found.device


def test_without_a_driver_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_module, "_has_gpu_driver", lambda: False)
    assert find_accelerator("auto") == find_accelerator("cpu")


def test_a_gpu_is_not_even_looked_for_where_the_cpu_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerator_module, "_has_gpu_driver", lambda: True)
    monkeypatch.setattr(accelerator_module, "_probe", lambda precision: "looked for")
    assert find_accelerator("cpu").remark is None
    assert find_accelerator("auto").remark == "The GPU is not used: looked for"


def test_bfloat16_is_only_fast_where_torch_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN reads this variable: it then computes as on a processor with nothing newer."""
    import torch

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    torchs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert not accelerator_module.has_fast_bfloat16() or torchs
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not accelerator_module.has_fast_bfloat16()


@pytest.mark.parametrize(
    ("machine", "lines", "expected"),
    [
        ("x86_64", "flags\t: avx2 avx512f avx512dq avx512bw avx512vl", False),
        ("x86_64", "flags\t: avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16", True),
        ("x86_64", "flags\t: avx2 avx512f amx_tile amx_bf16", True),
        ("x86_64", "flags\t: avx2 avx_vnni_int8 avx_ne_convert", True),
        ("aarch64", "Features\t: fp asimd", False),
        ("aarch64", "Features\t: fp asimd bf16", True),
    ],
)
def test_processors_with_fast_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, lines: str, expected: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{lines}\n")
    monkeypatch.setattr(accelerator_module, "Path", lambda name: tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert accelerator_module.has_fast_bfloat16() == expected


def test_without_a_driver_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_module, "_has_gpu_driver", lambda: False)
    with pytest.raises(UserError, match=r"--accelerator gpu: .* no NVIDIA GPU .*--accelerator cpu"):
        find_accelerator("gpu")


def test_without_a_driver_the_answer_needs_no_torch() -> None:
    """`--accelerator gpu` on a laptop is refused at once, not after seconds of importing."""
    told = python(
        "import sys\n"
        "from megakit.errors import UserError\n"
        "from megakit.runtime import accelerator, find_accelerator\n"
        "accelerator._has_gpu_driver = lambda: False\n"
        "try:\n"
        "    find_accelerator('gpu')\n"
        "except UserError:\n"
        "    print('refused', end=' ')\n"
        "print(find_accelerator('auto').name, 'torch' in sys.modules)"
    )
    assert told.split() == ["refused", "cpu", "False"]


def test_a_gpu_that_cannot_be_used_is_passed_over_with_a_reason() -> None:
    """A driver is there (here: is said to be), yet torch finds no GPU that it can use.

    At last NVML counts GPUs that CUDA cannot initialize: Lightning makes `is_available` ask NVML.
    """
    told = python(
        "import torch\n"
        "from megakit.errors import UserError\n"
        "from megakit.runtime import accelerator, find_accelerator\n"
        "accelerator._has_gpu_driver = lambda: True\n"
        "found = find_accelerator('auto', 'bf16-mixed')\n"
        "print(found.name, found.remark)\n"
        "try:\n"
        "    find_accelerator('gpu', 'bf16-mixed')\n"
        "except UserError as error:\n"
        "    print(error)\n"
        "torch.cuda._raw_device_count_nvml = lambda: 100\n"
        "assert torch.cuda.is_available()\n"
        "found = find_accelerator('auto', 'bf16-mixed')\n"
        "print(found.name, found.remark)",
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
        CUDA_VISIBLE_DEVICES="99",
    )
    auto, gpu, counted = told.splitlines()
    assert auto.startswith("cpu The GPU is not used: ")
    assert auto.endswith(".")
    reason = auto.removeprefix("cpu The GPU is not used: ")
    assert gpu == f"--accelerator gpu: {reason} Use --accelerator cpu, or auto."
    assert re.fullmatch(r"cpu The GPU is not used: .*(NVIDIA|CUDA).*\.", counted)


def test_another_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'tpu': expected 'cpu' or 'gpu'"):
        use_accelerator("tpu")  # type: ignore[arg-type]
