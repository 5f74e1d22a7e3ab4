"""The exercises: solutions are right, known mistakes are recognized, and files are written once."""

import itertools
import json
import shutil
import sys

import pytest

from exercises import grading
from exercises.blanks import MARK, missing, taken_out
from exercises.course import read_course
from exercises.grading import (
    LIMIT,
    are_alike,
    diagnose,
    expected,
    first_wrong,
    outcomes_of,
    right_values,
    without_sizes,
)
from megakit.testing import Ranks
from tests.scripts import REPOSITORY, run

COURSE = read_course()
KNOWN = json.loads(grading.KNOWN.read_text())
each = pytest.mark.parametrize("exercise", COURSE, ids=[one.name for one in COURSE])


@pytest.fixture(scope="module")
def own():
    """Ranks that are given up sooner than those of other tests: one of the mistakes hangs."""
    with Ranks(4, timeout=LIMIT) as pool:
        yield pool


@pytest.mark.long
@each
def test_the_solution_is_right(exercise, own):
    right = right_values(own, exercise)
    outcomes = [*outcomes_of(own, exercise, REPOSITORY / exercise.program)]
    found = [
        (outcome.error, first_wrong(outcome.values, expected(right, layout)))
        for outcome, layout in zip(outcomes, exercise.layouts, strict=True)
    ]
    assert {*found} == {("", None)}


@pytest.mark.long
@each
def test_each_mistake_gives_its_numbers_and_no_other_does(exercise, own):
    found, known = grading.measure(own, exercise), KNOWN[exercise.name]
    others = [
        name
        for name, marks in found.items()
        if not are_alike(without_sizes(marks), without_sizes(known[name]))
    ]
    assert others == []


@each
def test_mistakes_differ_from_each_other_and_from_what_is_right(exercise):
    """By twice what rounding explains, or one number could be that of two mistakes."""
    known = KNOWN[exercise.name]
    assert [*known] == [mistake.name for mistake in exercise.mistakes]
    assert len(known) >= 1 + 2 * bool(exercise.gaps)
    for one, other in itertools.combinations(known.values(), 2):
        assert not are_alike(one, other), (one, other)


@each
def test_a_blank_lacks_the_solution_and_says_what_to_write(exercise):
    compile(exercise.blank, exercise.name, "exec")
    assert [task for _, task in missing(exercise.blank)] == [
        " ".join(gap.task.split()) for gap in sorted_by_line(exercise)
    ]
    for _, code in taken_out(exercise.solution, exercise.gaps):
        assert "\n" not in code or code not in exercise.blank
    for edit in exercise.planted:
        assert edit.old not in exercise.blank
    assert [*missing(exercise.solution)] == []


def sorted_by_line(exercise):
    lines = [line for line, _ in taken_out(exercise.solution, exercise.gaps)]
    return [
        gap for _, gap in sorted(zip(lines, exercise.gaps, strict=True), key=lambda one: one[0])
    ]


