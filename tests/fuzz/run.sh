#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzz targets of the adapter reader and runs them for MORTAR_FUZZ_SECONDS (default 60)
# together: the deterministic mutator always, libFuzzer where clang has its runtime. Build folder:
# MORTAR_FUZZ_BUILD (default build/fuzz). Ends with a summary line; fails if a fault was found.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seconds=${MORTAR_FUZZ_SECONDS:-60}
build=${MORTAR_FUZZ_BUILD:-$here/../../build/fuzz}
mkdir -p "$build"
build=$(cd "$build" && pwd)

compile() {  # compile FOLDER [CMAKE OPTION...]
  local folder=$build/$1
  shift
  cmake -S "$here" -B "$folder" -G Ninja "$@" >"$build/cmake.log" || { cat "$build/cmake.log"; exit 1; }
  cmake --build "$folder"
}

has_libfuzzer() {
  command -v clang++ >/dev/null &&
    echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -fsanitize=fuzzer,address,undefined -x c++ - -o "$build/has_libfuzzer" 2>/dev/null
}

compile mutator
if has_libfuzzer; then
  compile libfuzzer -DMORTAR_LIBFUZZER=ON -DCMAKE_CXX_COMPILER=clang++
  share=$(((seconds + 1) / 2))
else
  echo "fuzz: no libFuzzer (clang with its runtime), the mutator runs alone"
  share=$seconds
fi

cd "$build"
MORTAR_FUZZ_SECONDS=$share mutator/adapter_store_fuzz
summary="mutator $share s"
if [[ $share != "$seconds" ]]; then
  mkdir -p seeds corpus
  mutator/adapter_store_fuzz --seeds seeds
  libfuzzer/adapter_libfuzzer -max_total_time="$share" -max_len=8192 -timeout=20 \
    -rss_limit_mb=2048 -dict="$here/adapter_reader.dict" -print_final_stats=1 corpus seeds \
    >libfuzzer.log 2>&1 &
  fuzzer=$!
  for ((waited = 0; waited < share; waited += 10)); do
    sleep $((share - waited < 10 ? share - waited : 10))
    echo "fuzz: libFuzzer: $(grep -o 'cov: .*corp: [0-9]*' libfuzzer.log | tail -1)"
  done
  wait "$fuzzer" || { tail -60 libfuzzer.log; exit 1; }
  grep -h 'stat::number_of_executed_units' libfuzzer.log
  summary="$summary, libFuzzer $share s"
fi
echo "fuzz: adapter reader: no fault found ($summary)"
