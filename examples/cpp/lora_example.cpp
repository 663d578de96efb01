// SPDX-License-Identifier: Apache-2.0
// One batch with two LoRA adapters and base-model tokens, on the CPU, checked against plain loops.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <random>
#include <vector>

#include "mortar/error.h"
#include "mortar/lora.h"

namespace {

constexpr std::int64_t kTokens = 7, kAdapters = 2, kHidden = 300, kWidth = 130, kRank = 12;
constexpr float kScale = 0.5f;

std::vector<float> random_values(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

/// y[t] += scale * (x[t] A^T) B^T in double precision, with the adapter of each token.
std::vector<double> naive_apply(const std::vector<std::int32_t>& token_adapter,
                                const std::vector<float>& x, const std::vector<float>& a,
                                const std::vector<float>& b, const std::vector<float>& y) {
  std::vector<double> result(y.begin(), y.end());
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const std::int64_t adapter = token_adapter[t];
    if (adapter < 0) continue;
    for (std::int64_t r = 0; r < kRank; ++r) {
      double h = 0;
      for (std::int64_t k = 0; k < kHidden; ++k) {
        h += double{x[t * kHidden + k]} * a[(adapter * kRank + r) * kHidden + k];
      }
      for (std::int64_t n = 0; n < kWidth; ++n) {
        result[t * kWidth + n] += kScale * h * b[(adapter * kWidth + n) * kRank + r];
      }
    }
  }
  return result;
}

}  // namespace

int main() {
  using mortar::DType;
  using mortar::Tensor;
  std::mt19937 random(1);
  std::vector<std::int32_t> token_adapter = {0, 1, -1, 1, 0, -1, 1};  // -1: the base model alone
  std::vector<float> x = random_values(kTokens * kHidden, random);
  std::vector<float> a = random_values(kAdapters * kRank * kHidden, random);
  std::vector<float> b = random_values(kAdapters * kWidth * kRank, random);
  std::vector<float> y = random_values(kTokens * kWidth, random);
  const std::vector<double> expected = naive_apply(token_adapter, x, a, b, y);

  const Tensor x_view(x.data(), DType::kFloat32, {kTokens, kHidden});
  const Tensor y_view(y.data(), DType::kFloat32, {kTokens, kWidth});
  const Tensor a_view(a.data(), DType::kFloat32, {kAdapters, kRank, kHidden});
  const Tensor b_view(b.data(), DType::kFloat32, {kAdapters, kWidth, kRank});
  const auto weights = mortar::LoraWeights::stacked({&a_view, 1}, {&b_view, 1});

  // The plan groups the batch's tokens by adapter; one serves every layer of a step. It and the
  // workspace belong to the caller, 16-byte aligned as operator new gives them: no op allocates.
  std::vector<std::int32_t> plan(mortar::lora_plan_size(kTokens, kAdapters));
  std::vector<std::uint8_t> workspace(mortar::lora_apply_workspace(x_view, weights));
  const Tensor plan_view(plan.data(), DType::kInt32, {std::ssize(plan)});
  const Tensor workspace_view(workspace.data(), DType::kUInt8, {std::ssize(workspace)});
  const Tensor map(token_adapter.data(), DType::kInt32, {kTokens});
  mortar::lora_plan(map, kAdapters, plan_view, {});
  const auto groups = mortar::LoraGroups::from_plan(plan_view, kTokens, kAdapters);
  mortar::lora_apply(x_view, weights, groups, y_view, /*offset=*/0, kScale, /*add_inputs=*/true,
                     workspace_view, {});

  double error = 0, largest = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    error = std::fmax(error, std::fabs(y[i] - expected[i]));
    largest = std::fmax(largest, std::fabs(expected[i]));
  }
  // Sums of 300 and of 12 float products: a few dozen roundings of 6e-8 at most.
  const bool right = error <= 1e-5 * largest;
  std::printf("largest |y| %.1f, largest error %.1e: %s\n", largest, error,
              right ? "right" : "WRONG");

  try {  // a mistake is one clear sentence, and nothing has been written
    mortar::lora_apply(x_view, weights, groups, x_view, 0, kScale, true, workspace_view, {});
    return 1;
  } catch (const mortar::Error& mistake) {
    std::printf("refused: %s\n", mistake.what());
  }
  return right ? 0 : 1;
}
