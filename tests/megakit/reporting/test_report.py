"""A report's page: whole, self-contained, and its parts as they were given."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from megakit.reporting import report_parts as parts
from megakit.reporting.metrics import Metrics
from megakit.reporting.report import Section, chart, embed_json, picture, write_report


class Reader(HTMLParser):
    """Tags with their attributes, and the text within each kind of tag."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self._open = [], {}, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, text):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(text)


def figure_of(part):
    """What a chart tells plotly."""
    (text,) = re.findall(r"<script[^>]*>(.*)</script>", part)
    return json.loads(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    image = np.zeros((4, 4), np.uint8)
    write_report(
        path,
        "Less < more & {{plotly}}",
        {"accuracy": "95%"},
        [
            Section("First", "One <b>", chart([{"x": [1], "y": [2]}], {}, "A line")),
            Section("Second", "Two", picture(image, "black")),
        ],
        ["Nothing is left out."],
    )
    return path.read_text("utf-8")


class TestPage:
    def test_names_nothing_outside_of_itself(self, page):
        addresses = [
            value
            for _, attributes in Reader(page).tags
            for name, value in attributes.items()
            if name in {"src", "href", "data", "action", "srcset"}
        ]
        names = {attributes.get("id") for _, attributes in Reader(page).tags}
        assert "#results" in addresses
        outside = [each for each in addresses if not each.startswith("data:")]
        assert [each for each in outside if not (each[0] == "#" and each[1:] in names)] == []
        assert "@import" not in page.split("</style>")[0]

    def test_forbids_the_browser_to_fetch_anything(self, page):
        (policy,) = [
            attributes["content"]
            for tag, attributes in Reader(page).tags
            if attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        allowed = {word for rule in rules.values() for word in rule.split()}
        assert allowed == {"'none'", "'unsafe-inline'", "data:", "blob:"}

    def test_what_is_given_stands_there_in_order_and_as_text(self, page):
        texts = Reader(page).texts
        assert texts["h1"] == ["Less < more & {{plotly}}"]
        assert texts["h2"] == ["First", "Second"]
        assert (texts["dt"], texts["dd"]) == (["accuracy"], ["95%"])
        assert "One <b>" in texts["p"]
        assert "Nothing is left out." in texts["p"]

    def test_plotly_is_in_it_once(self, page):
        assert page.count("plotly.js v") == 1
        assert len(page) < 6_000_000


class TestEmbedding:
    def test_json(self):
        element = embed_json({"a": np.arange(3), "b": [float("nan"), 1.5], "c": "</script>"}, "it")
        assert element.count("</script>") == 1
        assert 'id="it"' in element
        assert figure_of(element) == {"a": [0, 1, 2], "b": [None, 1.5], "c": "</script>"}


class TestParts:
    def test_curves_show_what_was_measured(self):
        rows = [Metrics(1, 8, 2.0, None, 0.1), Metrics(2, 16, None, 1.5, None)]
        traces = {trace["name"]: trace for trace in figure_of(parts.curves(rows, ""))["data"]}
        shown = {name: list(zip(t["x"], t["y"], strict=True)) for name, t in traces.items()}
        assert shown == {
            "training loss": [(1, 2.0)],
            "validation loss": [(2, 1.5)],
            "learning rate": [(1, 0.1)],
        }

    def test_curves_of_further_values_have_a_place_of_their_own(self):
        rows = [Metrics(1, 8, 2.0, None, 0.1), Metrics(2, 16, values={"val_top_5": 0.5})]
        figure = figure_of(parts.curves(rows, ""))
        *_, trace = figure["data"]
        assert (trace["name"], trace["x"], trace["y"]) == ("validation top 5", [2], [0.5])
        areas = [figure["layout"][trace["yaxis"].replace("y", "yaxis")]["domain"]]
        areas += [figure["layout"][name]["domain"] for name in ("yaxis", "yaxis2")]
        (low, middle, high) = sorted(areas)
        assert low[1] < middle[0] < middle[1] < high[0]

    @pytest.mark.parametrize("dimensions", [2, 5])
    def test_points_are_thinned_out_evenly(self, dimensions):
        points = np.random.default_rng(0).normal(size=(1000, dimensions))
        classes = np.arange(1000) % 4
        figure = figure_of(parts.points_in_space(points, classes, "", most=100))
        shown = [np.array([t["x"], t["y"], t["z"]]).T for t in figure["data"]]
        assert sum(map(len, shown)) == 100
        assert [t["name"] for t in figure["data"]] == ["0", "1", "2", "3"]
        assert min(map(len, shown)) >= 20
        assert len({t["marker"]["color"] for t in figure["data"]}) == 4
        assert np.allclose(shown[0][0, : min(3, dimensions)], points[0, :3], atol=1e-3)

    def test_confusion_matrix(self):
        counts = np.array([[2, 2, 0], [0, 1, 0], [0, 0, 0]])
        texts = Reader(parts.confusion_matrix(counts)).texts
        assert texts["td"] == [
            *("2", "2", "·", "50.0%"),
            *("·", "1", "·", "100.0%"),
            *("·", "·", "·", "none"),
        ]

    def test_mistakes_are_never_quite_sure(self):
        probabilities = np.array([[1e-5, 1 - 1e-5], [0.9, 0.1]])
        part = parts.mistakes(np.zeros((2, 4, 4), np.uint8), np.array([0, 1]), probabilities)
        assert re.findall(r"<b>(\d)</b> as <b class=wrong>(\d)</b><br>([\d.]+%)", part) == [
            ("0", "1", "99.9%"),
            ("1", "0", "90.0%"),
        ]
