"""The pictures of the course are what their programs draw, and no text leaves its box."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import ImageFont

from tests.scripts import REPOSITORY, output_of

FOLDER = REPOSITORY / "docs" / "images"
DRAWN = """
import json, runpy, sys
pictures = runpy.run_path(sys.argv.pop(1))["pictures"]()
print(json.dumps({f"{picture.name}.svg": picture.svg() for picture in pictures}))
"""
#: The widest of the fonts that readers have.
FONTS = {
    weight: ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts/ttf", f"{name}.ttf"), 13)
    for weight, name in (("", "DejaVuSans"), ("bold", "DejaVuSans-Bold"))
}


@pytest.mark.parametrize(
    "program",
    [
        *("layers_and_tables", "ranks_and_pipeline", "step"),
        pytest.param("micro_batches_and_checkpoint", marks=pytest.mark.long),
    ],
)
def test_pictures_are_up_to_date(program: str, tmp_path: Path) -> None:
    file = FOLDER / f"make_{program}.py"
    for name, text in json.loads(output_of(DRAWN, file, cwd=tmp_path).splitlines()[-1]).items():
        assert (FOLDER / name).read_text() == text, f"run docs/images/{file.name}"


def test_every_picture_is_of_a_program() -> None:
    programs = "".join(file.read_text() for file in FOLDER.glob("make_*.py"))
    drawn = {f"{name}.svg" for name in re.findall(r'Picture\(\s*"(\w+)"', programs)}
    assert drawn == {file.name for file in FOLDER.glob("*.svg")}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.svg")), ids=lambda file: file.stem)
def test_text_stays_in_its_box(file: Path) -> None:
    picture = ElementTree.parse(file).getroot()
    _, top, width, height = map(float, picture.attrib["viewBox"].split())
    assert (width, width) == (380, float(picture.attrib["width"]))
    spaces = [(0.0, top, width, top + height)]
    for box in picture.iterfind("{*}rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        if "part" not in box.attrib["class"]:
            spaces.append((x, y, x + width, y + height))
    for text in picture.iterfind("{*}text"):
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        css = text.attrib["class"].split()
        length = FONTS["bold" if "bold" in css else ""].getlength(text.text or "")
        first = x if "start" in css else x - length / 2
        last = first + length
        for left, top, right, bottom in spaces:
            if left <= x <= right and top <= y <= bottom:
                is_right = left <= first and last <= right and top <= y - 9
            else:
                is_right = last <= left or first >= right or y <= top or y - 9 >= bottom
            assert is_right, text.text
