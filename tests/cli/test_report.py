"""`simforcing report`: a folder of results and a sweep on one page, which a browser opens without a complaint."""

import dataclasses
import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import pytest

from simforcing.cli.main import main
from simforcing.evaluate import behaviour, metrics
from simforcing.evaluate.clips import EvaluationClips
from simforcing.evaluate.gallery import save_videos
from simforcing.evaluate.protocol import Protocol, hash_clips
from simforcing.evaluate.results import Result
from simforcing.evaluate.sweep import Cell, Plan, Setting, begin, cell_file, guidance_plan

CLIPS, FRAMES, SIZE = 7, 5, 32
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


def clips() -> EvaluationClips:
    """A bright square that walks at another pace in each clip."""
    real = np.full((CLIPS, FRAMES, SIZE, SIZE, 3), 90, np.uint8)
    for i, clip in enumerate(real):
        for t, frame in enumerate(clip):
            frame[8:16, 2 + (i % 3 + 2) * t : 10 + (i % 3 + 2) * t] = (220, 150, 40)
    sim = np.where(real == 90, np.uint8(230), np.uint8(60))
    action = np.zeros((CLIPS, FRAMES - 1, 7), np.float32)
    tasks = [f"push block {i}" for i in range(CLIPS)]
    return EvaluationClips(real, sim, action, action[:, 0], tasks, np.arange(CLIPS), np.zeros(CLIPS, np.int64), 5.0)


