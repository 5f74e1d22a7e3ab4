"""A report's page, whole and self-contained; its parts, and figures, by what they show."""

import html
import json
import re

import numpy as np
from mnist.report_frame import Section, chart, embed_graph, picture, write_report

from megakit.training.metrics_csv import Metrics
from mnist import drawing, figures
from mnist import report_parts as parts

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


def test_the_figure_of_a_confusion_matrix():
    """Of labels 0, 0, 0, 1, 1, 2; class 3 does not occur."""
    counts = np.array([[2, 0, 1, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    (axes,) = figures.confusion_matrix(counts).axes
    at = {text.get_position(): text.get_text() for text in axes.texts}
    shown = {place: text for place, text in at.items() if max(place) < 3.5 and text.isdigit()}
    # (predicted, label): a column, and a row
    assert shown == {(0, 0): "2", (2, 0): "1", (1, 1): "2", (1, 2): "1"}
    assert [at[3.6, row] for row in range(4)] == ["66.7%", "100.0%", "0.0%", "none"]
    assert axes.get_title(loc="left") == "66.67% of 6 predicted right"


def test_each_mistake_is_shown_in_its_place():
    images = np.stack([np.full((4, 4), shade, np.uint8) for shade in (40, 80, 120)])
    numbers = np.array([1, 2, 3])
    picture = drawing.mistakes(images, numbers, numbers[::-1], np.array([0.9, 0.8, 0.7]), columns=2)
    masks = [(picture == shade).all(axis=2) for shade in (40, 80, 120)]
    first, second, third = (np.argwhere(mask)[0].tolist() for mask in masks)
    assert first[0] == second[0] < third[0]
    assert first[1] == third[1] < second[1]
    assert [int(mask.sum()) for mask in masks] == [64] * 3
