"""Components are imported in a plain interpreter on a machine with a CUDA compiler and no GPU."""

from pathlib import Path

import pytest

from tests.scripts import Result, run_python


def with_compiler(code: str, folder: Path) -> Result:
    """Runs code on a machine that has `nvcc`, which compiles nothing, and no GPU."""
    compiler = folder / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    return run_python(
        *("-c", code),
        CUDA_HOME=str(folder / "cuda"),
        CUDA_VISIBLE_DEVICES="",
        TORCH_CUDA_ARCH_LIST=None,
        TORCH_EXTENSIONS_DIR=str(folder / "extensions"),
    )


@pytest.mark.parametrize(
    "module",
    [
        "model_components",
        pytest.param("examples.vit.vit_components", marks=pytest.mark.long),
        pytest.param("examples.gpt.gpt_components", marks=pytest.mark.long),
    ],
)
def test_components_in_a_plain_interpreter(module: str, tmp_path: Path) -> None:
    code = f"import {module} as parts; print(parts.parallel_state.is_initialized())"
    assert with_compiler(code, tmp_path).output() == "False\n"


@pytest.mark.long
def test_megatron_alone_fails_there(tmp_path: Path) -> None:
    """Otherwise the test above could not fail, and `import_megatron` is not needed any more."""
    done = with_compiler(
        "import torch; print(torch.cuda._is_compiled()); import megatron.core", tmp_path
    )
    if done.out == "False\n":
        pytest.skip("this torch was built without CUDA")
    assert done.status == 1
    assert "IndexError" in done.err