def result(name: str, noise: float, **protocol: Any) -> tuple[Result, np.ndarray]:
    given = clips()
    spread = np.linspace(0.5, 1.5, CLIPS)[:, None, None, None, None]  # the first clip is best
    grain = np.random.default_rng(0).normal(0, noise, given.real.shape) * spread
    video = np.clip(given.real + grain, 0, 255).astype(np.uint8)
    video[:, 0] = given.real[:, 0]
    motion = behaviour.motion_accuracy(video, given.real, behaviour.arm_masks(given.sim))
    scores = metrics.score(video, given.real, keys=metrics.PIXEL) | {"arm_track": motion.track}
    changed = behaviour.sensitivity(video, given.real, behaviour.places(given.real, given.others())["zero"])
    fields = {"guidance": 0.6, "sim_steps": 1, "real_steps": 10, "simulation": "predicted"} | protocol
    found = Result(
        name=name,
        model=f"runs/{name}/model",
        model_sha256=name,
        protocol=Protocol(
            "ab" * 32, hash_clips(given.window_names()), CLIPS, FRAMES, 5.0, SIZE, SIZE,
            metrics=metrics.definitions(metrics.PIXEL), **fields,
        ),
        windows=given.window_names(),
        tasks=given.tasks,
        per_clip={k: v.tolist() for k, v in scores.items()},
        with_first_frame={"psnr": metrics.psnr(video, given.real, first_frame=True).tolist()},
        unavailable={"fvd": "no i3d_torchscript.pt in cache, and https://example.org/" + "i3d" * 40 + " gave none"},
        by_frame={"psnr": metrics.psnr_by_frame(video, given.real).tolist()},
        action={"true": [1.0 + 0.1 * i for i in range(CLIPS)], "exchanged": [2.0] * CLIPS},
        sensitivity={"zero": changed.to_dict()},
        latency={"simulation stage": [0.1], "real stage": [0.5, 0.4], "decoding": [0.05]},
        videos=f"{name}.videos",
    )  # fmt: skip
    return found, video


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, one of them a control, and a guidance sweep of 2 x 2."""
    root = tmp_path_factory.mktemp("results")
    given = clips()
    for name, noise, protocol in (
        ("ours", 10.0, {}),
        ("real only", 20.0, {"guidance": 0.0, "sim_steps": None, "simulation": ""}),
        ("copy", 60.0, {"control": "copy", "guidance": None, "sim_steps": None, "real_steps": None, "simulation": ""}),
    ):
        found, video = result(name, noise, **protocol)
        found.save(root / f"{name}.json")
        save_videos(root / f"{name}.videos", given, video, given.sim if name == "ours" else None)
    plan = Plan("guidance", guidance_plan((0.0, 0.7), (0.0, 1.0), 1, 10, (0,)), frozenset({0}))
    begin(root / "guidance", plan, {"checkpoints": ["a", "b"], "simulation": "predicted", "part": "val"})
    for cell in plan.work():
        measured = _measured(cell)
        measured.save(cell_file(root / "guidance", cell))
    (root / "training").mkdir()
    (root / "training" / "log.jsonl").write_text('{"step": 1, "total": 2.0, "lr": 1}\n{"step": 9, "total": 1.0}\n')
    return root


def _measured(cell: Cell) -> Result:
    setting: Setting = cell.setting
    found, _ = result("cell", 20 - 10 * setting.w, guidance=setting.w, sim_steps=None)
    return dataclasses.replace(found, videos=None)


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    assert main(["report", str(folder), "--ours", "ours"]) == 0
    return folder / "report" / "index.html"


def shown(page: Path) -> str:
    text = re.sub(r"<(style|script|svg).*?</\1>", "", page.read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_results_verdicts_and_protocol_are_on_the_page(page: Path, folder: Path) -> None:
    text = shown(page)
    ours = Result.load(folder / "ours.json")
    assert f"{np.mean(ours.per_clip['psnr']):.2f}" in text
    assert "ours beats real only by +" in text and "ours beats copy by +" in text
    assert "ours uses its actions: action ratio" in text
    assert "FVD: unavailable. no i3d_torchscript.pt" in text
    assert "With the given first frame counted" in text and "Motion and stability" in text
    assert "Guidance weight and retention (guidance)" in text and "4 of 4 settings measured" in text
    assert "w = 0.6, 10 steps, simulation predicted, 1 steps" in text and "copy of the first frame" in text
    assert ours.protocol.clips_sha256 in text and ours.protocol.split_sha256 in text
    assert "ours: real stage 0.450" in text


def test_worst_and_best_clips_play_beside_the_others(page: Path) -> None:
    text = shown(page)
    assert "push block 6" in text[text.index("Worst clips of 'ours'") : text.index("Best clips of 'ours'")]
    assert "push block 0" in text[text.index("Best clips of 'ours'") : text.index("In between")]
    labels = re.findall(r"<video[^>]*aria-label=\"([^\"]*)\"", page.read_text())
    assert len(labels) == 1 + 6
    assert labels[1].endswith(": real, ours, real only, simulation, |ours − real|")


def test_the_page_asks_for_nothing(page: Path) -> None:
    text = re.sub(r'"data:[^"]*"', '""', page.read_text())
    assert not re.search(r"(src|href)=[\"']?https?:", text)
    assert "@import" not in text


def test_different_protocols_are_refused_unless_asked(folder: Path, tmp_path: Path, capsys) -> None:
    other, _ = result("other", 5.0, code="another version")
    copied = tmp_path / "results"
    copied.mkdir()
    shutil.copy(folder / "ours.json", copied)
    other.save(copied / "other.json")
    assert main(["report", str(copied)]) == 2
    assert "'other' and 'ours' differ in 'code'" in capsys.readouterr().err
    assert main(["report", str(copied), "--allow", "code", "--out", str(tmp_path / "page")]) == 0
    assert "not measured alike; they differ in 'code'" in shown(tmp_path / "page" / "index.html")


def test_what_cannot_be_reported_is_named(folder: Path, tmp_path: Path, capsys) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "no results and no sweeps" in capsys.readouterr().err
    assert main(["report", str(folder), "--ours", "theirs"]) == 2
    assert "no result is named 'theirs'; there are copy, ours, real only" in capsys.readouterr().err


def test_a_sweep_alone_makes_a_page(folder: Path, tmp_path: Path) -> None:
    assert main(["report", str(folder / "guidance"), "--out", str(tmp_path)]) == 0
    assert "4 of 4 settings measured" in shown(tmp_path / "index.html")


# -- in a browser ---------------------------------------------------------------------------------------------------

WATCH = """<script>window.probed = [];
addEventListener("error", (e) => probed.push(e.message));
addEventListener("unhandledrejection", (e) => probed.push(String(e.reason)));
console.error = (...words) => probed.push(words.join(" "));</script>"""
# Asks again until every video has shown a picture and moved, however slow the machine; then tells the server.
ASK = """<script>addEventListener("load", () => {
  const videos = [...document.querySelectorAll("video")];
  for (const video of videos) video.play().catch((e) => probed.push(e.message));
  const ends = Date.now() + 90000;
  const ask = () => {
    const found = videos.map((v) => [v.currentTime, v.videoWidth, v.error && v.error.message]);
    if (found.some(([seconds, pixels, error]) => !(seconds && pixels) && !error) && Date.now() < ends)
      return setTimeout(ask, 100);
    fetch("/found", {method: "POST", body: JSON.stringify({
      errors: probed, width: document.documentElement.scrollWidth, inner: innerWidth, videos: found,
    })});
  };
  setTimeout(ask, 300);
});</script>"""
FRAME = '<!doctype html><iframe src="page.html" style="border: 0; width: {}px; height: 900px"></iframe>'


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, SimpleQueue[dict[str, Any]]]]:
    """Address of a server of `folder`, and what the pages tell it."""
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()

    class Handler(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing to say."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", told
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium; apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_opens_it_plays_every_video_and_needs_no_sideways_scrolling(
    width: int, page: Path, tmp_path: Path
) -> None:
    text = page.read_text().replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{ASK}</body>", 1)
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "frame.html").write_text(FRAME.format(width))  # a window of its own is never narrower than 500
    with served(tmp_path) as (address, told):
        command = [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
            "--autoplay-policy=no-user-gesture-required", f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width + 40},1000", f"{address}/frame.html",
        ]  # fmt: skip
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found = told.get(timeout=150)
        finally:
            browser.kill()
            browser.wait()
    assert found["errors"] == []
    assert found["inner"] == width and found["width"] <= width
    assert len(found["videos"]) == 7
    assert all(seconds > 0 and pixels > 0 and error is None for seconds, pixels, error in found["videos"])
