// SPDX-License-Identifier: Apache-2.0
// What must not change a bit: running again, other tokens in the batch, a token's place in it, the
// number of threads, the form of groups and weights. And what must not spread: NaN and Inf.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lora_expect.h"

namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

struct Types {
  const char* name;
  DType x, w, y;
};
const Types kTypes[] = {{"F32", kF32, kF32, kF32},     {"BF16", kBF16, kBF16, kBF16},
                        {"F16", kF16, kF16, kF16},     {"BF16WF32", kBF16, kF32, kBF16},
                        {"F16WF32", kF16, kF32, kF16}, {"BF16YF32", kBF16, kBF16, kF32}};
void PrintTo(const Types& t, std::ostream* out) { *out << t.name; }

using Row = std::vector<std::uint8_t>;

class LoraInvariance : public ::testing::TestWithParam<std::tuple<LoraTarget, Types>> {
 protected:
  LoraCase small_case() const {
    const Types& types = std::get<1>(GetParam());
    LoraCase c;
    c.name = types.name;
    c.x = types.x;
    c.w = types.w;
    c.y = types.y;
    c.tokens = 24;
    c.hidden = 264;
    c.widths = {96, 40};
    c.adapters = 4;
    c.ranks = {16, 8, 24, 5};
    return c;
  }
  Device device() const { return std::get<0>(GetParam()).device; }

  /// Bytes of row t of y.
  static Row row_of(const GuardedTensor& y, std::int64_t t) {
    const Tensor view = y.host();
    const std::int64_t size = dtype_size(view.dtype);
    const auto* p = y.data<std::uint8_t>() + t * view.strides[0] * size;
    return Row(p, p + view.shape[1] * size);
  }

  /// A batch whose token i has the rows of x and y, and the adapter, of token source[i] of `from`.
  static std::vector<Row> run_subset(const LoraOperands& from, std::vector<std::int64_t> source,
                                     const GuardedTensor& original_y) {
    LoraCase c = from.c;
    c.tokens = static_cast<std::int64_t>(source.size());
    LoraOperands op(c, from.device);
    std::vector<std::int32_t> map(source.size());
    copy_rows(from.x, source, op.x);
    copy_rows(original_y, source, op.y);
    for (std::size_t i = 0; i < source.size(); ++i) map[i] = from.map[source[i]];
    op.set_map(map);
    run_apply(op);
    op.y.download();
    std::vector<Row> rows;
    for (std::size_t i = 0; i < source.size(); ++i) rows.push_back(row_of(op.y, i));
    return rows;
  }

  /// Rows of y after shrink and expand, and after lora_apply, with tokens grouped by segments or by
  /// a plan.
  std::vector<Row> rows_by_groups(LoraCase c, bool segments) const {
    c.segments = segments;
    LoraOperands op(c, device());
    const GuardedTensor original = op.y;
    GuardedTensor h = make_hidden(op, kF32, 0);
    lora_shrink(op.x.view(), op.weights(), op.groups(), h.view(), c.scale, {},
                op.shrink_workspace().view(), Stream{});
    lora_expand(h.view(), op.weights(), op.groups(), op.y.view(), 0, true, Stream{});
    std::vector<Row> rows;
    const auto take_rows = [&] {
      op.y.download();
      for (std::int64_t t = 0; t < c.tokens; ++t) rows.push_back(row_of(op.y, t));
    };
    take_rows();
    restore_y(op, original);
    run_apply(op);
    take_rows();
    return rows;
  }

  static void copy_rows(const GuardedTensor& from, const std::vector<std::int64_t>& source,
                        GuardedTensor& to) {
    const Tensor a = from.host(), b = to.host();
    for (std::size_t i = 0; i < source.size(); ++i) {
      for (std::int64_t n = 0; n < b.shape[1]; ++n) {
        to.set(i * b.strides[0] + n, from.get(source[i] * a.strides[0] + n));
      }
    }
    to.upload();
  }

  const UseTarget use_{std::get<0>(GetParam())};
};

TEST_P(LoraInvariance, SmallRepeatsAThousandTimes) {
  LoraOperands op(small_case(), device());
  const GuardedTensor original = op.y;
  const Tensor from = original.host();
  const std::int64_t bytes = from.numel() * dtype_size(from.dtype);
  GuardedTensor workspace = op.apply_workspace();
  Row first(bytes), again(bytes);
  for (int i = 0; i < 1000; ++i) {
    copy_to_device(op.y.view().data, from.data, bytes, device());
    lora_apply(op.x.view(), op.weights(), op.groups(), op.y.view(), 0, 1.0f, true, workspace.view(),
               Stream{});
    copy_to_host(again.data(), op.y.view().data, bytes, device());
    if (i == 0) first = again;
    ASSERT_EQ(first, again) << "run " << i;
  }
}

