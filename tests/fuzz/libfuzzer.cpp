// SPDX-License-Identifier: Apache-2.0
// The reader under libFuzzer, which is guided by coverage. The custom mutator repairs the header
// length of half of the inputs: a change of the header would otherwise rarely be read.
#include <algorithm>
#include <cstring>
#include <string>

#include "adapter_reader.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mortar::fuzz::read_adapter(data, size);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 2 != 0) return size;
  mortar::fuzz::Input input = mortar::fuzz::split(data, size);
  mortar::fuzz::repair_header_length(input);
  const std::string repaired = mortar::fuzz::join(input);
  size = std::min(repaired.size(), max_size);
  std::memcpy(data, repaired.data(), size);
  return size;
}
