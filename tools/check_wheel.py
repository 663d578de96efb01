# SPDX-License-Identifier: Apache-2.0
"""Installs dist/mortar-*.whl into a fresh environment with its declared needs only and uses it."""

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from suite import ROOT

_MAX_BYTES = 30e6  # of the library once it is installed: the archive of the wheel is smaller
_PROGRAM = """
import importlib.util, sys
import mortar

assert importlib.util.find_spec("torch") is None, "torch came along"
store = mortar.AdapterStore()
assert len(store) == 0
try:
    store.open("absent", "no-such-folder")
except (RuntimeError, ValueError) as error:
    print("AdapterStore refuses a missing folder:", error)
else:
    sys.exit("AdapterStore opened a folder that does not exist")
"""


def main() -> int:
    wheels = sorted((ROOT / "dist").glob("mortar-*.whl"))
    if len(wheels) != 1:
        print(f"check_wheel: expected one dist/mortar-*.whl, found {len(wheels)}", file=sys.stderr)
        return 1
    wheel = wheels[0]
    if "-py3-none-" not in wheel.name:
        print(f"check_wheel: {wheel.name} is not for every Python 3", file=sys.stderr)
        return 1
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo("mortar/_lib/mortar_ffi.so").file_size
    if size > _MAX_BYTES:
        print(
            f"check_wheel: mortar_ffi.so takes {size / 1e6:.1f} MB installed, "
            f"at most {_MAX_BYTES / 1e6:.0f}",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, wheel], check=True, cwd=folder)
        # Isolated (-I): neither PYTHONPATH nor the sources in the working directory can help.
        subprocess.run([python, "-I", "-c", _PROGRAM], check=True, cwd=folder, env={})
    print(
        f"{wheel.name}: library of {size / 1e6:.1f} MB, imports with its declared dependencies only"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