TEST_P(LoraInvariance, SmallPermutedBatchGivesPermutedRows) {
  LoraOperands op(small_case(), device());
  const GuardedTensor original = op.y;
  std::vector<std::int64_t> order(op.c.tokens);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<Row> plain = run_subset(op, order, original);
  std::mt19937 rng(3);
  for (int i = 0; i < 5; ++i) {
    std::shuffle(order.begin(), order.end(), rng);
    const std::vector<Row> rows = run_subset(op, order, original);
    for (std::size_t t = 0; t < order.size(); ++t) EXPECT_EQ(rows[t], plain[order[t]]);
  }
}

/// Every way in which a GPU makes h (src/lora/config.h) against decode: sizes around both lengths
/// of leaves and halves of K of unequal length, ranks around those at which the kernels change.
TEST_P(LoraInvariance, TokenAloneAmongFewAndAmongThousands) {
  struct Batch {
    const char* what;
    std::int64_t tokens, hidden;
    std::vector<std::int64_t> widths;
    std::vector<int> ranks;
    int adapters = 3;
  };
  const Batch batches[] = {
      {"a leaf per CTA", 2000, 1040, {96, 40}, {16, 8, 24}},
      {"a leaf per CTA, long leaves", 300, 4616, {96, 40}, {16, 8, 24}},
      {"a leaf per CTA, 16 rank rows", 700, 1040, {96}, {16, 8, 3}},
      {"a leaf per CTA, 16 rank rows, long leaves", 300, 4616, {96}, {16, 8, 3}},
      {"half of K per CTA", 2200, 776, {96, 40}, {128, 5, 64}},
      {"half of K per CTA, one tile, 48 rank rows", 500, 2824, {24, 8}, {96, 5, 64}},
      {"half of K per CTA, one tile, 96 rank rows", 2400, 1544, {24, 8}, {48, 5, 16}},
      {"tiles of 16, of many adapters", 600, 1040, {96, 40}, {16, 8, 24}, 40},
      {"tiles of 64, few of them", 200, 1040, {96, 40}, {96}, 1},
      {"a kernel adds slabs for decode", 70, 4616, {96, 40}, {96, 5}, 2},
      {"all of K per CTA, h in pieces", 2900, 520, {8, 8, 8, 8, 8, 8, 8, 8}, {128, 5, 64}},
      {"ranks above 128", 300, 520, {96, 40}, {200, 129, 40}},
  };
  for (const Batch& b : batches) {
    SCOPED_TRACE(b.what);
    LoraCase c = small_case();
    c.tokens = b.tokens;
    c.hidden = b.hidden;
    c.widths = b.widths;
    c.ranks = b.ranks;
    c.adapters = b.adapters;
    LoraOperands op(c, device());
    const GuardedTensor original = op.y;
    std::vector<std::int64_t> all(c.tokens);
    std::iota(all.begin(), all.end(), 0);
    const std::vector<Row> prefill = run_subset(op, all, original);
    for (std::int64_t first : {std::int64_t{0}, c.tokens / 3, c.tokens - 16}) {
      std::vector<std::int64_t> few(16);
      std::iota(few.begin(), few.end(), first);
      const std::vector<Row> batch = run_subset(op, few, original);
      for (int i = 0; i < 16; ++i) EXPECT_TRUE(batch[i] == prefill[first + i]) << first + i;
      for (int i : {0, 5}) {
        EXPECT_TRUE(run_subset(op, {first + i}, original)[0] == prefill[first + i]) << first + i;
      }
    }
  }
}

TEST_P(LoraInvariance, SmallPlanAndSegmentsGiveTheSameBits) {
  // Decode, prefill, and decode of more tokens.
  for (const auto& [tokens, adapters] : {std::pair(37, 4), std::pair(300, 4), std::pair(300, 40)}) {
    LoraCase c = small_case();
    c.tokens = tokens;
    c.adapters = adapters;
    EXPECT_EQ(rows_by_groups(c, false), rows_by_groups(c, true))
        << tokens << " tokens, " << adapters << " adapters";
  }
}

/// Enough tokens of enough adapters that shrink takes three tiles at a time (choose_shape in
/// shrink_wgmma.cu): most adapters have two such runs and a part of one.
TEST_P(LoraInvariance, PlanAndSegmentsOfLongRunsGiveTheSameBits) {
  LoraCase c = small_case();
  c.tokens = 8192;
  c.hidden = 520;
  c.widths = {32, 16, 8};
  c.adapters = 16;
  c.ranks = {16};
  EXPECT_TRUE(rows_by_groups(c, false) == rows_by_groups(c, true));
}

