"""Tables, pictures and the list of benchmarks; nothing is measured here."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.benchmarks.conftest import BENCHMARKS


def test_a_caption_names_the_version_of_any_package(benchmark):
    caption = benchmark("report").machine("numpy", "lightning")
    assert f"numpy {np.__version__}" in caption
    assert "lightning 2." in caption


def test_a_section_is_replaced_and_others_stay(benchmark, tmp_path):
    path = tmp_path / "RESULTS.md"
    for name, text in (("one", "old"), ("two", "kept"), ("one", r"new \1")):
        benchmark("report").write_section(name, text, path)
    written = path.read_text()
    assert "old" not in written
    assert written.index(r"new \1") < written.index("kept")


def test_every_benchmark_is_there_and_takes_what_it_is_given(benchmark):
    for one in benchmark("run_all").ALL.values():
        script = (BENCHMARKS / one.arguments[0]).read_text()
        takes = re.findall(r'add_argument\(\s*"(--[\w-]+)"', script)
        assert "--write" in takes
        assert ("--data-dir" in takes) == one.needs_images


def test_ratios_are_taken_within_a_round(benchmark):
    def told(*rates: float) -> list[dict[str, float]]:
        return [{"steps_per_second": rate, "processor_ms_per_step": 1.0} for rate in rates]

    # In the second round the machine was half as fast.
    measured = {("ours", 1): told(100, 50), ("torch", 1): told(200, 100), ("torch", 2): told(9, 9)}
    ours, torch, slow = benchmark("steps").rows_of(measured)
    assert ours.median == 75
    assert "model_pretrain.py has 0.50 (0.50 to 0.50) of these steps/s" in torch.note
    assert "not its best" in slow.unit
    assert "of these steps/s" not in slow.note


def test_growth_is_drawn(benchmark):
    growth = benchmark("growth")
    growths = growth.growths()
    for one in growths:
        for point in one.points:
            for peer in one.peers:
                one.found[peer, point] = [(0.03 * point, 700.0 + point / 1000)] * 3
    root = ElementTree.fromstring(growth.draw(growths))
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    assert len(root.findall(".//{*}circle")) == 2 * (2 * 5 + 3 + 2 * 4)
    for dot in root.findall(".//{*}circle"):
        assert left < float(dot.attrib["cx"]) < width
        assert top < float(dot.attrib["cy"]) < height
    assert "| 256 times | 256 times |" in growth.table(growths[0])[-1]


@pytest.mark.parametrize(("number", "name"), [(32, "32"), (8192, "8192"), (5_995_000, "6M")])
def test_numbers_on_an_axis_are_short(benchmark, number, name):
    assert benchmark("growth").round_name(number) == name
