// SPDX-License-Identifier: Apache-2.0
// Kernels of the program, translated when they are first needed.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "kernel.h"

namespace emulator {

struct Kernel {
  const void* fatbin = nullptr;  ///< the fatbinary header
  std::string name;
  // Known after load().
  bool loaded = false;
  void (*entry)(Thread*) = nullptr;
  unsigned static_smem = 0, param_bytes = 0;
  unsigned max_dynamic_smem = 48 * 1024;
  unsigned max_threads = 1024;
  unsigned max_cluster = 8;  ///< CTAs; 16 where the kernel has asked for them
  std::vector<std::pair<unsigned, unsigned>> params;  ///< offset and size
  std::vector<u64> symbols;
  std::vector<std::string> instructions;

  std::string describe(unsigned at) const {
    return at < instructions.size() ? instructions[at] : "an unknown place";
  }
};

void register_kernel(const void* fatbin, const void* host_function, const char* name);
/// Translates it first if need be; nullptr if there is no such kernel.
Kernel* find_kernel(const void* host_function);

}  // namespace emulator
