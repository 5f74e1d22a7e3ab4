"""Which changes of a script and its modules count, and by which name."""

import sys
from pathlib import Path

import pytest

from megakit.job.program import code_of

SCRIPT = '''
"""A script."""

import json as js
from dataclasses import dataclass

from megakit.job.script import run_script
from options import DataOptions

STAGE = Stage(name="train", script="train.py", model="Model")
STEPS = 7


@dataclass
class Options(DataOptions):
    """Train."""

    lr: float = 1.0
    """How fast."""

    def problems(self):
        return checked(self)

    @property
    def peak(self):
        return self.lr * 2


def checked(options):
    return []


def work(run):
    """Trains."""
    import parts
    from parts import Loss

    if run:
        return Loss(), parts.build(STEPS), js.dumps({}), f"{run} steps" "!"
    return None


def unused():
    return 1


if __name__ == "__main__":
    run_script(STAGE, Options, work)
'''
PARTS = """
import torch.nn.functional as F
from torch import nn

from deeper import depth

print("on import")


class Base:
    weight = 1.0


class Loss(Base):
    def forward(self, x):
        return F.mse_loss(x, x)


def build(steps):
    return Net(depth() + steps)


class Net(nn.Module):
    width: int = 64


class Elsewhere:
    pass
"""
OPTIONS = """
class DataOptions:
    where: str = 'data'

    def grow(self):
        return 1
"""
FILES = {
    "train.py": SCRIPT,
    "parts.py": PARTS,
    "options.py": OPTIONS,
    "deeper.py": "def depth():\n    return 3\n",
}


def code(folder: Path, **changes: tuple[str, str]) -> dict[str, str]:
    """The code of the script above, after replacing text in some of its files."""
    folder.mkdir(exist_ok=True)
    for name, text in FILES.items():
        old, new = changes.get(name.removesuffix(".py"), ("", ""))
        assert old in text
        (folder / name).write_text(text.replace(old, new) if old else text)
    return code_of(folder / "train.py")


@pytest.fixture
def before(tmp_path: Path) -> dict[str, str]:
    return code(tmp_path / "before")


def changed(tmp_path: Path, before: dict[str, str], **changes: tuple[str, str]) -> list[str]:
    after = code(tmp_path / "after", **changes)
    return sorted(name for name in before.keys() | after if before.get(name) != after.get(name))


def test_what_is_reached(before: dict[str, str]) -> None:
    assert [*before] == sorted(
        [
            *("Base", "Base.weight", "DataOptions.grow", "Loss", "Loss.forward", "Net"),
            *("Net.width", "Options.peak", "STEPS", "build", "depth", "work"),
            *("main block of the script", "top level of parts"),
        ]
    )


@pytest.mark.parametrize(
    ("module", "old", "new", "names"),
    [
        ("parts", "mse_loss", "l1_loss", ["Loss.forward"]),
        ("parts", "F.mse_loss(x, x)", "F.mse_loss(x, x) + 1", ["Loss.forward"]),
        ("parts", "torch.nn.functional as F", "mine.functional as F", ["Loss.forward"]),
        ("parts", "width: int = 64", "width: int = 32", ["Net.width"]),
        ("parts", "width: int = 64", "width: int = 64\n    depth: int = 2", ["Net", "Net.depth"]),
        ("parts", "    weight = 1.0", "    pass", ["Base", "Base.weight"]),
        ("parts", "class Loss(Base)", "class Loss(Net, Base)", ["Loss"]),
        ("parts", 'print("on import")', 'print("at import")', ["top level of parts"]),
        ("deeper", "3", "4", ["depth"]),
        ("train", "STEPS = 7", "STEPS = 8", ["STEPS"]),
        ("train", "self.lr * 2", "self.lr * 3", ["Options.peak"]),
        ("train", "{run} steps", "{run!r} steps", ["work"]),
        ("train", "if run:", "if not run:", ["work"]),
        ("train", "Options, work)", "Options, lambda run: work(1))", ["main block of the script"]),
        (
            "train",
            "    run_script(",
            "    STEPS = 9\n    run_script(",
            ["main block of the script"],
        ),
        ("train", "lr: float = 1.0", "lr: float = 1.0\n    warm: ClassVar = 2", ["Options.warm"]),
        ("parts", "width: int = 64", "width: int = 64\n    a, b = 1, 2", ["Net", "Net.a"]),
        ("options", "return 1", "return 2", ["DataOptions.grow"]),
        ("train", "lr: float = 1.0", "lr: checked = 1.0", ["checked"]),  # the type of an option
    ],
)
def test_a_change_is_named(
    tmp_path: Path, before: dict[str, str], module: str, old: str, new: str, names: list[str]
) -> None:
    assert changed(tmp_path, before, **{module: (old, new)}) == names


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("train", '"""Trains."""', '"""Trains a model, at length."""'),
        ("train", '    """Trains."""\n', ""),
        ("train", "    if run:", "    # When there is one.\n    if run:"),
        ("train", 'f"{run} steps" "!"', "f'{run} steps!'"),
        ("train", "return Loss(), parts", "return (\n            Loss()), parts"),
        ("train", "lr: float = 1.0", "lr: float = 2.0"),  # options count by their values
        ("train", "return []", "return [1]"),  # and what their checks find is told
        ("train", "def unused():\n    return 1", "def unused():\n    return 2"),
        ("train", 'name="train"', 'name="training"'),  # the stage is compared itself
        ("train", "import json as js\n", "import json as js\nimport os\n"),
        (
            "train",
            "    import parts\n    from parts import Loss\n",
            "    from parts import Loss\n    import parts\n",
        ),
        ("parts", "def forward(self, x):", "def forward(self, x: int) -> int:"),
        ("options", "'data'", "'elsewhere'"),
        *(
            ("train", "def problems(self):", f"def {check}(self):")
            for check in ("resolve_dataset", "adapt", "choice", "harmless", "model_sizes")
        ),
        ("train", "(STAGE, Options, work)", "(work=work, stage=STAGE, options_class=Options)"),
        ("train", 'if __name__ == "__main__":', "if '__main__' == __name__:"),
        ("deeper", "def depth():", "\n\n\ndef depth():  # three"),
        ("parts", "class Elsewhere:\n    pass", 'class Elsewhere:\n    """Not here."""'),
    ],
)
def test_what_computes_the_same_is_no_change(
    tmp_path: Path, before: dict[str, str], module: str, old: str, new: str
) -> None:
    assert changed(tmp_path, before, **{module: (old, new)}) == []


def test_the_order_of_definitions_does_not_count(tmp_path: Path, before: dict[str, str]) -> None:
    base, loss = PARTS[PARTS.index("class Base") :].split("\n\n\n")[:2]
    assert changed(tmp_path, before, parts=(f"{base}\n\n\n{loss}", f"{loss}\n\n\n{base}")) == []


def test_nothing_is_imported(before: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert before
    assert capsys.readouterr().out == ""
    assert not {"parts", "deeper"} & {*sys.modules}
