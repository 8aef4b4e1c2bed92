"""Read a URDF as a MuJoCo specification: one set of meshes a link, nothing fused or discarded."""

import xml.etree.ElementTree as ET
from pathlib import Path

import mujoco

from simforcing.errors import SimForcingError

READABLE = (".stl", ".obj", ".msh")  # what MuJoCo decodes; .dae (Collada) is not among them
_COMPILER = {
    "discardvisual": "false",  # we keep one set of geoms only, and draw it
    "fusestatic": "false",  # frames such as `panda_link8` must survive
    "strippath": "false",
    "balanceinertia": "true",
    "boundmass": "0.001",  # frames without inertia are common in URDF, and MuJoCo refuses them
    "boundinertia": "0.000001",
}


def _mesh_path(name: str, folders: list[Path]) -> Path | None:
    """The file that a URDF mesh name means: relative to a folder, a `package://` name, or absolute."""
    plain = name.removeprefix("file://")
    if plain.startswith("package://"):
        plain = plain.removeprefix("package://")
        package, _, inside = plain.partition("/")
        options = [plain, inside] if package else [inside]
    else:
        options = [plain]
    for folder in folders:
        for option in options:
            path = folder / option
            if path.is_file():
                return path.resolve()
    return None


def _usable(shapes: list[ET.Element], folders: list[Path]) -> tuple[bool, list[str]]:
    """Resolve the meshes of `shapes` in place; is there something to draw, and which are not readable?"""
    missing = []
    for shape in shapes:
        for mesh in shape.iter("mesh"):
            name = mesh.get("filename", "")
            path = _mesh_path(name, folders)
            if path is None or path.suffix.lower() not in READABLE:
                missing.append(name)
            else:
                mesh.set("filename", str(path))
    return bool(shapes) and not missing, missing


def _keep_one_set(link: ET.Element, folders: list[Path]) -> list[str]:
    """Keep the visual shapes of a link if all can be read, else its collision shapes; the missing meshes."""
    visual, collision = link.findall("visual"), link.findall("collision")
    seen, missing_visual = _usable(visual, folders)
    solid, missing_solid = (False, []) if seen else _usable(collision, folders)
    keep = visual if seen else collision if solid else []
    for shape in visual + collision:
        if not any(shape is kept for kept in keep):
            link.remove(shape)
    for shape in keep:
        shape.tag = "visual"
    return [] if keep else missing_visual + missing_solid


def _unique_names(root: ET.Element) -> dict[str, str]:
    """Give every mesh file a name of its own, since MuJoCo tells meshes apart by stem alone; name -> path."""
    paths = dict.fromkeys(mesh.get("filename", "") for mesh in root.iter("mesh"))
    names = {path: f"{Path(path).stem}_{i}{Path(path).suffix}" for i, path in enumerate(paths)}
    for mesh in root.iter("mesh"):
        mesh.set("filename", names[mesh.get("filename", "")])
    return {name: path for path, name in names.items()}


def _folders(path: Path, root: ET.Element) -> list[Path]:
    """Where meshes may lie: beside the URDF, in its `meshdir`, up to four folders above (ROS packages)."""
    here = path.resolve().parent
    folders = [here]
    for compiler in root.iter("compiler"):
        if meshdir := compiler.get("meshdir"):
            folders.append(here / meshdir)
    return folders + list(here.parents)[:4]


def read_urdf(path: Path) -> mujoco.MjSpec:
    """The URDF at `path` as an `MjSpec`: visual meshes where MuJoCo reads them, else the collision meshes.

    Raises SimForcingError for a file that is not URDF or whose meshes are missing for a whole link.
    """
    try:
        root = ET.parse(path).getroot()
    except ET.ParseError as error:
        raise SimForcingError(f"robot {path}: not an XML file ({error})") from error
    if root.tag != "robot" or root.find("link") is None:
        raise SimForcingError(f"robot {path}: no <robot> with links inside (found <{root.tag}>); give a URDF")
    folders = _folders(path, root)
    missing = [name for link in root.iter("link") for name in _keep_one_set(link, folders)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise SimForcingError(
            f"robot {path}: mesh files missing or not {'/'.join(READABLE)}: {', '.join(missing[:3])}{more}; "
            "put them beside the URDF under these names"
        )
    files = _unique_names(root)
    for old in root.findall("mujoco"):
        root.remove(old)
    ET.SubElement(ET.SubElement(root, "mujoco"), "compiler", _COMPILER)
    try:
        spec = mujoco.MjSpec.from_string(ET.tostring(root, encoding="unicode"))
    except ValueError as error:
        raise SimForcingError(f"robot {path}: {' '.join(str(error).split())}") from error
    for mesh in spec.meshes:
        mesh.file = files[mesh.file]
        # scanned links are often open surfaces; as a shell each has an inertia
        mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    return spec
