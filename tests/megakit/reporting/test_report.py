"""A report's page: whole, self-contained, and its parts as they were given."""

import html
import json
import re

import numpy as np
import pytest

from megakit.reporting import report_parts as parts
from megakit.reporting.metrics import Metrics
from megakit.reporting.predictions import Predictions
from megakit.reporting.report import Section, chart, embed_graph, picture, write_report

IMAGE = np.zeros((4, 4), np.uint8)
EVIL = '"></script><script>alert("1")</script>&{{ title }}'


def figure_of(part):
    """The traces and the layout that a chart gives to plotly."""
    text = part.partition("Plotly.newPlot(")[2].partition(",")[2].strip()
    traces, end = json.JSONDecoder().raw_decode(text)
    return traces, json.JSONDecoder().raw_decode(text[end:].lstrip(" ,"))[0]


def test_the_page_is_whole_and_opens_nothing(tmp_path):
    path = tmp_path / "report.html"
    sections = [
        Section(EVIL, EVIL, chart([{"x": [1], "name": EVIL}], {}, EVIL)),
        Section("Second", "Two", picture(IMAGE, EVIL)),
        Section("Third", "", embed_graph({"name": EVIL}, {}, "graph")),
    ]
    write_report(path, EVIL, {EVIL: EVIL}, sections, [EVIL])
    page = path.read_text("utf-8")
    assert len(page) < 6_000_000
    assert page.count("plotly.js v") == 1
    assert "default-src 'none'" in page
    # Names never become HTML; otherwise the page would have further scripts.
    assert 'alert("1")</script>' not in page
    assert page.count("</script>") == 5  # plotly, the chart, the graph and its script, the page's
    escaped = str(html.escape(EVIL)).replace("&quot;", "&#34;")
    for tag in ("h1", "h2", "dt", "dd", "p class=note", "title"):
        assert f"<{tag}>{escaped}</{tag.split()[0]}>" in page
    shown = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', shown)
    assert {each[:5] for each in addresses} == {"#resu", "data:"}
    assert json.loads(page.partition('id="graph">')[2].partition("<")[0])["graph"]["name"] == EVIL


def test_curves_show_what_was_measured():
    rows = [Metrics(1, 8, 2.0, None, 0.1), Metrics(2, 16, None, 1.5, values={"val_top_5": 0.5})]
    traces, layout = figure_of(parts.curves(rows, "Losses"))
    shown = {t["name"]: list(zip(t["x"], t["y"], strict=True)) for t in traces}
    assert shown == {
        "training loss": [(1, 2.0)],
        "validation loss": [(2, 1.5)],
        "learning rate": [(1, 0.1)],
        "validation top 5": [(2, 0.5)],
    }
    # Further values have a place of their own.
    areas = sorted(layout[name]["domain"] for name in ("yaxis", "yaxis2", "yaxis3"))
    assert areas[0][1] < areas[1][0] < areas[1][1] < areas[2][0]


@pytest.mark.parametrize("dimensions", [2, 5])
def test_points_are_thinned_out_evenly(dimensions):
    points = np.random.default_rng(0).normal(size=(1000, dimensions))
    traces, _ = figure_of(parts.points_in_space(points, np.arange(1000) % 4, "", most=100))
    shown = [np.array([t["x"], t["y"], t["z"]]).T for t in traces]
    assert sum(map(len, shown)) == 100
    assert min(map(len, shown)) >= 20
    assert [t["name"] for t in traces] == ["0", "1", "2", "3"]
    assert len({t["marker"]["color"] for t in traces}) == 4
    assert np.allclose(shown[0][0, : min(3, dimensions)], points[0, :3], atol=1e-3)


def test_confusion_matrix():
    part = parts.confusion_matrix(np.array([[2, 2, 0], [0, 1, 0], [0, 0, 0]]))
    cells = re.findall(r"<td class=\"?([\w ]+)\"?[^>]*>(.*?)</td>", part)
    assert [text for _, text in cells] == [
        *("2", "2", "·", "50.0%", "·", "1", "·", "100.0%", "·", "·", "·", "none"),
    ]
    assert [kind for kind, _ in cells][:6] == [
        *("right", "wrong", "wrong", "share", "wrong", "right deep"),
    ]
    assert "label 0 predicted as 1," in part


def test_mistakes_are_never_quite_sure():
    probabilities = np.array([[1e-5, 1 - 1e-5], [0.9, 0.1]])
    made = Predictions(np.arange(2), np.array([0, 1]), probabilities)
    part = parts.mistakes(np.stack([IMAGE] * 2), made)
    assert re.findall(r"<b>(\d)</b> as <b class=wrong>(\d)</b><br>([\d.]+%)", part) == [
        ("0", "1", "99.9%"),
        ("1", "0", "90.0%"),
    ]
