"""What a user can mend, and what a user asked for."""

import signal
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: a bad option, missing data, a damaged checkpoint.

    Scripts print the problems without a traceback and exit with status 2. Raise it before any work
    begins, and with every problem found, not only the first.

    Args:
        problems: One message each, naming the value, the rule and the remedy; or a single message.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Stopped(BaseException):
    """A signal asked training to stop, and a checkpoint was saved.

    Attributes:
        signal: Which one.
        step: Steps done.
    """

    def __init__(self, signum: int, step: int) -> None:
        self.signal = signum
        self.step = step
        super().__init__(f"{signal.Signals(signum).name} after step {step}")


class RunDirectoryLostError(Exception):
    """The folder that a run writes to was removed or replaced while the run was working."""
