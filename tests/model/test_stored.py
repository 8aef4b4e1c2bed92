"""Damaged descriptions of models, and uploading them."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from simforcing.errors import SimForcingError
from simforcing.model.preparation import Preparation
from simforcing.model.stored import check_fields
from simforcing.model.world_model import WorldModel, WorldModelConfig, load_model, located

DESCRIPTION = json.loads((located("bundled-teacher") / "config.json").read_text())


def fields(value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, inner in value.items():
        if key not in ("codec_identity",):
            yield (*path, key)
            if isinstance(inner, dict):
                yield from fields(inner, (*path, key))


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(DESCRIPTION)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return found


@pytest.mark.parametrize("path", [p for p in fields(DESCRIPTION) if len(p) > 1 and p[-1] != "relative_to"])
@pytest.mark.parametrize("value", [None, -1, [], ["a"]], ids=repr)
def test_every_field_is_checked_and_named(path: tuple[str, ...], value: Any) -> None:
    description = changed(path, value)
    with pytest.raises(SimForcingError, match=path[-1]):
        check_fields(WorldModelConfig, description["model"], "model")
        check_fields(Preparation, description["preparation"], "preparation")


def test_what_ships_passes_the_check() -> None:
    assert check_fields(WorldModelConfig, DESCRIPTION["model"], "model") is None
    assert check_fields(Preparation, DESCRIPTION["preparation"], "preparation") is None


@pytest.mark.parametrize(
    ("path", "value"),
    [(("model",), 3), (("model", "video", "dim"), "a"), (("model", "video", "num_layers"), 99), (("preparation",), [])],
)
def test_the_file_is_named(path: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    model = shutil.copytree(located("bundled-teacher"), tmp_path / "model")
    (model / "config.json").write_text(json.dumps(changed(path, value)))
    with pytest.raises(SimForcingError, match=r"config\.json"):
        load_model(model, WorldModel)


@pytest.mark.parametrize(("name", "same"), [("bundled", True), ("bundled-teacher", True), ("bundled-student", False)])
def test_what_ships_is_opened_by_name(name: str, same: bool) -> None:
    model = WorldModel.from_pretrained(name)
    teacher = WorldModel.from_pretrained(located("bundled-teacher"))
    assert model.config.sim_condition != same
    assert torch.equal(next(model.parameters()), next(teacher.parameters())) == same


def test_other_names_are_paths(tmp_path: Path) -> None:
    assert located(tmp_path) == tmp_path and located("me/model") == Path("me/model")
    with pytest.raises(SimForcingError, match=r"no model at bundled-baseline"):
        WorldModel.from_pretrained("bundled-baseline")


def test_uploading_hands_the_whole_directory_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Hub:
        def create_repo(self, repository: str, private: bool, exist_ok: bool) -> None:
            seen["made"] = (repository, private, exist_ok)

        def upload_folder(self, repo_id: str, folder_path: str) -> str:
            seen["files"] = sorted(p.name for p in Path(folder_path).iterdir())
            return f"hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert WorldModel.from_pretrained("bundled-teacher").push_to_hub("me/model", private=True) == "hub/me/model"
    assert seen == {"made": ("me/model", True, True), "files": ["config.json", "model.safetensors", "stats.json"]}


def test_a_hub_that_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        def create_repo(self, repository: str, private: bool, exist_ok: bool) -> None:
            raise OSError("no token\nlog in")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    with pytest.raises(SimForcingError, match=r"me/model: not uploaded to the hub \(no token log in\)"):
        WorldModel.from_pretrained("bundled-teacher").push_to_hub("me/model")
