// SPDX-License-Identifier: Apache-2.0
// Where lora_apply is one kernel.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

bool runs_one(const LoraShape& s, const Machine& m, int cols) {
  return s.op == Op::kApply && m.arch == 90 && s.one_type && s.aligned_x && s.aligned_y &&
         s.hidden > 0 && s.max_rank > 0 && s.max_rank <= kOneMaxRank && cols % 32 == 0 &&
         cols <= kOneMaxCols && one_smem(s.hidden, cols) + kDecodeStaticSmem <= m.max_smem &&
         max_tiles(s.num_tokens, s.num_adapters, 16) <= 65535;
}

std::int64_t one_ctas(const LoraShape& s, int cols) {
  return max_tiles(s.num_tokens, s.num_adapters, 16) * kOneCluster *
         column_blocks(s, cols * kOneCluster);
}

ExpandPlan one_expand(int cols) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kOne;
  c.cols = cols;
  return c;
}

namespace {

/// Where one kernel was measured to be faster, behind a matrix product: one slice, K that a cluster
/// holds at once and that gives most of its CTAs work, columns of one cluster at most, and few
/// tokens of an adapter, as CTAs send each other sums of all. (us a call, one kernel and two, 4,096
/// to 4,096, rank 16: one token 3.8 and 4.3, 8 tokens of 8 adapters 4.4 and 5.3, 32 of 32 7.1 and
/// 7.6, 64 of 16 6.8 and 7.0; but 16 of one 4.5 and 4.3; 14,336 to 4,096, one token, 5.8 and 4.6;
/// 4,096 to 4,096 + 2 x 1,024, 32 of 32, 18 and 12.)
constexpr std::int64_t kLeastHidden = 2048, kMostHidden = 4096, kMostColumns = 4096;
constexpr std::int64_t kMostTokens = 4, kMostTiles = 32;
constexpr int kLeastRank = 8;

/// Columns of all slices up to which one token is taken so, too, each slice by clusters of its own
/// that make its h. (us on an H100, one kernel and two: one token, qkv, 2.95 and 3.21 back to back,
/// and behind a matrix product 0.6 less; but gate_up, 448 CTAs, 8.7 and 3.4.)
constexpr std::int64_t kMostColumnsOfSlices = 6144;

/// CTAs up to which the columns of few tiles and of more are shared out: clusters take long to
/// start (one token, 4,096 to 4,096: 3.8 us with 32 CTAs, 3.8 to 4.0 with 64, 4.3 with 128), but
/// after some numbers of them the next matrix product of a model takes longer. (What the four calls
/// of a layer of bench/model.py add, us on an H100: one token 25.2 with 32 CTAs, 22.8 with 64, 23.3
/// with 128, of one slice; 8 tokens of 8 adapters 31.0 with 64, 27.4 with 128, 32.2 with 256. A
/// whole step of one token: 4,318 with 64 and 4,332 with 128 on an H200; on another H100 5,640 and
/// 5,606.)
constexpr std::int64_t kFewTiles = 4, kShareCtasOfFew = 64, kShareCtas = 128;

}  // namespace

bool suits_one(const LoraShape& s, const Machine& m, ExpandPlan& c) {
  const std::int64_t adapters = std::min(s.num_tokens, s.num_adapters);
  const bool one_token = s.num_tokens == 1 && s.sum_widths() <= kMostColumnsOfSlices;
  const bool faster = (s.num_slices == 1 || one_token) && s.hidden > kLeastHidden &&
                      s.hidden <= kMostHidden && s.max_width() <= kMostColumns &&
                      s.num_tokens <= kMostTokens * adapters && s.max_rank > kLeastRank &&
                      !s.b_by_8 && max_tiles(s.num_tokens, s.num_adapters, 16) <= kMostTiles;
  if (!faster) return false;
  const bool few = s.num_slices == 1 && max_tiles(s.num_tokens, s.num_adapters, 16) <= kFewTiles;
  const std::int64_t most = few ? kShareCtasOfFew : kShareCtas;
  int cols = 32;
  while (cols < kOneMaxCols && one_ctas(s, cols) > most) cols *= 2;
  c = one_expand(cols);
  return runs_one(s, m, cols);
}

}  // namespace mortar::lora
