"""Two made-up stages and their options, for tests of runs without any model."""

from dataclasses import dataclass

from megakit.checkpoints.manifest import checkpoint_name
from megakit.job.options import TrainingOptions
from megakit.job.stage import Stage

FIRST = Stage(name="first", script="first.py", model="Encoder", width=8, num_pipeline_stages=2)
SECOND = Stage(name="second", script="second.py", model="Classifier", before=FIRST)
#: The checkpoint of a finished run's last step.
LAST = checkpoint_name(TrainingOptions.max_steps)


@dataclass(kw_only=True)
class FirstOptions(TrainingOptions):
    dataset: str = "plums"

    def resolve_dataset(self, previous, report, *how):
        return (previous or "plums") if self.dataset == "auto" else self.dataset


@dataclass(kw_only=True)
class SecondOptions(FirstOptions):
    checkpoint: str | None = None


@dataclass(kw_only=True)
class FewLabelsOptions(FirstOptions):
    num_labels: int | None = None

    def choice(self):
        return self.best_by if self.num_labels is None else "last"


def spoil(checkpoint):
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"spoilt")
