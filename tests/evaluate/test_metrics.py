import numpy as np
import pytest
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from simforcing.errors import SimForcingError
from simforcing.evaluate import metrics


@pytest.fixture
def videos() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    true = rng.integers(0, 256, (3, 5, 24, 20, 3), dtype=np.uint8)
    noise = rng.normal(0, 20, true.shape)
    return np.clip(true + noise, 0, 255).astype(np.uint8), true


def moving_square(shift: int = 3, size: int = 6) -> np.ndarray:
    """One clip of a white square on black that moves to the right by ``shift`` pixels a frame."""
    clip = np.zeros((1, 4, 24, 24, 3), dtype=np.uint8)
    for t in range(4):
        clip[0, t, 9 : 9 + size, 2 + shift * t : 2 + shift * t + size] = 255
    return clip


def test_psnr_is_scikit_images_over_the_predicted_frames(videos):
    pred, true = videos
    pred[:, 0] = 0  # the given frame must not count
    expected = [peak_signal_noise_ratio(t[1:], p[1:], data_range=255) for p, t in zip(pred, true, strict=True)]
    np.testing.assert_allclose(metrics.psnr(pred, true), expected, rtol=1e-12)
    whole = [peak_signal_noise_ratio(t, p, data_range=255) for p, t in zip(pred, true, strict=True)]
    np.testing.assert_allclose(metrics.psnr(pred, true, first_frame=True), whole, rtol=1e-12)


def test_ssim_is_scikit_images_over_whole_windows(videos):
    pred, true = videos
    for k, value in enumerate(metrics.ssim(pred, true)):
        frames = []
        for p, t in zip(pred[k, 1:], true[k, 1:], strict=True):
            _, full = structural_similarity(
                t.astype(float), p.astype(float), data_range=255, channel_axis=-1, full=True,
                gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
            )  # fmt: skip
            frames.append(full[5:-5, 5:-5].mean())  # scikit-image pads; whole windows begin five pixels in
        assert value == pytest.approx(np.mean(frames), abs=1e-6)


def test_identical_clips_score_the_cap(sources):
    true = sources["real"]
    scores = metrics.score(true, true)
    assert scores["psnr"].tolist() == [metrics.PSNR_CAP] * len(true)
    assert scores["psnr_moving"].tolist() == [metrics.PSNR_CAP] * len(true)
    np.testing.assert_allclose(scores["ssim"], 1.0, atol=1e-12)
    np.testing.assert_allclose(scores["sharpness"], 1.0, atol=1e-12)


def test_a_batch_scores_like_its_clips_one_by_one(sources):
    pred, true = sources["student"], sources["real"]
    together = metrics.score(pred, true, keys=metrics.PIXEL)
    assert set(together) == set(metrics.PIXEL)
    for key, values in together.items():
        alone = [metrics.METRICS[key].score(pred[k : k + 1], true[k : k + 1])[0] for k in range(len(true))]
        assert values.tolist() == alone


def test_moving_mask_is_the_changed_pixels_dilated_by_one():
    true = moving_square()
    mask = metrics.moving_mask(true)[0]
    assert not mask[0].any()
    # frame 1: the square went from columns 2..7 to 5..10, so 2..4 and 8..10 changed; one more on each side
    assert sorted(set(np.nonzero(mask[1])[1].tolist())) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert sorted(set(np.nonzero(mask[1])[0].tolist())) == list(range(8, 16))
    # frame 2 (columns 8..13) differs from frame 0 (2..7) and from frame 1 (5..10)
    assert sorted(set(np.nonzero(mask[2])[1].tolist())) == list(range(1, 15))


def test_changes_up_to_the_threshold_do_not_move():
    true = np.full((1, 3, 8, 8, 3), 100, dtype=np.uint8)
    true[0, 1:, 4, 4, 1] += metrics.MOVING_THRESHOLD
    assert not metrics.moving_mask(true).any()
    true[0, 1:, 4, 4, 1] += 1
    assert metrics.moving_mask(true).sum(axis=(2, 3)).tolist() == [[0, 9, 9]]


def test_psnr_moving_ignores_what_stands_still():
    true = moving_square()
    mask = metrics.moving_mask(true)[..., None]
    wrong_elsewhere = np.where(mask, true, 128).astype(np.uint8)
    assert metrics.psnr_moving(wrong_elsewhere, true).tolist() == [metrics.PSNR_CAP]
    inwards = np.where(true > 200, true - 51, true + 51)
    wrong_there = np.where(mask, inwards, true).astype(np.uint8)
    assert metrics.psnr_moving(wrong_there, true)[0] == pytest.approx(20 * np.log10(255 / 51))
    assert metrics.psnr(wrong_there, true)[0] > metrics.psnr_moving(wrong_there, true)[0]


