// SPDX-License-Identifier: Apache-2.0
// The figures of docs/numerics.md for SiLU, by a dense sweep of float32: with W = 1, a tap of 1 and
// dy = 1 the sum s is x itself, y is silu(s) and dx its slope.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "devices.h"
#include "dynamic_conv_case.h"
#include "simd_targets.h"

namespace mortar::testing {
namespace {

/// Every kStride-th bit pattern of float32, 4,100 to an octave: a prime, so that the low bits of
/// the mantissa vary too.
constexpr std::uint32_t kStride = 2039;

struct Sweep {
  std::vector<double> s, y, slope;
};

/// silu(s) of float32 values s.
std::vector<double> silu(Device device, const std::vector<double>& s) {
  const auto n = static_cast<std::int64_t>(s.size());
  Operand x(device, DType::kFloat32, {1, 1, n}), y(device, DType::kFloat32, {1, 1, n});
  Operand one(device, DType::kFloat32, {1, 1, n, 1});
  x.fill(s);
  one.fill(Array(s.size(), 1.0));
  dynamic_conv_forward(x.view(), one.view(), {}, {}, y.view(), {}, true, {});
  return y.values();
}

Sweep sweep(Device device) {
  Sweep out;
  for (std::uint64_t bits = 0; bits < 0x100000000u; bits += kStride) {
    const float s = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isfinite(s)) out.s.push_back(s);
  }
  const auto n = static_cast<std::int64_t>(out.s.size());
  Operand x(device, DType::kFloat32, {1, 1, n}), dy(device, DType::kFloat32, {1, 1, n});
  Operand one(device, DType::kFloat32, {1, 1, n, 1});
  Operand dx(device, DType::kFloat32, {1, 1, n}), dk(device, DType::kFloat32, {1, 1, n, 1});
  x.fill(out.s);
  one.fill(Array(out.s.size(), 1.0));
  dy.fill(Array(out.s.size(), 1.0));
  dynamic_conv_backward(x.view(), one.view(), {}, {}, dy.view(), {}, dx.view(), dk.view(), {}, true,
                        {});
  out.y = silu(device, out.s);
  out.slope = dx.values();
  return out;
}

double exact_sigmoid(double s) {
  const double e = std::exp(-std::abs(s));
  return (s < 0 ? e : 1) / (1 + e);
}

/// The distance of float32 values at v.
double unit_of(double v) {
  const int exponent = v == 0 ? -126 : std::max(std::ilogb(v), -126);
  return std::ldexp(1.0, exponent - 23);
}

/// `units` of a value s are allowed for silu(s). Below `cut` it may be -0 as well.
template <class Units>
void expect_silu(const Sweep& got, double cut, double least, const Units& units) {
  double worst = 0;
  for (std::size_t i = 0; i < got.s.size(); ++i) {
    const double s = got.s[i], want = s * exact_sigmoid(s);
    if (s < cut) {
      ASSERT_LT(std::abs(want), least) << s;
      ASSERT_LE(std::abs(got.y[i] - want), least) << s;
      continue;
    }
    const double off = std::abs(got.y[i] - want) / unit_of(want);
    worst = std::max(worst, off / units(s));
    ASSERT_LE(off, units(s)) << "silu(" << s << ") = " << got.y[i] << ", exactly " << want;
  }
  ::testing::Test::RecordProperty("worst share of the bound", std::to_string(worst));
}

/// The slope q (1 + s (1 - q)), q = sigmoid(s), passes through zero, so its error counts in units
/// of 2^-24. That of q counts once as a factor and s times in 1 - q, until q is 1 from s = 17.4 on.
void expect_slope(const Sweep& got, double factor, double per_s) {
  for (std::size_t i = 0; i < got.s.size(); ++i) {
    const double s = got.s[i], q = exact_sigmoid(s);
    const double want = q * (1 + s * (s < 0 ? 1 - q : exact_sigmoid(-s)));
    const double bound = factor + per_s * std::min(std::max(s, 0.0), 17.4);
    ASSERT_LE(std::abs(got.slope[i] - want), 0x1p-24 * bound)
        << "slope at " << s << ", exactly " << want;
  }
}

using DynamicConvNumericsCpu = SimdTarget;
INSTANTIATE_TEST_SUITE_P(Targets, DynamicConvNumericsCpu, ::testing::ValuesIn(simd_targets()),
                         simd_target_name);

TEST_P(DynamicConvNumericsCpu, SiluWithin3Point2Units) {
  const Sweep got = sweep(Device{});
  expect_silu(got, -86, 4e-36, [](double) { return 3.2; });
  expect_slope(got, 4, 2);
}

/// Single values hide an error of the exponential's polynomial behind their own rounding, which
/// averages out over neighbours. From s = -20 down silu(s) is s exp(s), and the error depends on
/// the remainder of s by ln 2 alone. The polynomial itself is off by 0.06; the bound fails where
/// the coefficient of r^2 is changed by 1e-7 of itself, of r^3 by 1e-6, of r^4 by 1e-5, of r^5 by
/// 1e-4, or of r^6 by 2e-3.
TEST_P(DynamicConvNumericsCpu, ExponentialOffByAtMost0Point07OnAverage) {
  constexpr int kSamples = 1 << 22, kBins = 40;
  const double ln2 = std::numbers::ln2_v<double>;
  std::vector<double> s(kSamples);
  for (int i = 0; i < kSamples; ++i) {
    s[static_cast<std::size_t>(i)] = static_cast<float>(-20.0 - 44.0 * i / kSamples);
  }
  const std::vector<double> y = silu(Device{}, s);
  std::array<double, kBins> sum{}, count{};
  for (std::size_t i = 0; i < s.size(); ++i) {
    const double turns = s[i] / ln2;
    const auto bin = static_cast<std::size_t>((turns - std::floor(turns)) * kBins);
    sum[bin] += y[i] / (s[i] * exact_sigmoid(s[i])) - 1;
    ++count[bin];
  }
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    EXPECT_LE(std::abs(sum[bin] / count[bin]), 0x1p-24 * 0.07) << "bin " << bin;
  }
}

#if MORTAR_HAS_CUDA
class DynamicConvNumericsGpu : public ::testing::TestWithParam<Device> {};
INSTANTIATE_TEST_SUITE_P(Devices, DynamicConvNumericsGpu, ::testing::ValuesIn(gpus()), device_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DynamicConvNumericsGpu);

/// CUDA promises 2 + 1.173 |s| units for __expf and 2 for __fdividef; the sum and the product round
/// once each, and a unit of one factor is up to two of the product.
TEST_P(DynamicConvNumericsGpu, SiluWithinTheUnitsOfTheFastExponential) {
  const Sweep got = sweep(GetParam());
  expect_silu(got, -86, 4e-36, [](double s) { return s < 0 ? 8 - 2.4 * s : 8.0; });
  expect_slope(got, 12, 6);
}
#endif

}  // namespace
}  // namespace mortar::testing
