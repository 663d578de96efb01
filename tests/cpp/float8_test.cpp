// SPDX-License-Identifier: Apache-2.0
// The scalar 8-bit floats against their definition, code by code, and Philox against the known
// answers of its authors.
#include "core/float8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/philox.h"

namespace mortar {
namespace {

/// The value of a code by OCP's definition; NaN and infinities as floats have them.
template <class T>
double defined_value(int code) {
  constexpr int kMantissa = 1 << T::kMantissaBits;
  constexpr bool kInfinities = T::kMantissaBits == 2;
  const int magnitude = code & 0x7f, exponent = magnitude / kMantissa, rest = magnitude % kMantissa;
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (kInfinities && magnitude > 0x7c) return std::nan("");
  if (kInfinities && magnitude == 0x7c) return sign * INFINITY;
  if (!kInfinities && magnitude == 0x7f) return std::nan("");
  const double fraction = static_cast<double>(rest) / kMantissa + (exponent > 0 ? 1.0 : 0.0);
  return sign * std::ldexp(fraction, T::kLeastExponent + std::max(exponent, 1) - 1);
}

template <class T>
class Float8 : public ::testing::Test {
 protected:
  /// The finite values that are not negative, by code.
  static std::vector<double> finite() {
    std::vector<double> values;
    for (int code = 0; defined_value<T>(code) <= T::kLargest; ++code) {
      values.push_back(defined_value<T>(code));
    }
    return values;
  }
};
using Formats = ::testing::Types<Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(Float8, Formats);

TYPED_TEST(Float8, EveryCodeWidensExactlyAndNarrowsToItself) {
  for (int code = 0; code < 256; ++code) {
    const TypeParam v{static_cast<std::uint8_t>(code)};
    const double expected = defined_value<TypeParam>(code);
    const float wide = to_float(v);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(wide)) << code;
      EXPECT_EQ(float8_nearest<TypeParam>(wide).bits, kFloat8NaN);
      EXPECT_EQ(float8_stochastic<TypeParam>(wide, 123u).bits, kFloat8NaN);
      continue;
    }
    EXPECT_EQ(wide, expected) << code;
    EXPECT_EQ(std::signbit(wide), code >= 0x80) << code;
    const int narrow = std::isinf(wide) ? code - 1 : code;  // an infinity saturates
    EXPECT_EQ(float8_nearest<TypeParam>(wide).bits, narrow);
    for (std::uint32_t random : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      EXPECT_EQ(float8_stochastic<TypeParam>(wide, random).bits, narrow);
    }
  }
}

TYPED_TEST(Float8, TiesGoToEvenAndTheirNeighboursToTheNearest) {
  const std::vector<double> values = this->finite();
  for (std::size_t code = 0; code + 1 < values.size(); ++code) {
    const auto tie = static_cast<float>((values[code] + values[code + 1]) / 2);  // exact
    for (float sign : {1.0f, -1.0f}) {
      const int bit = sign < 0 ? 0x80 : 0;
      const int even = static_cast<int>(code + code % 2) | bit;
      EXPECT_EQ(float8_nearest<TypeParam>(sign * tie).bits, even);
      EXPECT_EQ(float8_nearest<TypeParam>(sign * std::nextafter(tie, 0.0f)).bits,
                static_cast<int>(code) | bit);
      EXPECT_EQ(float8_nearest<TypeParam>(sign * std::nextafter(tie, INFINITY)).bits,
                static_cast<int>(code + 1) | bit);
    }
  }
}

// Every 4096th float32 and its neighbours: the nearest of all values.
TYPED_TEST(Float8, FloatsOfEveryMagnitudeGoToTheNearest) {
  const std::vector<double> values = this->finite();
  std::size_t below = 0;  // the last value not above v
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += 4095) {
    const float v = std::bit_cast<float>(bits);
    while (below + 1 < values.size() && values[below + 1] <= v) ++below;
    const std::size_t above = std::min(below + 1, values.size() - 1);
    const double to_below = v - values[below], to_above = values[above] - v;
    const std::size_t nearest = to_below < to_above || above == below ? below
                                : to_below > to_above                 ? above
                                                                      : below + below % 2;
    ASSERT_EQ(float8_nearest<TypeParam>(v).bits, nearest) << v;
    ASSERT_EQ(float8_nearest<TypeParam>(-v).bits, nearest | 0x80) << v;
  }
}

TYPED_TEST(Float8, SaturatesAndKeepsNaNAndTheSignOfZero) {
  const std::size_t largest = this->finite().size() - 1;
  for (float v : {std::nextafter(TypeParam::kLargest, INFINITY), TypeParam::kLargest * 1.5f,
                  std::numeric_limits<float>::max(), INFINITY}) {
    EXPECT_EQ(float8_nearest<TypeParam>(v).bits, largest);
    EXPECT_EQ(float8_nearest<TypeParam>(-v).bits, largest | 0x80);
    for (std::uint32_t random : {0u, 0xffffffffu}) {
      EXPECT_EQ(float8_stochastic<TypeParam>(v, random).bits, largest);
      EXPECT_EQ(float8_stochastic<TypeParam>(-v, random).bits, largest | 0x80);
    }
  }
  EXPECT_EQ(float8_nearest<TypeParam>(-0.0f).bits, 0x80);
  EXPECT_EQ(float8_stochastic<TypeParam>(-0.0f, ~0u).bits, 0x80);
  for (float nan : {NAN, -NAN, std::bit_cast<float>(0x7f800001u)}) {
    EXPECT_EQ(float8_nearest<TypeParam>(nan).bits, kFloat8NaN);
  }
}

