"""The whole tutorial: pretrain, fine-tune and predict, one script after the other."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megakit.training.options import CommonOptions, parse_options
from mnist_files import DataOptions

SCRIPTS = ("model_pretrain.py", "model_finetune.py", "model_predict.py")
#: Options that only the two scripts that train have.
TRAINING_ONLY = ("fresh", "seed")


@dataclass(kw_only=True)
class TutorialOptions(DataOptions, CommonOptions):
    """Run the three scripts in sequence: pretrain, fine-tune, predict."""

    seed: int = 42
    """Decides initial weights, the order of samples and random effects."""

    fresh: bool = False
    """Start over; the old runs are kept under other names."""


def arguments_for(script: str, options: TutorialOptions) -> list[str]:
    """The options that differ from their defaults, as a script takes them."""
    arguments = []
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        is_for_training = option.name in TRAINING_ONLY
        if value == option.default or (is_for_training and script == "model_predict.py"):
            continue
        arguments.append("--" + option.name.replace("_", "-"))
        if value is not True:
            arguments.append(str(value))
    return arguments


def main() -> int:
    """Runs the scripts until one fails; returns its exit status, or 0."""
    options = parse_options(TutorialOptions)
    for number, script in enumerate(SCRIPTS, start=1):
        arguments = arguments_for(script, options)
        print(f"[{number}/3] {' '.join([script, *arguments])}", file=sys.stderr, flush=True)
        # Only the last script's line, the path of predictions.csv, goes to standard output.
        is_last = script == SCRIPTS[-1]
        status = subprocess.call(
            [sys.executable, Path(__file__).with_name(script), *arguments],
            stdout=None if is_last else subprocess.DEVNULL,
        )
        if status:
            return status if status > 0 else 128 - status
    return 0


if __name__ == "__main__":
    sys.exit(main())
