// SPDX-License-Identifier: Apache-2.0
// What the tests of FP8 RMSNorm's launch choices share: random sizes, and plans as text.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>

namespace mortar::fp8_rmsnorm {

inline std::string printed(const auto& plan) {
  std::ostringstream out;
  out << plan;
  return out.str();
}

/// Sizes from one to far beyond what a row of threads holds, most of them odd.
inline std::int64_t random_size(std::mt19937& rng, double most) {
  return static_cast<std::int64_t>(
      std::exp(std::uniform_real_distribution<>(0.0, std::log(most))(rng)));
}

}  // namespace mortar::fp8_rmsnorm
