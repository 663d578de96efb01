// SPDX-License-Identifier: Apache-2.0
// Runs the ops on a case and compares everything they wrote, and everything that they must not
// have touched, with the float64 oracle.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "lora/cpu/kernels.h"
#include "lora/reference.h"
#include "lora_case.h"
#include "mortar/error.h"

namespace mortar::testing {

/// Where an op runs: a GPU, or the CPU with one of its tables of kernels.
struct LoraTarget {
  Device device;
  const lora::cpu::Kernels* level = nullptr;
  std::string name;
};
inline void PrintTo(const LoraTarget& t, std::ostream* out) { *out << t.name; }

inline std::vector<LoraTarget> lora_targets() {
  std::vector<LoraTarget> targets;
  for (const lora::cpu::Kernels* level : lora::cpu::supported_kernels()) {
    std::string name = std::string("cpu_") + level->level;
    for (char& ch : name) {
      if (!std::isalnum(static_cast<unsigned char>(ch))) ch = '_';
    }
    targets.push_back({Device{}, level, name});
  }
  if (has_gpu()) targets.push_back({Device{DeviceType::kCUDA, 0}, nullptr, "cuda"});
  return targets;
}

/// Selects a target's kernels for as long as it lives.
class UseTarget {
 public:
  explicit UseTarget(const LoraTarget& target) { lora::cpu::use_kernels(target.level); }
  ~UseTarget() { lora::cpu::use_kernels(nullptr); }
};

/// Half the distance between 1 and the next value: the relative error of one rounding.
inline double unit_roundoff(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : (dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-24);
}

/// Smallest positive value: what rounding costs near zero.
inline double smallest(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126; }

/// Error of a float32 sum of n products over the sum of their absolute values: roundings of random
/// sign grow like sqrt(n); 4 standard deviations and 8 further operations.
inline double sum_error(double n) { return 4 * (std::sqrt(n) + 8) * 0x1p-24; }

inline double hidden_tolerance(const LoraCase& c, const lora::Bounded& h, DType h_dtype) {
  return sum_error(static_cast<double>(c.hidden)) * h.magnitude +
         unit_roundoff(h_dtype) * std::abs(h.value) + smallest(h_dtype);
}

/// What lora_apply leaves out on CUDA with float32 weights under bfloat16 x and y: A, h and B in
/// two parts are off by 1.01 * 2^-16 of themselves, and the product of h's and B's second parts,
/// each below 2^-7 of its value, is dropped (docs/numerics.md). lora_shrink and lora_expand take
/// three.
inline double two_parts_error(const LoraOperands& op, const lora::ReferenceOutput& out) {
  const LoraCase& c = op.c;
  const bool takes_two = op.device.type == DeviceType::kCUDA && c.w == DType::kFloat32 &&
                         c.x == DType::kBFloat16 && c.y == DType::kBFloat16;
  if (!takes_two) return 0;
  return 1.01 * 0x1p-16 * (out.hidden_error + 2 * out.magnitude) + 0x1p-14 * out.magnitude;
}

/// h carries the error of its own sum and one rounding if it passes through 16 bits; the expand
/// adds that of its sum over the rank and of y's rounding.
inline double output_tolerance(const LoraOperands& op, const lora::ReferenceOutput& out,
                               DType h_dtype) {
  const LoraCase& c = op.c;
  const bool rounds = c.w != DType::kFloat32 && c.y == c.w;
  const double h_roundoff = std::max(rounds ? unit_roundoff(c.w) : 0, unit_roundoff(h_dtype));
  return sum_error(static_cast<double>(c.hidden)) * out.hidden_error + h_roundoff * out.magnitude +
         smallest(DType::kFloat16) * op.max_rank() +
         sum_error(op.max_rank()) * (out.magnitude + std::abs(out.value)) +
         unit_roundoff(c.y) * std::abs(out.value);
}

/// `by_apply`: lora_apply has written y, not lora_expand.
inline void expect_outputs(LoraOperands& op, const std::vector<lora::ReferenceOutput>& expected,
                           DType h_dtype, const std::string& what, bool by_apply = false) {
  op.y.download();
  EXPECT_TRUE(op.y.guards_intact()) << what << " wrote outside y";
  const Tensor y = op.y.host();
  int failures = 0;
  for (std::int64_t t = 0; t < y.shape[0]; ++t) {
    for (std::int64_t n = 0; n < y.shape[1]; ++n) {
      const std::int64_t at = t * y.strides[0] + n;
      const lora::ReferenceOutput& want = expected[t * y.shape[1] + n];
      const double got = op.y.get(at);
      const double tolerance =
          output_tolerance(op, want, h_dtype) + (by_apply ? two_parts_error(op, want) : 0);
      const bool good = want.written ? std::abs(got - want.value) <= tolerance : op.y.unchanged(at);
      if (!good && ++failures <= 3) {
        ADD_FAILURE() << what << ": y[" << t << ", " << n << "] of adapter " << op.map[t] << " is "
                      << got << ", expected " << want.value << " +- " << tolerance
                      << (want.written ? "" : " (not to be written)");
      }
    }
  }
  EXPECT_EQ(failures, 0) << what;
}

inline void restore_y(LoraOperands& op, const GuardedTensor& original) {
  const Tensor from = original.host();
  op.y.for_each([&](std::int64_t at) { op.y.set(at, load_float(from.data, from.dtype, at)); });
  op.y.upload();
}

inline void run_apply(LoraOperands& op) {
  GuardedTensor workspace = op.apply_workspace();
  lora_apply(op.x.view(), op.weights(), op.groups(), op.y.view(), op.c.offset, op.c.scale, op.c.add,
             workspace.view(), Stream{});
  workspace.download();
  EXPECT_TRUE(workspace.guards_intact()) << "lora_apply wrote outside the workspace";
}

/// lora_apply against the oracle.
inline void expect_apply_matches(LoraOperands& op) {
  const LoraWeights host = op.host_weights();
  const auto h = lora::reference_shrink(op.x.host(), host, op.map, op.c.scale);
  const auto expected = lora::reference_expand(h, host, op.map, op.y.host(), op.c.offset, op.c.add);
  run_apply(op);
  expect_outputs(op, expected, DType::kFloat32, "lora_apply", /*by_apply=*/true);
}

/// h with guards, wider than the ranks by `extra` columns.
inline GuardedTensor make_hidden(const LoraOperands& op, DType dtype, std::int64_t extra) {
  const Layout layout = op.c.strided ? Layout{1, 2} : Layout{};
  return GuardedTensor(dtype, {op.slices(), op.c.tokens, op.max_rank() + extra}, layout, op.device);
}

/// Columns past an adapter's rank are zero; base rows are zero with zero_rows, else untouched.
inline void expect_hidden(LoraOperands& op, GuardedTensor& h, const lora::ReferenceHidden& expected,
                          DType h_dtype, bool zero_rows) {
  h.download();
  EXPECT_TRUE(h.guards_intact()) << "lora_shrink wrote outside h";
  const Tensor view = h.host();
  for (int s = 0; s < op.slices(); ++s) {
    for (std::int64_t t = 0; t < op.c.tokens; ++t) {
      const bool base = op.map[t] < 0 || op.map[t] >= op.c.adapters;
      for (std::int64_t r = 0; r < view.shape[2]; ++r) {
        const std::int64_t at = s * view.strides[0] + t * view.strides[1] + r;
        if (base && !zero_rows) {
          ASSERT_TRUE(h.unchanged(at)) << "h of base token " << t << " was written";
          continue;
        }
        const lora::Bounded want =
            r < expected.width ? expected.at(s, t, static_cast<int>(r)) : lora::Bounded{};
        const double tolerance = want.magnitude == 0 ? 0 : hidden_tolerance(op.c, want, h_dtype);
        ASSERT_LE(std::abs(h.get(at) - want.value), tolerance)
            << "h[" << s << ", " << t << ", " << r << "] of adapter " << op.map[t];
      }
    }
  }
}

/// The two ops with an h of the caller's, of float32 or of the dtype of x.
inline void expect_two_ops_match(LoraOperands& op, DType h_dtype, bool zero_rows) {
  const LoraWeights host = op.host_weights();
  const auto expected_h = lora::reference_shrink(op.x.host(), host, op.map, op.c.scale);
  const auto expected =
      lora::reference_expand(expected_h, host, op.map, op.y.host(), op.c.offset, op.c.add);
  GuardedTensor h = make_hidden(op, h_dtype, op.c.strided ? 3 : 0);
  GuardedTensor workspace = op.shrink_workspace();
  lora_shrink(op.x.view(), op.weights(), op.groups(), h.view(), op.c.scale,
              zero_rows ? op.token_adapter.view() : Tensor{}, workspace.view(), Stream{});
  expect_hidden(op, h, expected_h, h_dtype, zero_rows);
  lora_expand(h.view(), op.weights(), op.groups(), op.y.view(), op.c.offset, op.c.add, Stream{});
  expect_outputs(op, expected, h_dtype, "lora_shrink + lora_expand");
}

}  // namespace mortar::testing
