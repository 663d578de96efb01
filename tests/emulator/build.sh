#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build.sh OUTPUT.so: builds the emulated CUDA runtime.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "$1")
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
objects=$out.objects
mkdir -p "$objects"
flags="-std=c++20 -O2 -g1 -march=native -ffp-contract=off -fno-strict-aliasing -fPIC -Wall -Wextra
  -I$cuda/include -isystem/usr/local/cuda/include -DEMULATOR_FOLDER=\"$here\""
compile() {  # SOURCE OBJECT; a stale object does not outlive a failure
  local extra=
  case $1 in *mma.cpp) extra=-O3 ;; esac
  rm -f "$2"
  # shellcheck disable=SC2086
  g++ $flags $extra -c "$1" -o "$2.new" && mv "$2.new" "$2"
}
sources=("$here"/*.cpp "$here"/switch.S)
linked=()
jobs=()
for source in "${sources[@]}"; do
  object=$objects/$(basename "$source").o
  linked+=("$object")
  newest=$(ls -t "$here"/*.h "$source" "$here/build.sh" | head -1)
  [[ -e $object && $object -nt $newest ]] && continue
  compile "$source" "$object" &
  jobs+=($!)
  if ((${#jobs[@]} % 2 == 0)); then wait "${jobs[-2]}"; fi
done
for job in "${jobs[@]}"; do wait "$job"; done
if ((${#jobs[@]})) || [[ ! -e $out ]]; then
  g++ -shared -Wl,-soname,libcudart_emulated.so -o "$out.new" "${linked[@]}" -ldl
  mv "$out.new" "$out"
fi
