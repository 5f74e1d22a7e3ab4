from .layout import Layout as Layout
from .notebook import open_run as open_run
from .option_types import (
    BatchSize as BatchSize,
    Count as Count,
    LearningRate as LearningRate,
    Range as Range,
    Seed as Seed,
    Size as Size,
)
from .options import CommonOptions as CommonOptions, TrainingOptions as TrainingOptions
from .run import Run as Run
from .run_directory import RunDirectory as RunDirectory, Stage as Stage
from .script import run_script as run_script