@pytest.fixture
def project(tmp_path):
    """A copy of the exercises, where a learner's files are written."""
    for name in ("megakit", "mnist", "ladder"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copytree(
        REPOSITORY / "exercises",
        tmp_path / "exercises",
        ignore=shutil.ignore_patterns("mine", "__pycache__"),
    )
    return tmp_path


def exercise(project, *arguments):
    return run(sys.executable, project / "exercises/exercise.py", *arguments, cwd=project)


def fill_in(project, edits):
    """Writes the solution of exercise 4 with changes into the learner's file."""
    source = (REPOSITORY / "exercises/by_hand.py").read_text()
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    (project / "exercises/mine/04_row_parallel.py").write_text(source)


TWICE = [
    ("linear(x, self.weight)", "linear(x, self.weight, self.bias)"),
    ("self.group) + self.bias", "self.group)"),
]
UNKNOWN = [
    ("summand.clone()", "summand.clone() * 1.01"),
    ("summand = nn.functional", 'print("see", x.shape)\n        summand = nn.functional'),
]


RAISES = f'        raise NotImplementedError("{MARK}")'


def test_a_learner_s_way(project):
    """An empty file, a known mistake, an unknown one, an error of one's own, the right answer."""
    begun = exercise(project, 4)
    assert begun.status == 0
    assert "The file is exercises/mine/04_row_parallel.py." in begun.out
    file = project / "exercises/mine/04_row_parallel.py"
    assert file.read_text().count(MARK) == 8
    empty = exercise(project, 4)
    assert empty.status == 1
    assert empty.out.count("still raises NotImplementedError") == 4
    line = file.read_text().splitlines().index(RAISES) + 1
    first = f"Line {line} of 04_row_parallel.py still raises NotImplementedError: return the sum of"
    assert first in " ".join(empty.out.split())

    fill_in(project, TWICE)
    before = file.read_text()
    known = exercise(project, 4)
    assert known.status == 1
    assert "This is a known mistake:\nThe bias is added on each rank before the sum" in known.out
    assert "Read docs/parallelism.md" in known.out
    assert file.read_text() == before

    fill_in(project, UNKNOWN)
    unknown = exercise(project, 4)
    assert unknown.status == 1
    assert "from step 1 on: loss 0." in unknown.out
    assert unknown.out.count("  rank 1: see torch.Size([32, 32])") == 10
    assert "No known mistake gives these numbers." in unknown.out

    fill_in(
        project,
        [("return gradient, None\n\n\nclass Column", "return grad, None\n\n\nclass Column")],
    )
    broken = exercise(project, 4)
    assert broken.status == 1
    line = file.read_text().splitlines().index("        return grad, None") + 1
    says = f"NameError: name 'grad' is not defined\n  line {line}: return grad, None"
    assert says in broken.out

    file.write_text(file.read_text().replace("self.bias = whole.bias", "self.bias = (whole.bias"))
    unreadable = exercise(project, 4)
    assert unreadable.status == 1
    assert "of 04_row_parallel.py: '(' was never closed." in unreadable.out
    fill_in(project, [])
    right = exercise(project, 4)
    assert (right.status, right.out.count("right"), right.out[-7:]) == (0, 2, "Right.\n")
    assert " 4  A row-parallel linear layer" in exercise(project).out
    assert exercise(project).out.splitlines()[3].endswith(" right")


def test_hint_and_solution_write_no_file(project):
    assert "Sum first, then add the bias" in exercise(project, 4, "--hint").output()
    shown = exercise(project, 4, "--solution").output()
    assert "shard = whole.weight.chunk(group.size(), dim=1)[group.rank()]" in shown
    assert (
        "+        batch_p2p_comm=options.batch_p2p," in exercise(project, 12, "--solution").output()
    )
    assert not (project / "exercises/mine").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("13",), "run: exercise 13: the exercises have the numbers 1 to 12. "),
        (("1", "--file", "nowhere.py"), "nowhere.py: "),
    ],
)
def test_what_is_refused(arguments, says, project):
    done = exercise(project, *arguments)
    assert done.status == 2
    assert says in done.err


def test_samples_that_several_replicas_read_are_not_right(project):
    """The losses are: the mean of equal gradients is the gradient."""
    source = (REPOSITORY / "ladder/3_megatron.py").read_text()
    old = "range(step * batch + rank * size, (step + 1) * batch, ranks * size)"
    assert old in source
    file = project / "build" / "all.py"
    file.parent.mkdir()
    file.write_text(source.replace(old, "range(step * batch, (step + 1) * batch, size)"))
    done = exercise(project, 2, "--file", file)
    assert done.status == 1
    assert done.out.count("right, but its ranks read 320 samples too many") == 3
    assert "Each sample is to be read once" in done.out


def test_one_layout_alone_is_no_mistake():
    """All layouts have to give a mistake's numbers."""
    outcomes = [
        grading.Outcome({10: (0.145239368, 0.060322847)}),
        grading.Outcome({10: (1.0, 1.0)}),
    ]
    assert diagnose(COURSE[2], outcomes) == []
