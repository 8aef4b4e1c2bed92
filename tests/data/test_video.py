"""Encoding and decoding of video files: exact frames, little work, same bytes, clear errors."""

import av
import numpy as np
import pytest

from simforcing.data.video import GOP, VideoFile, VideoWriter
from simforcing.errors import SimForcingError

FPS = 5.0


def write(path, pictures, **changes):
    arguments = {"fps": FPS, "height": pictures.shape[1], "width": pictures.shape[2]} | changes
    writer = VideoWriter(path, **arguments)
    writer.write(pictures)
    writer.close()
    return path


def decode_all(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2))


@pytest.fixture(scope="module")
def clip(tmp_path_factory, frames):
    return write(tmp_path_factory.mktemp("video") / "a.mp4", frames(60, 48, 64))


def test_smooth_pictures_survive(clip, frames):
    assert psnr(decode_all(clip), frames(60, 48, 64)) > 35


@pytest.mark.parametrize("order", [[0], [59], [8, 7, 9], [50, 3, 3, 20], list(range(60)), list(range(1, 60, 9))])
def test_asked_frames_equal_sequential_decode(clip, order):
    np.testing.assert_array_equal(VideoFile(clip, FPS).at([i / FPS for i in order]), decode_all(clip)[order])


def test_decodes_only_from_the_keyframe_before(clip):
    for start in (0, 1, 7, 8, 30, 47):
        video = VideoFile(clip, FPS)
        video.at([(start + i) / FPS for i in range(13)])
        assert 13 <= video.decoded <= 13 + GOP - 1
    video = VideoFile(clip, FPS)
    video.at([0.0, 59 / FPS])
    assert video.decoded <= 1 + GOP


def test_a_packed_file_begins_each_write_with_a_keyframe(tmp_path, frames):
    writer = VideoWriter(tmp_path / "p.mp4", fps=FPS, height=32, width=48)
    for n in (11, 3, 6):
        writer.write(frames(n, 32, 48))
    writer.close()
    assert writer.count == 20
    video = VideoFile(tmp_path / "p.mp4", FPS)
    for first in (0, 11, 14):
        video.decoded = 0
        video.at([first / FPS])
        assert video.decoded == 1


def test_file_is_what_players_expect(clip):
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, float(stream.average_rate)) == (
            "h264",
            "yuv420p",
            FPS,
        )
        assert "creation_time" not in container.metadata | stream.metadata
    head = clip.read_bytes()[:64]
    assert head.find(b"moov") < 64 and b"moov" in head  # the index comes first


@pytest.mark.parametrize("fps", [3.0, 10.0, 12.5, 15.0, 29.97, 30.0])
def test_other_rates(tmp_path, frames, fps):
    path = write(tmp_path / "r.mp4", frames(40, 32, 32), fps=fps)
    np.testing.assert_array_equal(VideoFile(path, fps).at([17 / fps, 39 / fps]), decode_all(path)[[17, 39]])


OPEN_GROUPS = "open-gop=1:bframes=5:keyint=17:min-keyint=17:b-adapt=0:scenecut=0"


@pytest.mark.parametrize("options", [{"bf": "3", "g": "17", "crf": "20"}, {"x264-params": OPEN_GROUPS}])
def test_files_with_reordered_frames(tmp_path, frames, options):
    """B-frames, long and open groups, as other writers make them: seeking must not skip or spoil frames."""
    path, pictures = tmp_path / "b.mp4", frames(60, 48, 64)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5, options=options)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    every = decode_all(path)
    for start in range(58):
        times = [i / FPS for i in range(start, start + 3)]
        np.testing.assert_array_equal(VideoFile(path, FPS).at(times), every[start : start + 3])


def test_bytes_are_the_same_every_time(tmp_path, frames):
    first, second = (write(tmp_path / name, frames(30, 48, 64)).read_bytes() for name in ("1.mp4", "2.mp4"))
    assert first == second
    # what makes them so, as the encoder writes it into the file: repeating shows a race or a stray value only rarely
    assert {b"threads=1", b"mbtree=0", b"bframes=0"} <= set(first.split())


def test_single_frame(tmp_path, frames):
    path = write(tmp_path / "one.mp4", frames(1, 32, 32))
    assert VideoFile(path, FPS).at([0.0]).shape == (1, 32, 32, 3)


def test_odd_sizes_and_wrong_frames_are_refused(tmp_path, frames):
    with pytest.raises(SimForcingError, match="give an even height and width"):
        VideoWriter(tmp_path / "x.mp4", fps=5, height=31, width=32)
    writer = VideoWriter(tmp_path / "y.mp4", fps=5, height=32, width=32)
    with pytest.raises(SimForcingError, match=r"give uint8 \[T, 32, 32, 3\]"):
        writer.write(frames(2, 32, 34))
    writer.abort()
    with pytest.raises(SimForcingError, match="fps is 0"):
        VideoWriter(tmp_path / "z.mp4", fps=0, height=32, width=32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "video file is missing"),
        (b"", "zero bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "only a pointer"),
        (b"not a video" * 100, "cannot be decoded"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "bad.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SimForcingError, match=rf"bad\.mp4: .*{message}"):
        VideoFile(path, FPS).at([0.0])


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_truncated_file_is_an_error_and_never_another_frame(clip, tmp_path, share):
    path = tmp_path / "cut.mp4"
    path.write_bytes(clip.read_bytes()[: int(share * clip.stat().st_size)])
    with pytest.raises(SimForcingError, match=r"cut\.mp4"):
        VideoFile(path, FPS).at([i / FPS for i in range(60)])


def test_single_frames_of_a_damaged_file_are_right_or_refused(clip, tmp_path):
    every, whole, path = decode_all(clip), clip.read_bytes(), tmp_path / "damaged.mp4"
    outcomes = {"right": 0, "refused": 0}
    for damaged in (whole[: len(whole) // 2], whole[:-2000] + bytes(1000) + whole[-1000:]):
        path.write_bytes(damaged)
        for i in range(60):
            try:
                picture = VideoFile(path, FPS).at([i / FPS])[0]
            except SimForcingError:
                outcomes["refused"] += 1
                continue
            np.testing.assert_array_equal(picture, every[i])
            outcomes["right"] += 1
    assert outcomes["right"] > 20 and outcomes["refused"] > 20


def test_times_beyond_the_file_and_other_rates(clip, tmp_path):
    with pytest.raises(SimForcingError, match=r"no frame at 12\.000 s"):
        VideoFile(clip, FPS).at([59 / FPS, 12.0])
    with pytest.raises(SimForcingError, match="runs at 5 frames a second, the dataset says 10"):
        VideoFile(clip, 10.0).at([0.0])
    sound = tmp_path / "sound.mp4"
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(SimForcingError, match="no video stream"):
        VideoFile(sound, FPS).at([0.0])


@pytest.mark.parametrize(("matrix", "name"), [(1, "ITU709"), (6, "ITU601")])
def test_colours_follow_the_matrix_of_the_file(tmp_path, matrix, name):
    picture, path = np.full((32, 32, 3), (200, 40, 90), np.uint8), tmp_path / "m.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5, options={"crf": "5"})
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, 1
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace=name)))
        container.mux(stream.encode(None))
    np.testing.assert_allclose(VideoFile(path, FPS).at([0.0])[0], picture, atol=4)
