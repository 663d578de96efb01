#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh TREE PROGRAM [arguments]: builds a C++ test program of a source tree with the CUDA kernels
# as PTX, and runs it on the emulated device. MORTAR_EMULATOR_SEED shuffles the threads' order.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(realpath "$1")
program=$2
shift 2
arch=${MORTAR_EMULATOR_ARCH:-90}
build=$tree/build/emulated
code=90a
[[ $arch == 90 ]] || { build=$build-$arch; code=$arch; }
runtime=$build/libcudart_emulated.so
options=(
  "-DMORTAR_CUDA_ARCHS=$code-virtual" -DMORTAR_COMPRESS=OFF -DCMAKE_CUDA_FLAGS=-lineinfo
  "-DCUDA_cudart_static_LIBRARY=$runtime"
  "-DPython3_EXECUTABLE=${MORTAR_PYTHON:-$tree/.venv/bin/python}"
)
mkdir -p "$build"
exec 9>"$build/.emulator.lock"
flock 9
"$here/build.sh" "$runtime"
if [[ ! -e $build/build.ninja ]]; then
  CUDACXX=$(command -v nvcc) cmake --preset release -S "$tree" -B "$build" "${options[@]}" \
    --log-level=WARNING >&2
fi
ninja -C "$build" "$program" >"$build/build.log" 2>&1 ||
  { tail -40 "$build/build.log" >&2; exit 1; }
exec 9>&-
exec env LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$build/$program" "$@"