/// The same numbers behind other strides and addresses.
TEST_P(LoraInvariance, SmallAlignmentDoesNotMatter) {
  std::vector<Row> rows[2];
  for (bool strided : {false, true}) {
    LoraCase c = small_case();
    c.strided = strided;
    LoraOperands op(c, device());
    LoraOperands plain(small_case(), device());
    std::vector<std::int64_t> order(c.tokens);
    std::iota(order.begin(), order.end(), 0);
    copy_rows(plain.x, order, op.x);
    const Tensor from = plain.y.host(), to = op.y.host();
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (std::int64_t n = 0; n < from.shape[1]; ++n) {
        op.y.set(t * to.strides[0] + n, plain.y.get(t * from.strides[0] + n));
      }
    }
    op.y.upload();
    op.set_map(plain.map);
    lora_apply(op.x.view(), plain.weights(), op.groups(), op.y.view(), 0, 1.0f, true,
               op.apply_workspace().view(), Stream{});
    op.y.download();
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      Row row = row_of(op.y, t);
      row.resize(from.shape[1] * dtype_size(c.y));
      rows[strided].push_back(row);
    }
  }
  EXPECT_EQ(rows[0], rows[1]);
}

TEST_P(LoraInvariance, SmallNanAndInfStayInTheirRow) {
  LoraCase c = small_case();
  c.map = Map::kDistinct;
  LoraOperands clean(c, device());
  run_apply(clean);
  clean.y.download();
  LoraOperands dirty(c, device());
  const Tensor x = dirty.x.host();
  dirty.x.set(3 * x.strides[0] + 17, std::numeric_limits<float>::quiet_NaN());
  dirty.x.set(11 * x.strides[0] + c.hidden - 1, std::numeric_limits<float>::infinity());
  dirty.x.upload();
  run_apply(dirty);
  dirty.y.download();
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    if (t != 3 && t != 11) {
      EXPECT_EQ(row_of(clean.y, t), row_of(dirty.y, t)) << "token " << t;
      continue;
    }
    const Tensor y = dirty.y.host();
    for (std::int64_t n = 0; n < y.shape[1]; ++n) {
      EXPECT_FALSE(std::isfinite(dirty.y.get(t * y.strides[0] + n))) << t << ", " << n;
    }
  }
}

/// Inf times a value is Inf, also where kernels multiply parts of values, of which some are zero.
TEST_P(LoraInvariance, SmallInfStaysInf) {
  LoraCase c = small_case();
  c.map = Map::kDistinct;
  LoraOperands op(c, device());
  const Tensor x = op.x.host();
  op.x.set(3 * x.strides[0] + 17, -std::numeric_limits<float>::infinity());
  op.x.upload();
  const auto expected = lora::reference_shrink(op.x.host(), op.host_weights(), op.map, 1.0);
  GuardedTensor h = make_hidden(op, kF32, 0);
  lora_shrink(op.x.view(), op.weights(), op.groups(), h.view(), 1.0f, {},
              op.shrink_workspace().view(), Stream{});
  h.download();
  const Tensor view = h.host();
  int checked = 0;
  for (int s = 0; s < op.slices(); ++s) {
    for (int r = 0; r < expected.width; ++r) {
      const double want = expected.at(s, 3, r).value;
      if (!std::isinf(want)) continue;
      EXPECT_EQ(h.get(s * view.strides[0] + 3 * view.strides[1] + r), want) << s << ", " << r;
      ++checked;
    }
  }
  EXPECT_GT(checked, 0);
}

TEST_P(LoraInvariance, SmallNanInABaseTokenIsNotRead) {
  LoraCase c = small_case();
  LoraOperands op(c, device());
  std::vector<std::int32_t> map = op.map;
  map[2] = map[9] = -1;
  op.set_map(map);
  const Tensor x = op.x.host();
  for (std::int64_t k = 0; k < c.hidden; ++k) {
    op.x.set(2 * x.strides[0] + k, std::numeric_limits<float>::quiet_NaN());
    op.x.set(9 * x.strides[0] + k, std::numeric_limits<float>::infinity());
  }
  op.x.upload();
  expect_apply_matches(op);
}

TEST_P(LoraInvariance, ThreadCountDoesNotMatter) {
  LoraCase c = small_case();
  c.tokens = 300;
  c.hidden = 2056;
  c.widths = {512, 200};
  std::vector<Row> rows[3];
  const int threads = omp_get_max_threads();
  for (int n : {1, 2, 3}) {
    omp_set_num_threads(n);
    LoraOperands op(c, device());
    run_apply(op);
    op.y.download();
    for (std::int64_t t = 0; t < c.tokens; ++t) rows[n - 1].push_back(row_of(op.y, t));
  }
  omp_set_num_threads(threads);
  EXPECT_EQ(rows[0], rows[1]);
  EXPECT_EQ(rows[0], rows[2]);
}

std::string case_name(const ::testing::TestParamInfo<std::tuple<LoraTarget, Types>>& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Targets, LoraInvariance,
                         ::testing::Combine(::testing::ValuesIn(lora_targets()),
                                            ::testing::ValuesIn(kTypes)),
                         case_name);

}  // namespace
}  // namespace mortar::testing
