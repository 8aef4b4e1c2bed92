import base64
import dataclasses
import json
import re
from html.parser import HTMLParser

import av
import numpy as np
import pytest
from PIL import Image

from simforcing.errors import SimForcingError
from simforcing.evaluate.report import (
    Clip,
    GuidanceCurve,
    HorizonCurve,
    ReportData,
    Row,
    TrainingCurve,
    write_report,
)
from simforcing.evaluate.report.plots import MAX_POINTS, training_plots

VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Collects elements and text, and checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def written(report_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    path = write_report(out, report_data)
    assert path == out / "index.html"
    return path


@pytest.fixture(scope="module")
def page(written) -> Page:
    page = Page(written.read_text())
    assert page.open == []
    return page


def test_the_page_asks_for_nothing(written, page):
    text = re.sub(r'"data:[^"]*"', '""', written.read_text())
    assert "http" not in text and "//" not in text.replace("// Videos", "")
    assert "@import" not in text
    for _, attrs in page.elements:
        for key in ("src", "href", "xlink:href", "poster"):
            value = attrs.get(key)
            assert value is None or value.startswith(("data:", "#"))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_ids_are_unique_and_references_resolve(page):
    ids = [attrs["id"] for _, attrs in page.elements if attrs.get("id")]
    assert len(ids) == len(set(ids)) > 20
    used = [a["href"][1:] for n, a in page.elements if n == "use"]
    clips = [re.search(r"#([\w.-]+)", a["clip-path"])[1] for _, a in page.elements if a.get("clip-path")]
    assert set(used) | set(clips) <= set(ids)


def test_every_video_decodes_and_holds_its_last_frame(page, report_data, tmp_path):
    videos = page.all("video")
    assert len(videos) == 1 + len(report_data.clips)
    for attrs in videos:
        kind, _, data = attrs["src"].partition(",")
        assert kind == "data:video/mp4;base64"
        assert {"autoplay", "loop", "muted", "playsinline"} <= set(attrs) and attrs["aria-label"]
        file = tmp_path / "clip.mp4"
        file.write_bytes(base64.b64decode(data))
        with av.open(str(file)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == int(attrs["data-frames"]) + 3 == 16
        assert frames[0].shape == (int(attrs["height"]), int(attrs["width"]), 3)
        assert np.abs(frames[0].astype(int) - frames[12]).mean() > 1  # it moves
        assert np.abs(frames[12].astype(int) - frames[15]).mean() < 1.5


def test_pictures_and_plots_say_what_they_show(page):
    assert len(page.all("img")) == 3
    assert all(len(img["alt"]) > 20 for img in page.all("img"))
    plots = page.all("svg")
    assert len(plots) == 4 + 3 + 1 + 1 + 2
    assert all(plot["role"] == "img" and re.search(r"\d", plot["aria-label"]) for plot in plots)


def test_numbers_verdicts_and_protocol_are_on_the_page(page, report_data):
    text = " ".join(page.text.split())
    row = report_data.rows[-1].metrics["psnr"]
    assert f"{row['mean']:.2f}" in text and f"[{row['low']:.2f}, {row['high']:.2f}]" in text
    assert "student beats baseline by +" in text
    assert "baseline without actions does NOT use its actions" in text
    assert report_data.protocol.clips_sha256 in text
    assert report_data.protocol.machine["cpu"] in text
    for words in (
        *report_data.caveats,
        *report_data.what_ran.commands,
        "training step",
        "guidance weight w",
        "PSNR (dB)",
    ):
        assert words in text


def test_stills_are_written_beside_the_page(written):
    files = sorted(p.relative_to(written.parent).as_posix() for p in written.parent.rglob("*") if p.is_file())
    assert files == ["index.html", "strips/clip-1.png", "strips/clip-2.png", "strips/clip-3.png"]
    assert Image.open(written.parent / "strips" / "clip-1.png").width > 1000


@pytest.mark.parametrize("kept", ["title", "rows", "differences", "clips", "action_ratios", "protocol", "summary"])
def test_parts_that_are_missing_are_left_out(kept, report_data, tmp_path):
    value = getattr(report_data, kept)
    parts = {"title": "Only a title"} | {kept: value[:1] if kept == "clips" else value}
    page = Page(write_report(tmp_path, ReportData(**parts)).read_text())
    assert page.open == []
    sections = [attrs["id"] for attrs in page.all("section")]
    expected = {
        "title": [], "rows": ["numbers"], "differences": ["findings", "differences"], "clips": ["clips"],
        "action_ratios": ["findings", "actions"], "protocol": ["protocol"], "summary": ["findings"],
    }  # fmt: skip
    assert sections == expected[kept]
    assert len(page.all("video")) == (2 if kept == "clips" else 0)


def test_values_that_are_not_defined_are_dashes(report_data, tmp_path):
    nan = {"mean": float("nan"), "low": float("nan"), "high": float("nan"), "clips": 0, "missing": 4}
    some = {"mean": 1.0, "low": float("nan"), "high": float("nan"), "clips": 1, "missing": 3}
    data = ReportData(
        "Undefined",
        rows=[Row("still", "", {"psnr_moving": nan, "psnr": some}), Row("other", "", {"psnr": some})],
        horizon=[HorizonCurve("still", [some, nan])],
    )
    page = Page(write_report(tmp_path, data).read_text())
    text = " ".join(page.text.split())
    assert "nan" not in text
    assert "PSNR, moving pixels is not defined on 4 of 4 clips." in text
    assert "PSNR is not defined on 3 of 4 clips." in text


def test_names_are_text_and_not_markup(report_data, tmp_path):
    name = "<script>x</script> & $a_b$"
    data = ReportData(name, rows=[Row(name, name, {})], horizon=[HorizonCurve(name, report_data.horizon[0].values)])
    path = write_report(tmp_path, data)
    page = Page(path.read_text())
    assert page.open == [] and len(page.all("script")) == 1
    assert page.text.count(name) >= 4  # title, heading, row and group; the plot's legend is a fifth


def test_a_second_report_replaces_the_first(tmp_path):
    write_report(tmp_path, ReportData("First"))
    path = write_report(tmp_path, ReportData("Second"))
    assert "Second" in path.read_text() and "First" not in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["index.html"]


def test_bad_parts_are_named(report_data):
    interval = report_data.rows[0].metrics["psnr"]
    with pytest.raises(SimForcingError, match=r"row 'x': there is no metric 'pnsr'; did you mean 'psnr'\?"):
        ReportData("t", rows=[Row("x", "", {"pnsr": interval})])
    with pytest.raises(SimForcingError, match="'rendered': needs ascending weights"):
        ReportData("t", guidance=[GuidanceCurve("rendered", "psnr", [0, 1], [interval])])
    with pytest.raises(SimForcingError, match="'y' has no frames"):
        ReportData("t", horizon=[HorizonCurve("y", [])])


@pytest.mark.parametrize(("hero_clips", "shown"), [(0, []), (1, ["one"]), (3, ["one", "two"])])
def test_the_hero_shows_the_first_clips_that_fit_each_other(hero_clips, shown, tmp_path):
    video = np.zeros((4, 16, 16, 3), dtype=np.uint8)
    clips = [Clip("one", {"real": video}), Clip("two", {"real": video}), Clip("three", {"real": video[:3]})]
    page = Page(write_report(tmp_path, ReportData("t", clips=clips, hero_clips=hero_clips)).read_text())
    labels = [attrs["aria-label"] for attrs in page.all("video")]
    assert labels == [f"{' / '.join(shown)}: real"] * bool(shown) + ["one: real", "two: real", "three: real"]


def test_clips_of_unequal_size_are_refused(tmp_path):
    video = np.zeros((4, 16, 16, 3), dtype=np.uint8)
    with pytest.raises(SimForcingError, match="'real' and 'student' differ in shape"):
        write_report(tmp_path, ReportData("t", clips=[Clip("c", {"real": video, "student": video[:3]})]))


def test_a_training_log_is_read_by_key_and_a_step_keeps_its_last_value(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [
        {"step": 2, "loss": 5.0},
        {"step": 1, "loss": 9.0, "flag": True},
        {"step": 2, "loss": 4.0, "lr": 1},
    ]
    log.write_text("\n".join(json.dumps(row) for row in rows) + '\n\n{"step": 3, "loss": NaN}\n')
    assert TrainingCurve.from_jsonl("run", log).values == {"loss": [(1, 9.0), (2, 4.0)], "lr": [(2, 1.0)]}
    assert list(TrainingCurve.from_jsonl("run", log, ["lr"]).values) == ["lr"]
    with pytest.raises(SimForcingError, match="no line has 'speed'"):
        TrainingCurve.from_jsonl("run", log, ["speed"])
    log.write_text('{"step": 1}\n{"step": 1.5}\n')
    with pytest.raises(SimForcingError, match="line 2: expected an object with an integer 'step'"):
        TrainingCurve.from_jsonl("run", log)
    log.write_text('{"step": 1}\n{"st')
    with pytest.raises(SimForcingError, match="line 2: not JSON"):
        TrainingCurve.from_jsonl("run", log)
    with pytest.raises(SimForcingError, match="cannot read the training log"):
        TrainingCurve.from_jsonl("run", tmp_path / "absent.jsonl")


def test_long_training_curves_are_averaged_down():
    run = TrainingCurve("run", {"loss": [(step, 1.0 + (step % 2)) for step in range(5000)]})
    (plot,) = training_plots([run])
    path = max(re.findall(r'<path d="(M[^"]*)"', plot.svg), key=len)
    assert path.count("L") <= MAX_POINTS
    assert len(plot.svg) < 30_000


def test_the_heat_map_needs_both_videos(report_data):
    from simforcing.evaluate.report.page import with_error

    clip = report_data.clips[0]
    assert list(with_error(clip))[-1] == "|student − real|"
    assert list(with_error(dataclasses.replace(clip, prediction="nobody"))) == list(clip.videos)