def test_a_clip_without_motion_has_no_psnr_on_moving_pixels():
    still = np.full((1, 4, 16, 16, 3), 90, dtype=np.uint8)
    assert np.isnan(metrics.psnr_moving(still, still)).tolist() == [True]
    true = moving_square()
    count = int(metrics.moving_mask(true)[:, 1:].sum())
    assert np.isfinite(metrics.psnr_moving(true, true, minimum=count)).all()
    assert np.isnan(metrics.psnr_moving(true, true, minimum=count + 1)).all()


def test_sharpness_falls_with_blur_and_rises_with_noise(sources):
    true = sources["real"]
    blurred = ((true.astype(int) + np.roll(true, 1, 2) + np.roll(true, 1, 3)) // 3).astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 40, true.shape)
    noisy = np.clip(true.astype(int) + noise, 0, 255).astype(np.uint8)
    assert (metrics.sharpness(blurred, true) < 0.9).all()
    assert (metrics.sharpness(noisy, true) > 1.5).all()
    flat = np.full_like(true, 7)
    assert np.isnan(metrics.sharpness(true, flat)).all()


def test_psnr_by_frame_has_a_column_a_predicted_frame(videos):
    pred, true = videos
    table = metrics.psnr_by_frame(pred, true)
    assert table.shape == (3, 4)
    assert table[2, 1] == pytest.approx(peak_signal_noise_ratio(true[2, 2], pred[2, 2], data_range=255))
    assert metrics.psnr_by_frame(pred, true, first_frame=True).shape == (3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v[:, :, :-1], "differ in shape"),
        (lambda v: v.astype(np.float32), "must be uint8"),
        (lambda v: v[0], "must be uint8"),
    ],
)
def test_unfit_videos_are_refused(videos, change, message):
    pred, true = videos
    with pytest.raises(SimForcingError, match=message):
        metrics.psnr(change(pred), true)


def test_frames_too_small_and_clips_too_short_are_refused(videos):
    pred, true = videos
    with pytest.raises(SimForcingError, match="at least 11x11"):
        metrics.ssim(pred[:, :, :8], true[:, :, :8])
    with pytest.raises(SimForcingError, match="no predicted frame"):
        metrics.psnr(pred[:, :1], true[:, :1])


def steps(*levels: int) -> np.ndarray:
    """One clip of even grey frames with a bright patch that walks to the right by four pixels a frame."""
    video = np.stack([np.full((32, 32, 3), level, np.uint8) for level in levels])
    for t, frame in enumerate(video):
        frame[4:16, 4 * t : 4 * t + 4] = 250
    return video[None]


def test_temporal_error_is_0_for_the_truth_and_1_for_a_still_picture():
    true = steps(60, 60, 60, 60)
    still = np.repeat(true[:, :1], 4, axis=1)
    assert metrics.temporal_error(true, true) == 0
    assert metrics.temporal_error(still, true) == pytest.approx(1)
    shifted = true.copy()
    shifted[:, 1:] += 4  # a jump after the given frame, and none later
    jump = 32 * 32 * 3 * 16
    energy = np.square(np.diff(true.astype(float), axis=1)).sum()
    assert metrics.temporal_error(shifted, true) == pytest.approx(jump / energy)
    assert np.isnan(metrics.temporal_error(true, still)[0])


def test_flicker_looks_at_what_stands_still():
    true, flickering = steps(60, 60, 60, 60), steps(60, 63, 60, 63)
    assert metrics.flicker(true, true) == 0
    assert metrics.flicker(flickering, true) == pytest.approx(3)


def test_colour_drift_is_the_shift_of_the_background():
    true, drifting = steps(60, 60, 60, 60), steps(60, 62, 64, 66)
    drifting[..., 2] = true[..., 2]  # in two of three channels
    np.testing.assert_allclose(metrics.colour_drift_by_frame(drifting, true), [[4 / 3, 8 / 3, 4]])
    assert metrics.colour_drift(drifting, true) == pytest.approx(8 / 3)
    np.testing.assert_allclose(metrics.colour_drift(drifting, true, first_frame=True), 2)
    noise = np.random.default_rng(0).integers(0, 255, (1, 3, 16, 16, 3), dtype=np.uint8)
    assert np.isnan(metrics.colour_drift(noise, noise)[0]) and np.isnan(metrics.flicker(noise, noise)[0])


def test_metrics_that_need_a_network_are_not_scored_from_pixels():
    with pytest.raises(SimForcingError, match="'fvd' needs more than two videos"):
        metrics.score(steps(1, 2), steps(1, 2), keys=["fvd"])
    assert set(metrics.definitions()) == set(metrics.BASIC) <= set(metrics.PIXEL) < set(metrics.METRICS)
