// SPDX-License-Identifier: Apache-2.0
// The choice of a table of functions.
#include "lora/cpu/kernels.h"

#include <atomic>
#include <memory>
#include <vector>

#include "lora/cpu/simd.h"

namespace mortar::lora::cpu {
namespace {

/// Made on first use and kept: the tables of this machine, best first.
struct Registry {
  std::vector<const Kernels*> tables = highway_kernels();
  std::unique_ptr<const Kernels> pairs = avx512_bf16_kernels(*tables.front());
  std::unique_ptr<const Kernels> tiles = pairs ? amx_kernels(*pairs) : nullptr;

  Registry() {
    if (pairs != nullptr) tables.insert(tables.begin(), pairs.get());
    if (tiles != nullptr) tables.insert(tables.begin(), tiles.get());
  }
};

const Registry& registry() {
  static const Registry instance;
  return instance;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::span<const Kernels* const> supported_kernels() { return registry().tables; }

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_relaxed);
  return table != nullptr ? *table : *registry().tables.front();
}

void use_kernels(const Kernels* table) { chosen.store(table, std::memory_order_relaxed); }

}  // namespace mortar::lora::cpu
