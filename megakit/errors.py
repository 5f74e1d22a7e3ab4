"""Exceptions that scripts report without a traceback, and their messages."""

import contextlib
import signal
import unicodedata
from collections.abc import Iterable, Iterator


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


#: What messages about the content of a checkpoint's files end with.
DAMAGED = "The checkpoint is damaged or unsafe. "
USE_ANOTHER = f"{DAMAGED}Use another checkpoint."


@contextlib.contextmanager
def reading(what: object, remedy: str) -> Iterator[None]:
    """Turns every error while a file is read into one `UserError`.

    A damaged file makes parsers raise errors of any type, such as `RecursionError`.

    Args:
        what: The file, or the option that names the file; the message begins with it.
        remedy: What the user can do, as a full sentence.

    Raises:
        UserError: The `with` block raised an error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError):  # the system's reason, not the content's
            remedy = remedy.removeprefix(DAMAGED)
        if isinstance(error, MemoryError):
            remedy = "Free some memory, raise the limit of this process, or use a smaller file."
        raise UserError(
            printable(f"{what}: cannot be read ({reason_of(error)}). {remedy}")
        ) from error


def printable(text: str) -> str:
    """Escapes characters that break a line or control a terminal, e.g. newlines in file names."""
    return "".join(
        char
        if char.isprintable() or unicodedata.category(char) == "Zs"  # spaces of all kinds
        else char.encode("unicode_escape", "backslashreplace").decode()
        for char in text
    )


def brief(text: str) -> str:
    """Returns a printable text; shortens a text of more than 200 characters to 163 characters."""
    return printable(text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}")


def reason_of(error: Exception) -> str:
    """Returns the system's reason for an error, or the error's type and first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line, kind = str(error).partition("\n")[0][:200], type(error).__name__
    if not line:
        return kind
    # Messages of these types make sense without the type; the message of a KeyError is its key.
    return line if isinstance(error, ValueError | TypeError) else f"{kind}: {line}"


def first(problems: list[str]) -> list[str]:
    """Returns all problems, or the first 20 with the number of further problems."""
    more = len(problems) - 20
    return problems if more <= 0 else [*problems[:20], f"{more:,} more like these."]
