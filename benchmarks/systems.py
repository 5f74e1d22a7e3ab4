"""Foreign systems for `platforms.py`: a user with a clone, on another root or on this one.

As root, each command runs in namespaces of its own: mounts and processes end with it. As anybody
else it runs as it is, on this machine only.
"""

import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

IS_ROOT = os.geteuid() == 0
#: What tells pip and uv how to reach their index.
NETWORK = re.compile(r"(http|https|no|all)_proxy|PIP_INDEX_URL|UV_DEFAULT_INDEX", re.IGNORECASE)
#: The same, of a whole system: names, certificates, pip's and uv's settings.
NETWORK_FILES = (
    "etc/resolv.conf",
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pip.conf",
    "etc/uv/uv.toml",
)
FILES = "srv/files"  # the repository, MNIST


class Cannot(Exception):  # noqa: N818
    """This machine has not got what a system needs."""


class Failed(Exception):  # noqa: N818
    """A command in a foreign system failed."""


def ordinary_user() -> int:
    """A user who is not root, and whose name a system knows."""
    if not IS_ROOT:
        return os.geteuid()
    known = sorted(one.pw_uid for one in pwd.getpwall() if 1000 <= one.pw_uid < 60000)
    return known[0] if known else pwd.getpwnam("nobody").pw_uid


USER = ordinary_user()


def need(*programs: str) -> None:
    """Refuses a row whose programs are not here."""
    if missing := [name for name in programs if not shutil.which(name)]:
        raise Cannot(f"this machine has no {', '.join(missing)}")


def need_root() -> None:
    if not IS_ROOT:
        raise Cannot("only root can do this")


def call(*command: object, limit: float = 1800, **options: object) -> str:
    """Runs a command to its end; returns what it printed. The last lines of a failure are told."""
    done = subprocess.run(
        ["timeout", "--kill-after=10", str(limit), *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-8:]
        raise Failed(f"exit status {done.returncode}: " + "\n".join(last))
    return str(done.stdout)


@dataclass
class System:
    """Where an ordinary user works.

    Attributes:
        root: The system's root folder; "/" is this machine.
        home: The user's home. It and all other paths are as seen from this machine.
        files: A folder with the repository and MNIST.
        lent: Folders in root's own home, which is closed, that this user is to see all the same.
    """

    root: Path
    home: Path
    files: Path
    lent: set[Path] = field(default_factory=set)

    def inside(self, path: Path) -> str:
        """The path as the user sees it, for bash."""
        return shlex.quote(f"/{path.relative_to(self.root)}")

    def run(self, command: str, **environment: str) -> str:
        """Runs a line of bash in the user's home; returns what it printed."""
        variables = {name: value for name, value in os.environ.items() if NETWORK.fullmatch(name)}
        variables |= {"HOME": f"/{self.home.relative_to(self.root)}", "USER": "somebody"}
        variables |= {"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", **environment}
        settings = [f"{name}={value}" for name, value in variables.items()]
        user = ["env", "-i", *settings, "bash", "-ec", f"cd; {command}"]
        if not IS_ROOT:
            return call(*user)
        chroot = ["chroot", f"--userspec={USER}:{USER}", "--groups=", self.root]
        return call(*self.mounted(*chroot, *user))

    def mounted(self, *command: object) -> list[str]:
        """A command of root that sees this system's mounts, and whose processes end with it."""
        root = str(self.root).rstrip("/")
        lines: list[list[object]] = []
        if self.lent:
            # An empty home in place of the closed one; the folders in it where they were, since a
            # Python's libraries know its path.
            held = {folder: self.home.parent / "lent" / folder.name for folder in self.lent}
            lines += [["mkdir", "-p", *held.values()]]
            lines += [["mount", "--bind", folder, aside] for folder, aside in held.items()]
            lines += [["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", Path.home()]]
            lines += [["mkdir", "-p", *held]]
            lines += [["mount", "--bind", aside, folder] for folder, aside in held.items()]
        if root:
            lines += [["mount", "--rbind", "/dev", f"{root}/dev"]]
            lines += [["mount", "-t", "tmpfs", "tmpfs", f"{root}/dev/shm"]]
        lines += [["mount", "-t", "proc", "proc", f"{root}/proc"], ["exec", *command]]
        script = "\n".join(shlex.join(map(str, line)) for line in lines)
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*unshare, "bash", "-ec", script]


def owned(folder: Path) -> Path:
    """Gives a folder and all in it to the ordinary user."""
    if IS_ROOT:
        call("chown", "-R", f"{USER}:{USER}", folder)
    return folder


def this_machine(folder: Path, files: Path) -> System:
    """This machine's own root, and a home in a folder."""
    home = folder / "home"
    home.mkdir(parents=True)
    return System(Path("/"), owned(home), files)


def debian_root(root: Path, suite: str, packages: list[str], *options: str) -> Path:
    """A fresh Debian; seconds to a few minutes, by the network."""
    need_root()
    need("mmdebstrap")
    chosen = f"--include={','.join(packages)}"
    call("mmdebstrap", "--variant=minbase", "--mode=root", chosen, *options, suite, root)
    for name in NETWORK_FILES:
        if (source := Path("/", name)).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, root / name)
    return root


def debian(root: Path, suite: str, packages: list[str], files: Path, *options: str) -> System:
    """A fresh Debian whose only user has a home, and the files to read."""
    debian_root(root, suite, packages, *options)
    with (root / "etc/passwd").open("a") as users:
        users.write(f"somebody:x:{USER}:{USER}::/home/somebody:/bin/bash\n")
    home = root / "home/somebody"
    home.mkdir()
    shutil.copytree(files, root / FILES)
    owned(root / FILES)
    return System(root, owned(home), root / FILES)


@contextmanager
def emulated(processor: str) -> Iterator[None]:
    """Lets Linux start another processor's programs, wherever their root is."""
    need_root()
    need(f"qemu-{processor}-static")
    kernel = Path("/proc/sys/fs/binfmt_misc")
    if (kernel / f"qemu-{processor}").exists():
        yield
        return
    settings = Path(f"/usr/lib/binfmt.d/qemu-{processor}.conf")
    if not settings.exists():
        raise Cannot(f"this machine has no {settings}")
    has_kernel = (kernel / "register").exists()
    try:
        if not has_kernel:
            call("mount", "-t", "binfmt_misc", "binfmt_misc", kernel)
        (kernel / "register").write_text(settings.read_text().strip())
    except (Failed, OSError) as error:
        raise Cannot(f"Linux takes no other processor's programs: {error}") from error
    try:
        yield
    finally:
        (kernel / f"qemu-{processor}").write_text("-1")
        if not has_kernel:
            call("umount", kernel)
