// SPDX-License-Identifier: Apache-2.0
// The launch plan as a whole: all that there are, the one that is chosen, and its text.
#include "lora/launch_plan.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <numeric>
#include <utility>

#include "lora/launch_choice.h"

namespace mortar::lora {
namespace {

/// Whether an expand kernel can add the split-K partials as it reads them.
bool reads_partials(const ExpandPlan& c) {
  return c.tile_tokens == 16 && c.kernel != ExpandKernel::kBulk;
}

/// Every way of shrink that the device has for a problem, whatever its partials' way.
std::vector<ShrinkPlan> shrink_plans(const LoraShape& s, const Machine& m) {
  std::vector<ShrinkPlan> plans;
  const bool splits = num_leaves(s.hidden) > 1 && partials_fit(s);
  const int most_leaves =
      s.one_type ? static_cast<int>(most_wgmma_leaves(num_leaves(s.hidden))) : kMostLeaves;
  for (int i = 0; i < static_cast<int>(std::size(kWgmmaShapes)) && runs_wgmma(s, m); ++i) {
    const WgmmaShape& shape = kWgmmaShapes[i];
    const bool leaf = shape.share == Share::kLeaf;
    // A narrower CTA that holds all rank rows does less.
    const bool narrower =
        std::any_of(std::begin(kWgmmaShapes), std::end(kWgmmaShapes), [&](const WgmmaShape& other) {
          return other.share == shape.share && other.float_weights == shape.float_weights &&
                 other.tiles <= shape.tiles && other.rows < shape.rows &&
                 other.rows >= s.rank_rows();
        });
    if (narrower || shape.float_weights != s.float_weights) continue;
    for (const int leaves : {1, most_leaves}) {
      if (leaf && (num_leaves(s.hidden) <= 1 || !wgmma_partials_fit(s, leaves))) continue;
      plans.push_back(wgmma_plan(i, leaf ? leaves : 1));
      if (!leaf || most_leaves == 1) break;
    }
  }
  for (int i = 0; i < static_cast<int>(std::size(kWalkShapes)) && runs_walk(s, m); ++i) {
    plans.push_back(walk_plan(i));
  }
  if (!s.one_type) {
    plans.push_back(parts_shrink(s, m));
    if (plans.back().split()) {
      plans.push_back(plans.back());
      plans.back().leaves = plans.back().leaves == 1 ? 2 : 1;
    }
    return plans;
  }
  const auto partials = splits ? Partials::kFinish : Partials::kNone;
  // Tiles of 16 lie along z of shrink's grids.
  const bool few = max_tiles(s.num_tokens, s.num_adapters, 16) <= kMostMmaTiles;
  if (s.aligned_x && partials_fit(s) && few) {
    for (int rows = 16, last = 0; last < s.rank_rows(); rows += rows < 64 ? 16 : rows / 2) {
      last = std::min({rows, decode_most_rows(s, m), round_up(s.rank_rows(), 16)});
      for (const int per_sm : {0, 1}) {
        plans.push_back({ShrinkKernel::kDecode, 0, 16, last, Partials::kFinish, per_sm});
      }
      if (last <= kDenseShrinkMaxRows && leaf_size(s.hidden) < kDecodeK) {
        plans.push_back(plans.back());
        plans.back().per_sm = kDenseShrinkPerSm;
      }
      if (decode_ring_rows(s.hidden, kFewDecodeStages) < last && leaf_size(s.hidden) < kDecodeK) {
        plans.push_back(plans.back());
        plans.back().per_sm = 0;
        plans.back().stages = kFewDecodeStages;
      }
      if (fits_clusters(s, m, last)) {
        plans.push_back({ShrinkKernel::kDecode, 0, 16, last, Partials::kNone, 0});
      }
      if (last < rows) break;
    }
    for (int chunks = 1; takes_chunks(s, m, chunks); chunks *= 2) {
      const int stage_rows = decode_ring_rows(s.hidden, 1) / chunks;
      for (const int tokens : {8, 16}) {
        if (chunks == 1 && tokens == 16) continue;
        plans.push_back({ShrinkKernel::kDecode, 0, 16, stage_rows, Partials::kFinish, 0});
        plans.back().leaves = chunks;
        plans.back().x_tokens = tokens;
      }
    }
  }
  if (runs_stream(s, m)) {
    for (int per_sm = 1; per_sm <= stream_most_per_sm(s, m); ++per_sm) {
      if (stream_most_per_sm(s, m) % per_sm != 0) continue;
      plans.push_back(stream_shrink(s, Partials::kFinish, per_sm));
    }
  }
  for (int i = 0; i < static_cast<int>(std::size(kMmaShapes)); ++i) {
    const MmaShape& shape = kMmaShapes[i];
    if (shape.smem() + kMmaStaticSmem > m.max_smem || (shape.tokens() == 16 && !few)) continue;
    ShrinkPlan c{ShrinkKernel::kMma, i, shape.tokens(), shape.rows(), Partials::kNone, 0};
    plans.push_back(c);
    c.partials = partials;
    if (splits) plans.push_back(c);
  }
  return plans;
}

/// Of a CTA of a candidate, which counts them in 32 bits.
constexpr std::int64_t kMostColumns = 1 << 24;

std::vector<ExpandPlan> expand_plans(const LoraShape& s, const Machine& m) {
  std::vector<ExpandPlan> plans;
  for (int i = 0; i < static_cast<int>(std::size(kWideShapes)) && runs_wide(s, m); ++i) {
    if (kWideShapes[i].float_weights != s.float_weights) continue;
    if (kWideShapes[i].tiles > 1 && !s.aligned_y) continue;
    if (kWideShapes[i].walks && i != kWideKeptShape && !runs_wide_walk(s, m)) continue;
    if (i == kWideStagedShape && !has_room_for_y(s)) continue;
    if (i == kWideWalkPartsShape && h_width(s) > kWideWalkPartsMaxRank) continue;
    if (i == kWideKeptShape) {
      for (int run = 0; run <= kMostKeptRun && runs_kept(s, m); ++run) {
        plans.push_back(kept_expand(run));
      }
      continue;
    }
    if (!rounds_h(s) || i == kWideRoundedShape) plans.push_back(wide_expand(i));
    if (kWideShapes[i].walks && s.b_boxes) {
      plans.push_back(plans.back());
      plans.back().cluster = 2;
    } else if (!kWideShapes[i].walks && takes_boxes(s)) {
      plans.push_back(plans.back());
      plans.back().boxes = true;
    }
  }
  if (!s.one_type) {
    plans.push_back(parts_expand(s, m));
    if (runs_direct_parts(s, m)) plans.push_back(direct_parts_expand(s, m));
    return plans;
  }
  if (h_width(s) <= kExpandPrefillMaxRank && prefill_smem(s) + kPrefillStaticSmem <= m.max_smem) {
    ExpandPlan c = prefill_expand(s, m);
    for (c.log_run = 0; c.log_run <= 3; ++c.log_run) plans.push_back(c);
  }
  if (runs_bulk(s, m)) plans.push_back(bulk_expand(s, m));
  if (runs_direct(s)) {
    const std::int64_t most = std::min(2 * s.max_width(), kMostColumns);
    for (int cols = kDirectCols; cols < most; cols *= 2) {
      for (const int groups : {1, kDirectGroups}) {
        if (groups > 1 && !shares_steps(s, m)) continue;
        for (const int per_sm : {0, 1}) {
          plans.push_back(direct_expand(cols, groups));
          plans.back().per_sm = per_sm;
        }
      }
    }
  }
  ExpandPlan c = decode_expand(s, m);
  const int widest = !s.aligned_y || s.max_rank > kExpandPrefillMaxRank ? 32
                     : s.max_rank <= 16                                 ? 256
                                                                        : 128;
  for (c.block_cols = widest; c.block_cols >= std::max(32, widest / 4); c.block_cols /= 2) {
    int last = 0;
    for (int blocks = 1; blocks < 1024; blocks += std::max(1, blocks / 2)) {
      const auto cols = ceil_div<std::int64_t>(std::min(s.max_width(), kMostColumns), blocks);
      c.cols = round_up(static_cast<int>(std::max<std::int64_t>(cols, 1)), c.block_cols);
      if (c.cols == last) continue;
      last = c.cols;
      if (!decode_ring_fits(s, m, c.cols, c.block_cols)) continue;
      for (const int per_sm : {0, 1, kDenseExpandPerSm}) {
        c.per_sm = per_sm;
        c.stages = decode_stages(s, c, m);
        if (per_sm < kDenseExpandPerSm || runs_dense(s)) plans.push_back(c);
      }
      if (m.arch >= 90 && !s.segments && cols > c.block_cols) {  // and cut by the device
        plans.push_back(c);
        plans.back().per_sm = 0;
        plans.back().stages = decode_stages(s, plans.back(), m);
        plans.back().round = 2 * m.sms;
      }
      if (cols <= c.block_cols) break;
    }
  }
  return plans;
}

}  // namespace

std::vector<LaunchPlan> candidates(const LoraShape& s, const Machine& m) {
  std::vector<ShrinkPlan> shrinks{{}};
  std::vector<ExpandPlan> expands{{}};
  if (s.op != Op::kExpand) shrinks = shrink_plans(s, m);
  if (s.op != Op::kShrink) expands = expand_plans(s, m);
  for (ExpandPlan& c : expands) {
    const bool by_16 = c.kernel == ExpandKernel::kDecode || c.kernel == ExpandKernel::kDirect;
    if (by_16 && max_tiles(s.num_tokens, s.num_adapters, 16) > 65535) c.tile_tokens = 64;
  }
  std::vector<LaunchPlan> plans{choose(s, m)};
  for (int cols = 32; runs_one(s, m, cols); cols *= 2)
    plans.push_back({s, {}, one_expand(cols), 0});
  for (const ShrinkPlan& shrink : shrinks) {
    for (const ExpandPlan& expand : expands) {
      LaunchPlan plan{s, shrink, expand, 0};
      if (plan.shrink.split()) plan.shrink.partials = Partials::kFinish;
      plan.workspace_bytes = workspace_of(plan);
      plans.push_back(plan);
      if (s.op != Op::kApply || !shrink.split() || !reads_partials(expand)) continue;
      plan.shrink.partials = Partials::kExpand;
      plan.workspace_bytes = workspace_of(plan);
      plans.push_back(plan);
      if (!shares_h(s, m, plan.shrink, plan.expand) || expand.per_sm != 0 || expand.round != 0) {
        continue;
      }
      plan.expand.cluster = kExpandCluster;
      plans.push_back(plan);
    }
  }
  return plans;
}

std::int64_t LoraShape::sum_widths() const {
  return std::accumulate(widths.begin(), widths.begin() + num_slices, std::int64_t{0});
}
std::int64_t LoraShape::max_width() const {
  return *std::max_element(widths.begin(), widths.begin() + std::max(num_slices, 1));
}

LaunchPlan choose(const LoraShape& s, const Machine& m) {
  LaunchPlan plan;
  plan.shape = s;
  if (ExpandPlan one; suits_one(s, m, one)) {
    plan.expand = one;
    return plan;  // without a workspace
  }
  if (s.op != Op::kExpand) plan.shrink = choose_shrink(s, m);
  if (s.op != Op::kShrink) plan.expand = choose_expand(s, m);
  if (s.op == Op::kApply) {
    if (!adds_chunks(s, m, plan.shrink, plan.expand) && !reads_partials(plan.expand) &&
        plan.shrink.split()) {
      plan.shrink.partials = Partials::kFinish;
    }
    if (shares_h(s, m, plan.shrink, plan.expand)) {
      plan.expand.cluster = h_cluster(s, m, plan.expand);
    }
    give_room(s, m, plan.shrink, plan.expand);
    plan.expand.round = expand_round(s, m, plan.expand);
  } else if (plan.shrink.split()) {
    plan.shrink.partials = Partials::kFinish;
  }
  plan.workspace_bytes = workspace_of(plan);
  return plan;
}

std::int64_t workspace_of(const LaunchPlan& plan) {
  const LoraShape& s = plan.shape;
  if (s.op == Op::kExpand || plan.one_kernel()) return 0;
  const std::int64_t partials = partial_bytes(s, num_partials(s, plan.shrink));
  const std::int64_t parked = plan.shrink.kernel == ShrinkKernel::kWalk
                                  ? parked_bytes(s, kWalkShapes[plan.shrink.shape])
                                  : 0;
  const bool whole = s.op == Op::kApply && plan.shrink.partials != Partials::kExpand;
  return partials + parked + (whole ? finished_bytes(s) : 0);
}

namespace {

/// Text that grows by formatted parts.
class Line {
 public:
  template <class... Values>
  void add(const char* format, Values... values) {
    char part[160];
    std::snprintf(part, sizeof(part), format, values...);
    text_ += part;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

void add_shape(Line& line, const LoraShape& s) {
  constexpr const char* kOps[] = {"lora_apply", "lora_shrink", "lora_expand"};
  line.add("%s of %lld tokens, %lld adapters, K %lld, ", kOps[static_cast<int>(s.op)],
           static_cast<long long>(s.num_tokens), static_cast<long long>(s.num_adapters),
           static_cast<long long>(s.hidden));
  for (int i = 0; i < s.num_slices; ++i) {
    line.add("%s%lld", i == 0 ? "N " : "+", static_cast<long long>(s.widths[i]));
  }
  line.add(", rank %d%s%s%s%s%s%s%s%s", s.max_rank, s.ragged ? " at most" : "",
           s.one_type ? "" : ", split-bf16", s.float_h ? ", h of float32" : "",
           s.op != Op::kExpand || s.aligned_h ? "" : ", h of any rows",
           s.aligned_x ? "" : ", unaligned x or A", s.aligned_y ? "" : ", unaligned y",
           s.b_by_8 ? ", rows of B by 8 bytes" : "", s.segments ? ", by segments" : "");
}

void add_per_sm(Line& line, int per_sm) {
  if (per_sm > 0) line.add(", %d CTA an SM", per_sm);
}

void add_shrink(Line& line, const ShrinkPlan& c, std::int64_t hidden) {
  constexpr const char* kNames[] = {"decode", "wgmma", "mma", "split-bf16", "wgmma", "decode"};
  constexpr const char* kShares[] = {"all of K a CTA", "half of K a CTA", "a K chunk a CTA"};
  constexpr const char* kPartials[] = {"", ", a kernel adds the split-K partials",
                                       ", expand adds the split-K partials"};
  line.add("; shrink: %s, tiles of %d tokens, %d rank rows", kNames[static_cast<int>(c.kernel)],
           c.tile_tokens, c.rows);
  if (c.kernel == ShrinkKernel::kWgmma) {
    const WgmmaShape& shape = kWgmmaShapes[c.shape];
    line.add(", %d tiles and %s, %d stages", shape.tiles, kShares[static_cast<int>(shape.share)],
             shape.stages);
    if (shape.ahead > 0) line.add(" and %d of float32 rows", shape.ahead);
  }
  if (c.kernel == ShrinkKernel::kWalk) {
    line.add(", 2 tiles, %d stages, persistent CTAs", kWalkShapes[c.shape].stages);
  }
  if (c.kernel == ShrinkKernel::kStream) line.add(", persistent warps");
  if (c.kernel == ShrinkKernel::kDecode && !c.split()) {
    line.add(", clusters of %d CTAs hold all of K", decode_cluster(hidden));
  }
  if (c.kernel == ShrinkKernel::kDecode && c.stages != kDecodeStages) {
    line.add(", %d stages", c.stages);
  }
  if (c.leaves > 1) line.add(", %d K chunks a CTA", c.leaves);
  if (c.x_tokens < 16) line.add(", x of %d tokens at a time", c.x_tokens);
  add_per_sm(line, c.per_sm);
  line.add("%s", kPartials[static_cast<int>(c.partials)]);
}

void add_expand(Line& line, const ExpandPlan& c) {
  constexpr const char* kNames[] = {"decode",     "direct",     "prefill",   "wide",
                                    "split-bf16", "one kernel", "persistent"};
  line.add("; expand: %s, tiles of %d tokens, %d columns", kNames[static_cast<int>(c.kernel)],
           c.tile_tokens, c.cols);
  if (c.kernel == ExpandKernel::kDecode) {
    line.add(" in stages of %d, %d stages", c.block_cols, c.stages);
    if (c.cluster > 1) line.add(", h by clusters of %d CTAs", c.cluster);
    if (c.round > 0) line.add(", or such that %d CTAs share all tiles", c.round);
  }
  if (c.kernel == ExpandKernel::kWide) {
    line.add(", %d tiles, %d stages%s", kWideShapes[c.shape].tiles, kWideShapes[c.shape].stages,
             !kWideShapes[c.shape].walks   ? ""
             : c.shape == kWideKeptShape   ? ", B kept"
             : c.shape == kWideStagedShape ? ", persistent CTAs, y ahead"
                                           : ", persistent CTAs");
    if (c.cluster > 1) line.add(", B shared by %d", c.cluster);
    if (c.boxes) line.add(", boxes of h and B");
  }
  if (c.groups > 1) line.add(", %d groups of them a step", c.groups);
  const bool kept = c.kernel == ExpandKernel::kWide && c.shape == kWideKeptShape;
  if (c.kernel == ExpandKernel::kPrefill || kept) line.add(", runs of %d tiles", 1 << c.log_run);
  add_per_sm(line, c.per_sm);
}

}  // namespace

std::string describe(const LaunchPlan& plan) {
  const LoraShape& s = plan.shape;
  Line line;
  add_shape(line, s);
  if (plan.one_kernel()) {
    line.add("; one kernel: tiles of 16 tokens, clusters of %d CTAs, %d columns a CTA", kOneCluster,
             plan.expand.cols);
    add_per_sm(line, plan.expand.per_sm);
  } else {
    if (s.op != Op::kExpand) add_shrink(line, plan.shrink, s.hidden);
    if (s.op != Op::kShrink) add_expand(line, plan.expand);
  }
  line.add("; workspace %lld bytes", static_cast<long long>(plan.workspace_bytes));
  return line.take();
}

}  // namespace mortar::lora
