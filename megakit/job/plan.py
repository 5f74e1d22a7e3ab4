"""The plan of a job, and its way from the launching process to the ranks."""

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from megakit.job.layout import Layout
from megakit.runtime.accelerator import Accelerator
from megakit.runtime.foreign_files import reading

PLAN_VARIABLE = "MEGAKIT_PLAN"


@dataclass(frozen=True)
class Plan:
    """The decisions that one process makes for all ranks of a job.

    Attributes:
        dataset: Name of the dataset.
        start: Checkpoint of the previous stage to start from, or None.
        resume: Checkpoint of this run to resume from, or None.
        accelerator: The device that the job runs on.
        precision: `bf16-mixed` or `32`.
        layout: How the job's processes share the work.
        identity: Everything that the run's result depends on; empty for a script that does not
            train.
        is_done: Whether the run has already ended.
        lock: Device and inode number of the lock file in the run directory; None for a job
            without a lock.
        old_run: The run that `--fresh` has renamed, or None.
        places: Absolute paths by name of the option; all ranks use them for options that the
            command leaves out.
    """

    dataset: Any
    start: str | None
    resume: str | None
    accelerator: Accelerator
    precision: str
    layout: Layout
    identity: dict[str, Any]
    is_done: bool
    lock: tuple[int, int] | None = None
    old_run: str | None = None
    places: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Serializes the plan for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that another process serialized with `to_json`."""
        content = json.loads(text)
        content["accelerator"] = Accelerator(**content["accelerator"])
        content["layout"] = Layout(**content["layout"])
        content["lock"] = tuple(content["lock"]) if content["lock"] else None
        return cls(**content)

    def for_ranks(self) -> tuple[str, int]:
        """Writes the plan to a file in memory, which the ranks of this process inherit.

        An environment variable has at most 128 KiB, too few for the code of a large project.

        Returns:
            The value of `PLAN_VARIABLE`, and the file descriptor that the ranks have to inherit.
        """
        descriptor = os.memfd_create("plan")
        with open(descriptor, "w", closefd=False) as file:
            file.write(self.to_json())
        return f"{os.getpid()} {descriptor}", descriptor

    @classmethod
    def of_launcher(cls, text: str) -> "Plan":
        """Returns the plan that this process's parent wrote in `for_ranks`.

        Args:
            text: The value of `PLAN_VARIABLE`.

        Raises:
            UserError: Another process set the value, or the plan is damaged.
        """
        remedy = f"The scripts set it for the processes that they start. Unset {PLAN_VARIABLE}."
        with reading(f"the environment variable {PLAN_VARIABLE}", remedy):
            launcher, descriptor = map(int, text.split())
            if launcher != os.getppid():
                raise ValueError("another job set it")
            # All ranks share the position in the file, and `pread` does not move it.
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.close(descriptor)
            return cls.from_json(content.decode())
