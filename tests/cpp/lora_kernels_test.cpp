// SPDX-License-Identifier: Apache-2.0
// Conversions between float32 and the 16-bit types, scalar and at every SIMD level, and the choice
// of a level.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_target.h"
#include "core/float_element.h"
#include "lora/cpu/kernels.h"
#include "mortar/error.h"

namespace mortar {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

/// The nearest value of a format with `mantissa` explicit bits, smallest normal exponent
/// `min_exponent` and largest finite value `largest`, ties to even, found in float64.
float nearest(float v, int mantissa, int min_exponent, double largest) {
  if (!std::isfinite(v) || v == 0) return v;
  const int exponent = std::max(std::ilogb(v), min_exponent);
  const double unit = std::ldexp(1.0, exponent - mantissa);
  const double rounded = std::nearbyint(v / unit) * unit;
  if (std::abs(rounded) > largest) return std::copysign(std::numeric_limits<float>::infinity(), v);
  return static_cast<float>(std::copysign(rounded, v));
}
float nearest_bf16(float v) { return nearest(v, 7, -126, 0x1.fep127); }
float nearest_f16(float v) { return nearest(v, 10, -14, 65504.0); }

/// Every exponent with mantissas around the ties of both formats, and many random patterns.
std::vector<float> hard_values() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; high += 1) {
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  for (std::uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (std::uint32_t m : {0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u, 0x7fffffu}) {
      values.push_back(std::bit_cast<float>(exponent << 23 | m));
    }
  }
  std::mt19937 rng(1);
  for (int i = 0; i < 200000; ++i) values.push_back(std::bit_cast<float>(std::uint32_t(rng())));
  return values;
}

void expect_same(float got, float want, float from) {
  if (std::isnan(want)) {
    ASSERT_TRUE(std::isnan(got)) << from;
  } else {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(want))
        << std::bit_cast<std::uint32_t>(from);
  }
}

TEST(Float16Scalar, SmallRoundsToNearestEven) {
  for (float v : hard_values()) {
    expect_same(to_float(from_float<BFloat16>(v)), nearest_bf16(v), v);
    expect_same(to_float(from_float<Float16>(v)), nearest_f16(v), v);
  }
}

TEST(Float16Scalar, SmallEverySixteenBitValueSurvives) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 b{static_cast<std::uint16_t>(bits)};
    const Float16 f{static_cast<std::uint16_t>(bits)};
    if (!std::isnan(to_float(b))) {
      ASSERT_EQ(from_float<BFloat16>(to_float(b)).bits, bits);
    }
    if (!std::isnan(to_float(f))) {
      ASSERT_EQ(from_float<Float16>(to_float(f)).bits, bits);
    }
  }
}

class Levels : public ::testing::TestWithParam<const lora::cpu::Kernels*> {};

TEST_P(Levels, SmallConvertAgreesWithScalarCode) {
  std::vector<float> values = hard_values();
  values.push_back(1.0f);  // not a multiple of any vector
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<std::uint16_t> half(values.size());
  std::vector<float> back(values.size());
  for (DType dtype : {kBF16, kF16}) {
    GetParam()->convert(values.data(), kF32, 1.0f, count, half.data(), dtype);
    GetParam()->convert(half.data(), dtype, 1.0f, count, back.data(), kF32);
    for (std::int64_t i = 0; i < count; ++i) {
      expect_same(back[i], round_to(values[i], dtype), values[i]);
    }
  }
}

TEST_P(Levels, SmallConvertScalesAndKeepsToItsCount) {
  for (std::int64_t count = 0; count < 40; ++count) {
    std::vector<float> from(count), to(count + 1, -7.0f);
    for (std::int64_t i = 0; i < count; ++i) from[i] = static_cast<float>(i) - 3.5f;
    GetParam()->convert(from.data(), kF32, 0.25f, count, to.data(), kF32);
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(to[i], from[i] * 0.25f);
    ASSERT_EQ(to[count], -7.0f);
  }
}

TEST_P(Levels, SmallADTypeWithoutAKernelThrows) {
  float from = 1, to = -7;
  for (const DType dtype : {DType::kInt32, DType::kUInt8, DType::kFloat8E4M3}) {
    EXPECT_THROW(lora::cpu::float_index(dtype), Error) << dtype_name(dtype);
    EXPECT_THROW(GetParam()->convert(&from, dtype, 1, 1, &to, kF32), Error) << dtype_name(dtype);
    EXPECT_THROW(GetParam()->convert(&from, kF32, 1, 1, &to, dtype), Error) << dtype_name(dtype);
  }
  EXPECT_EQ(to, -7.0f);
}

TEST(LevelChoice, SmallFirstIsInUseAndAnotherCanBeChosen) {
  const auto tables = lora::cpu::supported_kernels();
  ASSERT_FALSE(tables.empty());
  EXPECT_EQ(&lora::cpu::kernels(), tables.front());
  for (const lora::cpu::Kernels* table : tables) {
    lora::cpu::use_kernels(table);
    EXPECT_EQ(&lora::cpu::kernels(), table);
  }
  lora::cpu::use_kernels(nullptr);
  EXPECT_EQ(&lora::cpu::kernels(), tables.front());
}

TEST(LevelChoice, SmallTheTargetNamesTheBestLevel) {
  const std::string best = lora::cpu::supported_kernels().front()->level, target = cpu_target();
  EXPECT_EQ(best == "AMX", target == "AMX-BF16");
  EXPECT_EQ(best == "AVX512-BF16", target == "AVX512-BF16");
  EXPECT_EQ(best == "N_AVX3", target == "AVX-512");
  EXPECT_EQ(best == "N_AVX2", target == "AVX2");
  EXPECT_EQ(best == "N_NEON", target == "NEON");
}

std::string level_name(const ::testing::TestParamInfo<const lora::cpu::Kernels*>& level) {
  std::string name = level.param->level;
  for (char& ch : name) {
    if (!std::isalnum(static_cast<unsigned char>(ch))) ch = '_';
  }
  return name;
}
INSTANTIATE_TEST_SUITE_P(All, Levels, ::testing::ValuesIn(lora::cpu::supported_kernels()),
                         level_name);

}  // namespace
}  // namespace mortar
