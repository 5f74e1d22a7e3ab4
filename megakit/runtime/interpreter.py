"""Checks settings of Python and the system before the frameworks are imported."""

import os
import resource
import sys
import warnings

#: Open files that one process needs (95 were measured), and further open files for each process
#: that it communicates with (at most 11 were measured).
FILES, FILES_PER_PEER = 128, 16
#: Address space that one process needs: 4.0 GiB were measured on a CPU.
ADDRESS_SPACE = 9 << 29  # 4.5 GiB


def adapt_interpreter() -> None:
    """Prevents warnings from ending the program, and sets the limit of open files to the maximum.

    `PYTHONWARNINGS=error` turns every warning into an error, and NeMo and Megatron-Core warn about
    each other's versions on import.
    """
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.simplefilter("default")
        # Child processes would inherit these settings.
        sys.warnoptions.clear()
        os.environ.pop("PYTHONWARNINGS", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def find_limits(num_peers: int) -> list[str]:
    """Returns one message per setting or limit under which the frameworks would fail.

    Args:
        num_peers: Processes that this process communicates with: ranks and data loader workers.
    """
    problems = []
    if sys.flags.optimize > 1:
        problems.append(
            "python -OO (PYTHONOPTIMIZE=2) removes docstrings, and importing NeMo needs them. "
            "Use -O at most, or unset PYTHONOPTIMIZE."
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = FILES + FILES_PER_PEER * num_peers
    if files != resource.RLIM_INFINITY and files < needed:
        problems.append(
            f"ulimit -n {files}: a process of this job opens up to {needed:,} files. "
            f"Raise the limit to at least {needed}."
        )
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < ADDRESS_SPACE:
        problems.append(
            f"ulimit -v {space >> 10}: a process of this job reserves over 4 GiB of address space. "
            f"Raise the limit to at least {ADDRESS_SPACE >> 10}, or unlimited."
        )
    return problems


def search_path() -> str:
    """Returns the PYTHONPATH for a child process that imports what this process can import.

    PYTHONPATH comes first: another `sitecustomize` of this Python must not hide that of PYTHONPATH.
    """
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*inherited, *(entry or "." for entry in sys.path)])
