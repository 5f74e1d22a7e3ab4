"""Components are imported in a plain interpreter on a machine with a CUDA compiler and no GPU."""

from pathlib import Path

from tests.scripts import run_python


def test_components_in_a_plain_interpreter(tmp_path: Path) -> None:
    """With an `nvcc` that compiles nothing; Megatron alone fails there with an IndexError."""
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    done = run_python(
        "-c",
        "import model_components as parts; print(parts.parallel_state.is_initialized())",
        CUDA_HOME=str(tmp_path / "cuda"),
        CUDA_VISIBLE_DEVICES="",
        TORCH_CUDA_ARCH_LIST=None,
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
    )
    assert done.output() == "False\n"
