#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Renews requirements.txt: installs pyproject.toml's extra `dev` into a fresh environment beside a
# fixed PyTorch and writes down what came.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
torch=${1:-2.13.0}
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT

extras=$(python3 - <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
print("\n".join(name for name in wanted if not name.startswith(("mortar[", "torch>"))))
PYTHON
)
python3 -m venv "$environment"
mapfile -t packages <<<"$extras"
"$environment/bin/pip" install "torch==$torch" "${packages[@]}"
{
  sed '/^[^#]/,$d' requirements.txt
  # A local version label (+cpu) names one machine's build; CUDA's packages come with PyTorch's pins.
  "$environment/bin/pip" freeze --all | sed 's/^\(torch==[0-9.]*\)+.*/\1/' |
    grep -v -E '^(pip|nvidia|cuda|triton)'
} >"$environment/requirements.txt"
cp "$environment/requirements.txt" requirements.txt
