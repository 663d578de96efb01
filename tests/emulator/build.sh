#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build.sh OUTPUT.so: builds the emulated CUDA runtime.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "$1")
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
objects=$out.objects
mkdir -p "$objects"
flags=(-std=c++20 -O2 -g1 -march=native -ffp-contract=off -fno-strict-aliasing -fPIC -Wall -Wextra
  "-I$cuda/include" -isystem/usr/local/cuda/include "-DEMULATOR_FOLDER=\"$here\"")

is_current() {  # OBJECT SOURCE
  local input
  for input in "$2" "$here"/*.h "$here/build.sh"; do
    [[ $1 -nt $input ]] || return 1
  done
}
compile() {  # SOURCE OBJECT; a stale object does not outlive a failure
  local options=("${flags[@]}")
  case $1 in *mma.cpp) options+=(-O3) ;; esac
  rm -f "$2"
  g++ "${options[@]}" -c "$1" -o "$2.new" && mv "$2.new" "$2"
}

linked=()
jobs=()
for source in "$here"/*.cpp "$here"/switch.S; do
  object=$objects/$(basename "$source").o
  linked+=("$object")
  if is_current "$object" "$source"; then continue; fi
  compile "$source" "$object" &
  jobs+=($!)
  if ((${#jobs[@]} % 2 == 0)); then wait "${jobs[-2]}"; fi
done
for job in "${jobs[@]}"; do wait "$job"; done
if ((${#jobs[@]})) || [[ ! -e $out ]]; then
  g++ -shared -Wl,-soname,libcudart_emulated.so -o "$out.new" "${linked[@]}" -ldl
  mv "$out.new" "$out"
fi
