"""Reports that a library's C++ code aborted this process."""

import faulthandler
import subprocess

from megakit.reporting.console import Console

#: If this process exits normally, its end of the pipe closes, and `read` fails. After an abort, the
#: input contains the stacks.
WATCHER = """
IFS= read -r line || exit 0
case $line in *Aborted*) printf '%s\\n' "$1" >&2 ;; esac
printf '%s\\n' "$line"
exec cat
"""


def report_abort(console: Console, message: str) -> None:
    """When this process aborts, prints a message, and writes the stacks of its threads to the log.

    An aborting process runs no Python code. Python's `faulthandler` can only write the stacks to a
    file descriptor. Here, the descriptor is the input of a waiting shell, which prints the message.

    Args:
        console: Receives the message, also on a silent rank.
        message: One line that explains the abort.
    """
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "sh", message],
        stdin=subprocess.PIPE,
        stdout=2,  # the log, see `Console.divert`
        stderr=console.fileno(),
        start_new_session=True,  # Ctrl-C in a terminal does not end the shell
    )
    assert watcher.stdin is not None
    faulthandler.enable(watcher.stdin)
    watcher.returncode = 0  # nothing waits for the shell, which ends after this process
