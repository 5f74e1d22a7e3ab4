"""Exceptions that scripts report without a traceback."""

import signal
from collections.abc import Iterable


class UserError(Exception):
    """A problem that the user can fix: a bad option, missing data, a damaged checkpoint.

    Scripts print the problems without a traceback and exit with status 2. Raise a `UserError`
    before any work begins, and list every problem in it, not only the first.

    Args:
        problems: One message per problem, or a single message. Each message names the value, the
            rule and the remedy.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class Stopped(BaseException):
    """A signal stopped training, after a checkpoint was saved.

    Attributes:
        signal: Number of the signal.
        step: Optimizer steps done.
    """

    def __init__(self, signum: int, step: int) -> None:
        self.signal = signum
        self.step = step
        super().__init__(f"{signal.Signals(signum).name} after step {step}")


class RunDirectoryLostError(Exception):
    """The run directory was removed, renamed or replaced while the run was writing to it."""
