import av
import numpy as np
import pytest
from PIL import Image

from simforcing.errors import SimForcingError
from simforcing.evaluate import strips


def decode(path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def flat(value: int, frames: int = 4) -> np.ndarray:
    return np.full((frames, 10, 12, 3), value, dtype=np.uint8)


def test_strip_shows_a_row_a_source_and_the_first_and_last_frame(tmp_path):
    counted = np.stack([flat(20 * t, 1)[0] for t in range(5)])
    path = strips.strip({"real": counted, "student": flat(200, 1)}, tmp_path / "new" / "strip.png", columns=3, scale=2)
    picture = np.asarray(Image.open(path))
    cells = picture[32 + 10, -8 - (3 * 24 + 2 * strips.GAP) :]
    assert [int(cells[x, 0]) for x in (12, 12 + 28, 12 + 56)] == [0, 40, 80]
    assert picture[32 + 20 + strips.GAP + 10, -8 - 12, 0] == 200
    assert [p.name for p in path.parent.iterdir()] == ["strip.png"]


def test_labels_are_drawn(tmp_path):
    named, unnamed = (strips.strip_picture({name: flat(0)}) for name in ("|student − real|", " "))
    margin = named.shape[1] - unnamed.shape[1]
    assert margin > 80
    assert named[40:50, : margin - 10].max() > 150


def test_grid_puts_sources_beside_and_clips_under_each_other():
    rows = [{"a": flat(10), "b": flat(60)}, {"a": flat(110), "b": flat(160, 1)}]
    video = strips.grid(rows, scale=3)
    assert video.shape == (4, 2 * 30 + strips.GAP, 2 * 36 + strips.GAP, 3)
    assert [int(video[2, y, x, 0]) for y in (15, 49) for x in (18, 58)] == [10, 60, 110, 160]


def test_grid_refuses_what_would_not_be_in_step():
    with pytest.raises(SimForcingError, match="'a' and 'b' differ in shape"):
        strips.grid([{"a": flat(0, 4), "b": flat(0, 5)}])
    with pytest.raises(SimForcingError, match="same sources"):
        strips.grid([{"a": flat(0)}, {"b": flat(0)}])
    with pytest.raises(SimForcingError, match="length and frame size"):
        strips.grid([{"a": flat(0, 4)}, {"a": flat(0, 5)}])
    with pytest.raises(SimForcingError, match="video 'a' must be uint8"):
        strips.grid([{"a": flat(0).astype(float)}])


def test_error_map_is_black_where_equal_and_saturates_at_its_ceiling():
    true = flat(100)
    pred = true.copy()
    pred[:, :, 6:] = 100 + strips.ERROR_CEILING
    pred[:, :, 9:] = 255
    heat = strips.error_map(pred, true)
    assert heat[0, 0, 0].max() <= 4
    assert heat[0, 0, 6].tolist() == heat[0, 0, 11].tolist()
    assert heat[0, 0, 6].min() > 150


def test_mp4_holds_every_frame_in_its_colours_and_pads_odd_sizes(tmp_path):
    frames = np.zeros((6, 33, 47, 3), dtype=np.uint8)
    for t in range(6):
        frames[t] = (200, 40 + 20 * t, 60)
    path = strips.write_mp4(tmp_path / "clip.mp4", frames, 5)
    decoded = decode(path)
    assert decoded.shape == (6, 34, 48, 3)
    np.testing.assert_allclose(decoded[:, 16, 16], frames[:, 16, 16], atol=6)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 5
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


def test_hold_repeats_the_last_frame():
    video = np.concatenate([flat(1, 2), flat(9, 1)])
    assert strips.hold(video, 2)[:, 0, 0, 0].tolist() == [1, 1, 9, 9, 9]
