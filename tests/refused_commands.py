"""One table: commands that the scripts refuse, and the words in which they do it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mnist.files import MNIST_SHA256
from tests.refusals import FINETUNE_PY, PREDICT_PY, PRETRAIN_PY
from tests.scripts import read_json


@dataclass(frozen=True)
class Case:
    """A command that is refused.

    Attributes:
        script: The script.
        options: Its options as in a shell; `{}` is the folder that has the runs.
        told: One entry for each problem: the parts that its message has to have, between ` | `.
        is_fresh: Whether there are no runs yet; otherwise the tutorial was run there.
        change: What is done in the folder before.
    """

    script: str
    options: str
    told: list[str]
    is_fresh: bool = False
    change: Callable[[Path], object] | None = None


def damage_best(folder: Path) -> None:
    run = folder / "runs" / "pretrain"
    best = Path(read_json(run / "summary.json")["checkpoint"]).name
    path = run / "checkpoints" / best / "weights" / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))  # of the same size


CASES = {
    "unknown options": Case(
        FINETUNE_PY,
        "--warp 9 --lr 0",
        ["--warp: there is no such option. See --help.", "--lr 0.0: has to be above 0."],
    ),
    "an option almost right": Case(
        PRETRAIN_PY, "--max-step=3", ["--max-step=3: there is no such option. Is it --max-steps?"]
    ),
    "an attribute that is no option": Case(
        PRETRAIN_PY, "--given 1", ["--given: there is no such option. See --help."]
    ),
    "an option by its long name": Case(
        PRETRAIN_PY, "--learning_rate 1", ["--learning_rate: | Is it --lr? See --help."]
    ),
    "a value of the wrong kind": Case(
        PRETRAIN_PY, "--seed 4.2", ["--seed 4.2: has to be a whole number."]
    ),
    "a value that is no choice": Case(
        PRETRAIN_PY, "--dataset cifar", ["--dataset: | cifar | mnist | digits"]
    ),
    "no value": Case(PRETRAIN_PY, "--lr", ["--lr: expected one argument"]),
    "numbers out of range": Case(
        PRETRAIN_PY,
        "--devices 0 --pipeline-parallel 0 --num-workers -1 --val-interval 0 --lr nan "
        "--corruption 1.0",
        [
            "--devices 0: has to be at least 1",
            "--pipeline-parallel 0: has to be at least 1",
            "--val-interval 0: has to be at least 1",
            "--num-workers -1: has to be at least 0",
            "--lr nan: has to be a finite number",
            "--corruption 1.0: has to be below 1",
        ],
    ),
    "an empty text": Case(PREDICT_PY, "--checkpoint ''", ["--checkpoint '': the value is empty"]),
    "ranks that the sizes do not divide": Case(
        PRETRAIN_PY,
        "--devices 3 --tensor-parallel 2",
        ["--tensor-parallel 2 x --pipeline-parallel 1 = 2 | 3 x 1 = 3 | --devices 2"],
    ),
    "a width and stages that the model does not have": Case(
        PRETRAIN_PY,
        "--devices 9 --tensor-parallel 3 --pipeline-parallel 3",
        [
            "--tensor-parallel 3: has to divide the width | 64 | Try 2",
            "--pipeline-parallel 3: has to divide the number of layers | 2 | Try 2",
        ],
    ),
    "a micro batch that does not divide": Case(
        PRETRAIN_PY,
        "--micro-batch-size 100",
        ["--micro-batch-size 100 | divide --global-batch-size 128 | Try 64"],
    ),
    "another run, with both values of each option": Case(
        PRETRAIN_PY,
        "--seed 1 --lr 0.5 --limit-val-batches 3 --best-by last",
        [
            "runs/pretrain | --seed was 42, now 1 | --lr was 0.002, now 0.5 "
            "| --limit-val-batches was None, now 3 | --best-by was val_loss, now last | --fresh"
        ],
    ),
    "other sizes than the checkpoint's": Case(
        FINETUNE_PY,
        "--hidden-size 32 --output-dir {}/other "
        "--checkpoint {}/runs/pretrain/checkpoints/step=000500",
        ["--hidden-size 32 | step=000500 has 64 | --checkpoint none"],
    ),
    "nothing to fine-tune": Case(
        FINETUNE_PY,
        "",
        [f"runs/pretrain | no checkpoint | {PRETRAIN_PY} | --checkpoint"],
        is_fresh=True,
    ),
    "a run of another stage instead of a checkpoint": Case(
        PREDICT_PY,
        "--checkpoint {}/runs/pretrain",
        [f"step=000500 | stage pretrain saved this PretrainModel | Run {FINETUNE_PY}"],
    ),
    "a folder in which the kernel makes no folder": Case(
        PRETRAIN_PY,
        "--output-dir /proc/x",
        ["/proc/x | cannot be | another"],
    ),
    "a damaged checkpoint, and a layout that is impossible": Case(
        FINETUNE_PY,
        "--devices 4 --pipeline-parallel 4",
        ["--pipeline-parallel 4", "weights/__0_0.distcp"],
        change=damage_best,
    ),
    "no MNIST, and none to download": Case(
        PRETRAIN_PY,
        "--dataset mnist",
        [f"--data-dir | data/MNIST/raw lacks | cannot be downloaded | {' | '.join(MNIST_SHA256)}"],
        is_fresh=True,
    ),
    "a layout that the attention does not have": Case(
        "examples/vit/model_pretrain.py",
        "--devices 24 --tensor-parallel 8 --pipeline-parallel 3 --global-batch-size 24",
        [
            "has to divide the number of attention heads, 4. Try 4.",
            "has to divide the number of layers or parts, 4. Try 2.",
        ],
        is_fresh=True,
    ),
}
#: Likewise by the scripts without NeMo.
CASES |= {
    f"{name}, without NeMo": replace(CASES[name], script=f"examples/megatron/{CASES[name].script}")
    for name in (
        "numbers out of range",
        "nothing to fine-tune",
        "a micro batch that does not divide",
    )
}
