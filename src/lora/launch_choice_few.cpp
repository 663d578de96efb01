// SPDX-License-Identifier: Apache-2.0
// What the CTAs of a small batch share: SMs, and the making of h.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

namespace {

/// Bytes of partials of a tile from which on a kernel of its own adds them: every CTA of expand
/// would. (us, that kernel and expand: 113 tokens of one adapter, rank 32, 14,336 to 4,096, 57 KB,
/// 7.8 and 8.5; but 6 of one, rank 64, 16,384 to 2 x 53,248, 49 KB, 12.9 and 11.4.)
constexpr std::int64_t kFinishBytes = 56 << 10;

/// Pieces of four ranks of a token that a CTA of expand has on its way at once, of so many leaves
/// each: HSum in cuda/h_sum.cuh.
constexpr std::int64_t kPieces = 64, kLeaves = 32;

std::int64_t likely_tile(const LoraShape& s) {
  return std::min<std::int64_t>(16, tokens_per_adapter(s));
}
std::int64_t trips(const LoraShape& s) {
  return ceil_div(likely_tile(s) * h_width(s) / 4, kPieces);
}

}  // namespace

bool shares_h(const LoraShape& s, const Machine& m, const ShrinkPlan& shrink,
              const ExpandPlan& expand) {
  constexpr int kLeastRank = 33;  // below, a CTA makes h in two trips
  return s.op == Op::kApply && m.arch == 90 && s.aligned_y && h_width(s) >= kLeastRank &&
         shrink.partials == Partials::kExpand && expand.kernel == ExpandKernel::kDecode;
}

/// A cluster takes 0.3 us longer to start than its CTAs alone, and as a whole: where a CTA would
/// wait for three trips to L2 or four, the clusters run at once, few of their CTAs are without
/// columns, and they do not read the partials too often either. (us on an H100, clusters of four
/// and CTAs alone: 51 tokens of 3 adapters, rank 64, 1,024 to 4,096, 4.3 and 5.6; 41 of 4, ranks up
/// to 64, 2,048 to 2,048 + 2 x 512, 5.0 and 6.4; but 113 of one, rank 32, 3,584 to 3,584 + 2 x 512,
/// 7.9 and 7.2; 74 of 16, rank 128, 3,584 to 2 x 18,944, 90 and 72. And a kernel that adds them: 31
/// of one, rank 64, 14,336 to 4,096, 5.9 and 6.7; but 52 of one, rank 64, 16,384 to 16,384, 9.7 and
/// 9.1. Clusters of eight: 5.0 where four take 5.0, but 24 where they take 20, 142 of 3, rank 64,
/// 8,192 to 10,240.)
int h_cluster(const LoraShape& s, const Machine& m, const ExpandPlan& c) {
  constexpr std::int64_t kMostReads = 6 << 20;
  constexpr int kAlone = 2;
  if (s.op != Op::kApply || m.arch != 90 || c.kernel != ExpandKernel::kDecode || !s.aligned_y ||
      num_leaves(s.hidden) > kLeaves || trips(s) <= kAlone || trips(s) > kExpandCluster) {
    return 1;
  }
  std::int64_t blocks = 0;
  for (int i = 0; i < s.num_slices; ++i) {
    blocks += round_up<std::int64_t>(ceil_div<std::int64_t>(s.widths[i], c.cols), kExpandCluster);
  }
  const bool fits = max_tiles(s.num_tokens, s.num_adapters, 16) * blocks <= 2 * m.sms &&
                    8 * blocks <= 9 * column_blocks(s, c.cols);
  return fits && partial_bytes(s) / s.num_slices * blocks <= kExpandCluster * kMostReads
             ? kExpandCluster
             : 1;
}

/// (us on an H100, above rank 128, expand and a kernel of its own: 7 tokens of 23 adapters, rank
/// 256, 1,024 to 512 + 2 x 256, 6.2 and 8.9; 2 of 336, rank 256, 3,072 to 1,024, 4.4 and 5.1; but 2
/// of 19, rank 512, 3,072 to 1,024, 7.8 and 6.8.)
Partials tile_partials(const LoraShape& s, const Machine& m) {
  const ExpandPlan expand = choose_expand(s, m);
  if (h_cluster(s, m, expand) > 1) return Partials::kExpand;
  const std::int64_t bytes = likely_tile(s) * num_leaves(s.hidden) * h_width(s) * 4;
  const bool high = s.max_rank > kExpandPrefillMaxRank && (m.arch != 90 || trips(s) > 1);
  return high || bytes >= kFinishBytes ? Partials::kFinish : Partials::kExpand;
}

/// Gives the CTAs of a small batch an SM each. CTAs of later calls, which start early, then prepare
/// themselves on other SMs: beside them a CTA has to wait for its turn in everything. Expand takes
/// whole SMs where those of two calls fit the chip; shrink where both kernels of a call do, as what
/// does not fit starts late. (32 tokens of one adapter, us: qkv 3.4 against 3.8, gate_up 4.6
/// against 4.9, down 3.5 against 4.1; where shrink does not fit, four tokens of four adapters,
/// qkv, 4.5 against 3.5; where expand does not, 32 tokens of one adapter, gate_up, 7.6
/// against 4.9.)
void give_room(const LoraShape& s, const Machine& m, ShrinkPlan& shrink, ExpandPlan& expand) {
  const bool decodes =
      expand.kernel == ExpandKernel::kDecode || expand.kernel == ExpandKernel::kDirect;
  if (shrink.partials != Partials::kExpand || !decodes) return;
  constexpr std::int64_t kShrinkPerSm = 4;  // as many as fit
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const std::int64_t shrink_ctas =
      tiles * ceil_div<std::int64_t>(s.hidden, kDecodeK) * ceil_div(s.rank_rows(), shrink.rows);
  const std::int64_t expand_ctas = tiles * ceil_div<std::int64_t>(s.sum_widths(), expand.cols);
  if (2 * expand_ctas <= m.sms && expand_ctas + shrink_ctas / kShrinkPerSm <= m.sms) {
    expand.per_sm = 1;
  }
  const std::int64_t expand_sms =
      expand.per_sm == 1 ? expand_ctas : ceil_div(expand_ctas, kExpandPerSm);
  const bool decode = shrink.kernel == ShrinkKernel::kDecode;
  if (decode && shrink_ctas + expand_sms <= m.sms) shrink.per_sm = 1;
}

}  // namespace mortar::lora
