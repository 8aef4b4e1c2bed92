import dataclasses
import json
import subprocess

import pytest

from simforcing.errors import SimForcingError
from simforcing.evaluate import protocol
from simforcing.evaluate.metrics import BASIC


@pytest.fixture
def base() -> protocol.Protocol:
    return protocol.Protocol(
        split_sha256="ab", clips_sha256=protocol.hash_clips([(0, 0), (1, 5)]), clips=2, frames=13, fps=5.0,
        height=64, width=64, sim_steps=1, real_steps=10, guidance=0.6,
    )  # fmt: skip


def test_a_protocol_survives_json(base):
    text = json.dumps(base.to_dict())
    assert protocol.Protocol.from_dict(json.loads(text)) == base


def test_it_records_metrics_code_and_machine(base):
    values = base.to_dict()
    assert set(values["metrics"]) == set(BASIC)
    assert values["machine"]["cores"] >= 1 and values["machine"]["cpu"]
    assert values["machine"]["torch"].startswith("2.")
    assert values["code"]


def test_equal_protocols_pass_and_different_ones_are_named(base):
    protocol.check_same({"a": base, "b": dataclasses.replace(base)})
    other = dataclasses.replace(base, seed=3)
    with pytest.raises(SimForcingError, match=r"'a' and 'c' differ in 'seed': 0 against 3"):
        protocol.check_same({"a": base, "b": base, "c": other})


def test_a_difference_inside_a_mapping_is_named(base):
    other = dataclasses.replace(base, metrics={**base.metrics, "psnr": "another"})
    with pytest.raises(SimForcingError, match=r"'metrics.psnr'.*against 'another'"):
        protocol.check_same({"a": base, "b": other})


def test_what_a_sweep_varies_may_be_allowed(base):
    other = dataclasses.replace(base, guidance=1.0)
    protocol.check_same({"a": base, "b": other}, allow={"guidance"})
    with pytest.raises(SimForcingError, match="'guidance'"):
        protocol.check_same({"a": base, "b": other}, allow={"machine"})
    with pytest.raises(SimForcingError, match="did you mean 'guidance'"):
        protocol.check_same({"a": base}, allow={"guidence"})


def test_unknown_and_missing_keys_are_refused(base):
    values = base.to_dict()
    with pytest.raises(SimForcingError, match="did you mean 'seed'"):
        protocol.Protocol.from_dict({**values, "sed": 1})
    del values["frames"]
    with pytest.raises(SimForcingError, match="lacks 'frames'"):
        protocol.Protocol.from_dict(values)


def test_the_hash_of_clips_sees_windows_and_their_order():
    one = protocol.hash_clips([(0, 3), (1, 5)])
    assert one == protocol.hash_clips([(0, 3), (1, 5)])
    assert one != protocol.hash_clips([(1, 5), (0, 3)])
    assert protocol.hash_clips([(1, 23)]) != protocol.hash_clips([(12, 3)])


def test_git_describes_only_a_checkout_that_tracks_the_package(tmp_path):
    module = tmp_path / "protocol.py"
    module.write_text("")
    assert protocol._git_describe(module) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    assert protocol._git_describe(module) is None  # inside a checkout, but not part of it
    subprocess.run([*git, "add", "protocol.py"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    subprocess.run([*git, "tag", "v7"], cwd=tmp_path, check=True)
    assert protocol._git_describe(module) == "v7"


def test_what_was_allowed_is_said(base):
    other = dataclasses.replace(base, code="1.2 (abc)", networks={"i3d": "ff"})
    protocols = {"a": base, "b": base, "c": other}
    protocol.check_same(protocols, allow={"code", "networks"})
    code, networks = protocol.mixed(protocols, ["code", "networks"])
    assert "differ in 'code'" in code and "(a, b)" in code and "'1.2 (abc)' (c)" in code
    assert "'networks.i3d'" in networks
    assert protocol.mixed({"a": base, "b": base}, ["code"]) == []
    assert protocol.mixed(protocols, []) == []
    with pytest.raises(SimForcingError, match="did you mean 'code'"):
        protocol.mixed(protocols, ["cod"])


def test_a_way_of_sampling_is_what_is_compared(base):
    other = dataclasses.replace(base, guidance=None, real_steps=3, simulation="rendered", control="copy")
    protocol.check_same({"a": base, "b": other}, allow=protocol.METHOD)
    with pytest.raises(SimForcingError):
        protocol.check_same({"a": base, "b": other})
