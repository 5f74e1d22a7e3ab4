"""Running scripts that have to refuse: they end with status 2, say why, and change nothing.

None of them may load torch or NeMo, whose place folders of the same names take that leave a mark.
"""

from pathlib import Path

from tests.scripts import run_script

PRETRAIN_PY, FINETUNE_PY, PREDICT_PY = "model_pretrain.py", "model_finetune.py", "model_predict.py"
SCRIPTS = (PRETRAIN_PY, FINETUNE_PY, PREDICT_PY)

EVERYWHERE = {
    *("--help", "--data-dir", "--dataset", "--output-dir", "--precision", "--accelerator"),
    *("--devices", "--num-nodes", "--tensor-parallel", "--pipeline-parallel"),
    *("--micro-batch-size", "--num-workers", "--verbose", "--timeout"),
}
TRAINING = {
    *("--max-steps", "--global-batch-size", "--lr", "--seed", "--val-interval"),
    *("--save-interval", "--limit-val-batches", "--fresh", "--keep-changes"),
    *("--best-by", "--stop-after"),
}
SIZES = {"--hidden-size", "--latent-size"}
OPTIONS = {
    PRETRAIN_PY: EVERYWHERE | TRAINING | SIZES | {"--corruption"},
    FINETUNE_PY: EVERYWHERE | TRAINING | SIZES | {"--checkpoint", "--num-labels"},
    PREDICT_PY: EVERYWHERE | {"--checkpoint", "--input"},
}

CLOSED_PROXY = "http://127.0.0.1:9"


class Refusals:
    """Runs scripts that have to refuse, below one folder in which nothing may change."""

    def __init__(self, folder, traps):
        self.folder, self.traps = folder, traps
        self.runs = folder / "runs"
        self.data = folder / "data"

    def __call__(self, script, *arguments, light=True, **environment):
        """What a script says, without its name; all else that a refusal promises is checked."""
        before = snapshot(self.folder)
        given = ["--output-dir", self.runs, "--data-dir", self.data, *arguments]
        for option, value in (("--dataset", "digits"), ("--accelerator", "cpu")):
            if option not in given:
                given += [option, value]
        result = run_script(
            script,
            *given,
            timeout=60,
            **{
                **{"COLUMNS": "80", "https_proxy": CLOSED_PROXY, "HTTPS_PROXY": CLOSED_PROXY},
                **({"PYTHONPATH": str(self.traps)} if light else {}),
                **environment,
            },
        )
        assert result.status == 2, result.err
        assert result.out == ""
        assert "Traceback" not in result.err
        assert snapshot(self.folder) == before
        loaded = [path.name for path in self.traps.glob("*.loaded")]
        assert loaded == []
        return result.err

    def problems(self, script, *arguments, **options):
        """The messages, each on one line that begins with the script's name."""
        lines = self(script, *arguments, **options).splitlines()
        for line in lines:
            assert line.startswith(f"{script}: ")
            # short, apart from the paths in it
            assert len(line.replace(str(self.folder), "")) < 500
        return [line.removeprefix(f"{script}: ") for line in lines]

    def problem(self, script, *arguments, **options):
        (problem,) = self.problems(script, *arguments, **options)
        return problem


def set_traps(folder: Path) -> None:
    """Makes packages by the frameworks' names; importing one leaves a file behind."""
    for name in ("torch", "nemo", "lightning", "megatron", "torchvision"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(
            "from pathlib import Path\n"
            f"Path({str(folder)!r}, '{name}.loaded').touch()\n"
            f"raise ImportError('{name} is not to be loaded')\n"
        )


def snapshot(folder):
    """All that lies below a folder, with content and time."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


def spoil(checkpoint):
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"spoilt")