// Between two neighbours the upper one comes in exactly the share of the random numbers that makes
// the mean right: for a fraction of k / 64, those that lie below k / 64 of their range.
TYPED_TEST(Float8, StochasticRoundingGoesUpInProportion) {
  const std::vector<double> values = this->finite();
  for (std::size_t code = 0; code + 1 < values.size(); ++code) {
    for (int k = 1; k < 64; ++k) {
      const auto v = static_cast<float>(values[code] + (values[code + 1] - values[code]) * k / 64);
      const std::uint32_t threshold = static_cast<std::uint32_t>(k) << 26;
      EXPECT_EQ(float8_stochastic<TypeParam>(v, threshold - 1).bits, code + 1);
      EXPECT_EQ(float8_stochastic<TypeParam>(v, threshold).bits, code);
      EXPECT_EQ(float8_stochastic<TypeParam>(-v, threshold - 1).bits, (code + 1) | 0x80);
    }
  }
}

// Values far below the least subnormal have their share too, rounded to kDrawnBits bits.
TYPED_TEST(Float8, StochasticRoundingOfTinyValues) {
  const auto least = static_cast<float>(this->finite()[1]);
  constexpr int kBits = kDrawnBits<TypeParam>;
  for (int exponent : {1, 7, 15, kBits}) {
    const float v = std::ldexp(least, -exponent);
    const std::uint32_t threshold = 1u << (32 - exponent);
    EXPECT_EQ(float8_stochastic<TypeParam>(v, threshold - 1).bits, 1);
    EXPECT_EQ(float8_stochastic<TypeParam>(v, threshold).bits, 0);
  }
  // 2.5 and 3.5 of the least share: to even.
  const float share = std::ldexp(least, -kBits);
  const std::uint32_t one = 1u << (32 - kBits);
  for (const auto& [v, shares] : {std::pair{2.5f, 2u}, {3.5f, 4u}, {0.5f, 0u}, {0.75f, 1u}}) {
    EXPECT_EQ(float8_stochastic<TypeParam>(v * share, shares * one).bits, 0) << v;
    if (shares == 0) continue;
    EXPECT_EQ(float8_stochastic<TypeParam>(v * share, shares * one - 1).bits, 1) << v;
  }
  EXPECT_EQ(float8_stochastic<TypeParam>(std::numeric_limits<float>::denorm_min(), 0).bits, 0);
}

// All random numbers count: over the multiples of a step, as many go up as should.
TYPED_TEST(Float8, StochasticRoundingUsesEveryDrawnBit) {
  constexpr int kBits = kDrawnBits<TypeParam>;
  const float v = 1.0f + 0x1.5p-12f;  // between 1 and the next, 2^-kMantissaBits above
  const double share = (static_cast<double>(v) - 1) * (1 << TypeParam::kMantissaBits);
  const auto one = static_cast<int>(float8_nearest<TypeParam>(1.0f).bits);
  int ups = 0;
  for (std::uint32_t i = 0; i < 1u << kBits; ++i) {
    ups += float8_stochastic<TypeParam>(v, i << (32 - kBits)).bits - one;
  }
  EXPECT_EQ(ups, share * (1 << kBits));
}

// The mean over n draws of a variable with values a step apart and standard deviation at most half
// a step lies within 6 standard errors, 3 steps / sqrt(n), but once in 5e8 times.
TYPED_TEST(Float8, StochasticRoundingOfPhiloxDrawsIsUnbiased) {
  constexpr int kDraws = 1 << 20;
  const auto step = [](double v) {
    return std::ldexp(
        1.0, std::max(std::ilogb(v), TypeParam::kLeastExponent) - TypeParam::kMantissaBits);
  };
  for (float v : {0.3f, 1.03f, 100.1f, 440.7f, 0.00013f, 0.0123f, 1.7e-5f}) {
    double sum = 0;
    for (int i = 0; i < kDraws; ++i) {
      sum += to_float(float8_stochastic<TypeParam>(v, philox_draw(7, 11, i)));
    }
    EXPECT_NEAR(sum / kDraws, v, 3 * step(v) / std::sqrt(double{kDraws})) << v;
  }
}

// kat_vectors of Random123, the authors' library: philox4x32, 10 rounds.
TEST(Philox, SmallKnownAnswers) {
  struct Known {
    PhiloxWords counter;
    std::uint32_t key[2];
    PhiloxWords words;
  };
  const Known known[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Known& k : known) {
    const PhiloxWords words = philox4x32(k.counter, k.key[0], k.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words.word[i], k.words.word[i]);
  }
}

TEST(Philox, SmallDrawsAreCountedAsDocumented) {
  const std::uint64_t seed = 0x0123456789abcdefu, offset = 0xfedcba9876543210u;
  const std::uint64_t block = (std::uint64_t{5} << 32) + 9;
  const PhiloxWords words =
      philox4x32({{9, 5, 0x76543210u, 0xfedcba98u}}, 0x89abcdefu, 0x01234567u);
  EXPECT_EQ(philox_quad(seed, offset, block).word[3], words.word[3]);
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t word = words.word[i / 4];
    EXPECT_EQ(philox_draw(seed, offset, 16 * block + static_cast<std::uint64_t>(i)),
              std::rotl(word, i % 4 * 8));
  }
}

}  // namespace
}  // namespace mortar
