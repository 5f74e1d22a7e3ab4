"""A report's page: whole, self-contained, and its parts as they were given."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from megakit.reporting import report_parts as parts
from megakit.reporting.metrics import Metrics
from megakit.reporting.report import Section, chart, embed_graph, embed_json, picture, write_report


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


def label_of(part):
    """What a chart tells those who do not see it."""
    (label,) = (a["aria-label"] for _, a in Reader(part).tags if a.get("role") == "img")
    return label


def rows_of(part):
    """The lines of a table."""
    rows = re.findall(r"<tr>(.*?)</tr>", part)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


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

    def test_arrays_come_back_exactly(self):
        array = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
        element, _, _ = embed_graph({}, {"w": array}, "it").partition("\n<script>")
        entry = figure_of(element)["weights"]["w"]
        back = np.frombuffer(base64.b64decode(entry["float32"]), "<f4").reshape(entry["shape"])
        assert np.array_equal(back, array)

    def test_pictures_come_back_exactly(self):
        image = np.random.default_rng(0).integers(0, 256, (28, 28)).astype(np.uint8)
        ((_, attributes),) = Reader(picture(image, 'a "quoted" one')).tags
        assert attributes["alt"] == 'a "quoted" one'
        data = base64.b64decode(attributes["src"].removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), image)


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

    def test_curves_of_nothing(self):
        assert [t["x"] for t in figure_of(parts.curves([], ""))["data"]] == [[], [], []]

    @pytest.mark.parametrize("dimensions", [2, 3, 5])
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

    def test_points_that_are_few_are_all_shown(self):
        figure = figure_of(parts.points_in_space(np.eye(3), np.arange(3), ""))
        assert [(t["x"], t["y"], t["z"]) for t in figure["data"]] == [
            ([1.0], [0.0], [0.0]),
            ([0.0], [1.0], [0.0]),
            ([0.0], [0.0], [1.0]),
        ]

    def test_curves_in_words_and_in_a_table(self):
        rows = [Metrics(10, 8, 2.0, None, 0.1), Metrics(2000, 16, 3.5, 1.5), Metrics(3000, 24, 1.0)]
        part = parts.curves(rows, "Curves")
        assert label_of(part) == (
            "Curves. Training loss: 2 at step 10, then 1 at step 3,000. "
            "Validation loss: 1.5 at step 2,000. Learning rate: 0.1 at step 10."
        )
        head, training, *others = rows_of(part)
        assert head == ["value", "first", "last", "lowest", "highest"]
        assert training == [
            *("training loss", "2 (step 10)", "1 (step 3,000)"),
            *("1 (step 3,000)", "3.5 (step 2,000)"),
        ]
        assert [row[0] for row in others] == ["validation loss", "learning rate"]
        assert label_of(parts.curves([], "Curves")) == "Curves. No values."

    def test_points_in_words_and_in_a_table(self):
        points = np.array([[0, 0], [1, 0], [9, 0], [8, 1], [9, 1], [10, 1]], float)
        part = parts.points_in_space(points, np.array([0, 0, 0, 4, 4, 4]), "Space", most=5)
        assert label_of(part) == (
            "Space. 6 points in 2 classes; 5 are shown. 83% of the points are nearer to the "
            "median of their own class than to any other: from 67% of class 0 to 100% of class 4."
        )
        assert rows_of(part) == [
            ["class", "points", "median x", "median y", "nearest to own median"],
            ["0", "3", "1.0", "0.0", "66.7%"],
            ["4", "3", "9.0", "1.0", "100.0%"],
        ]

    def test_confusions_in_words(self):
        caption = (
            "<caption>5 of 8 are right. The most frequent mistake: label 1 predicted as 0, 2 times."
        )
        assert caption in parts.confusion_matrix(np.array([[3, 1], [2, 2]]))
        assert "<caption>3 of 3 are right.</caption>" in parts.confusion_matrix(np.diag([1, 2]))

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
        assert [attributes["alt"] for tag, attributes in Reader(part).tags if tag == "img"] == [
            "Label 0, predicted as 1 with probability 99.9%",
            "Label 1, predicted as 0 with probability 90.0%",
        ]

    def test_pairs_stand_above_each_other(self):
        images = np.arange(4, dtype=np.uint8).repeat(4).reshape(4, 2, 2)
        names = ["Cat", 'A "dog"']
        part = parts.pairs(images[:2], images[2:], ("before", "after"), names)
        alternatives = [
            attributes.get("alt") for tag, attributes in Reader(part).tags if tag == "img"
        ]
        assert alternatives == [*("Cat, before", "Cat, after", 'A "dog", before', 'A "dog", after')]
