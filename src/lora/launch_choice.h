// SPDX-License-Identifier: Apache-2.0
// The choices of a launch plan, kernel by kernel: what choose() and candidates() are made of.
#pragma once

#include "lora/launch_plan.h"

namespace mortar::lora {

inline constexpr int kPrefillStaticSmem = 9 * 1024;  ///< of the prefill expand: steps and segments
inline constexpr int kMmaStaticSmem = 8 * 1024;      ///< of shrink_mma.cu: rank rows
inline constexpr std::int64_t kExpandPerSm = 3;      ///< CTAs of the decode expand that fit an SM
inline constexpr int kExpandCluster = 4;             ///< CTAs of it that make h together

/// Up to here tiles have 16 tokens, as a rule: the loads of weights are the work.
inline constexpr std::int64_t kSmallTileTokens = 256;

/// Tiles of 16 start sooner and waste less of a tile on few tokens of an adapter; tiles of 64 read
/// weights less often.
int best_tile_tokens(const LoraShape& s);
/// Whether of few tokens tiles of 64 read so much less of the weights that they pay.
bool saves_reads(const LoraShape& s);
/// Adapters that can have tokens, at least one.
std::int64_t used_adapters(const LoraShape& s);
/// Tokens of an adapter if all of those loaded have as many.
std::int64_t tokens_per_adapter(const LoraShape& s);
/// Tokens of a tile of 16 then.
std::int64_t likely_tile(const LoraShape& s);
/// Tiles of 16 tokens where tokens are shared out evenly.
std::int64_t even_tiles(const LoraShape& s);
/// Tiles of 16 tokens that are likely: those of even shares, and a third of those that there may be
/// beyond, about as many as Zipf's law makes of few adapters.
std::int64_t expected_tiles(const LoraShape& s);
/// Whether adapters are so few that the tiles there may be are nearly those that there are.
bool knows_tiles(const LoraShape& s);
/// Gives the decode expand of ranks up to 16 the fewest columns a CTA then with which all run at
/// once, at most five on two SMs.
void fit_round(const LoraShape& s, const Machine& m, ExpandPlan& c);
/// Gives that of more adapters, ranks up to 64, fewer columns a CTA where all still run at once.
void fit_many(const LoraShape& s, const Machine& m, ExpandPlan& c);
/// Columns per CTA, close to `cols`, that cut the widest slice into blocks of equal width, so that
/// the last CTA does not get a narrow remainder. The number of blocks is max_width / cols, rounded
/// up where its fraction is 0.4 or more. The result is a multiple of `multiple`.
int even_cols(const LoraShape& s, std::int64_t cols, int multiple);
/// Blocks of so many columns of all slices.
std::int64_t column_blocks(const LoraShape& s, int cols);

/// Shared memory of a CTA of the prefill expand beside that.
int prefill_smem(const LoraShape& s);
/// Whether the ring of the decode expand's blocks of B fits a CTA's shared memory; ranks of 65 to
/// 128 alone have such that might not.
bool decode_ring_fits(const LoraShape& s, const Machine& m, std::int64_t cols, int block_cols,
                      int stages = kDecodeExpandStages);
/// Whether the decode expand in fewer registers takes such a problem.
bool runs_dense(const LoraShape& s);
/// Ranks up to which B goes straight into fragments faster than through shared memory: of rank 16
/// its rows are one sector of memory each, and loads of 64 bytes in a row then limit it. (us,
/// direct and decode: 512 tokens of 256 adapters, gate_up, rank 16, 133 and 100; 32 of 32 17.6 and
/// 15.9; but 126 of one, 3,584 to 2 x 18,944, 10.0 and 12.2; ranks 4 and 8 in the README.)
inline constexpr int kDirectRank = 8;
/// Whether the expand that loads B into fragments takes such a problem.
bool runs_direct(const LoraShape& s);
/// The same of float32 weights.
bool runs_direct_parts(const LoraShape& s, const Machine& m);
bool suits_direct_parts(const LoraShape& s, const Machine& m);
ExpandPlan direct_parts_expand(const LoraShape& s, const Machine& m);
/// Whether the wide expand can run: it reads aligned rows of h, and of float32 weights it writes
/// aligned y alone.
bool runs_wide(const LoraShape& s, const Machine& m);
/// Whether the persistent one can: of lora_apply's own h, aligned y and a plan.
bool runs_wide_walk(const LoraShape& s, const Machine& m);
/// Whether it has room for y of steps ahead.
bool has_room_for_y(const LoraShape& s);
/// Its plan.
ExpandPlan wide_walk(const LoraShape& s);
/// Whether the tensor copy engine can bring h and B to the wide kernel of a step a CTA.
bool takes_boxes(const LoraShape& s);
/// That kernel in a shape, with boxes where they are faster, and in the shape for high ranks.
ExpandPlan step_expand(const LoraShape& s, const Machine& m, int shape);
ExpandPlan step_expand(const LoraShape& s, const Machine& m);
/// Whether expand rounds an h of float32 as it reads it.
bool rounds_h(const LoraShape& s);
/// Rank rows that a CTA of the decode shrink may take: a ring of 128 rows, which leaves of 512
/// elements have, is more than some devices hold.
int decode_most_rows(const LoraShape& s, const Machine& m);
/// Whether clusters of the decode shrink can hold all of K, with so many rank rows a CTA, and all
/// of them run at once: lora_shrink is then one launch. (Clusters of eight leave up to 20 of 132
/// SMs idle.)
bool fits_clusters(const LoraShape& s, const Machine& m, int rows);
/// Blocks of B in the ring of the decode expand: of ranks over 128 fewer, and two where the device
/// has no room for three.
int decode_stages(const LoraShape& s, const ExpandPlan& c, const Machine& m);

ExpandPlan prefill_expand(const LoraShape& s, const Machine& m);
/// Tokens of an adapter that it pays for more than.
std::int64_t prefill_tokens(const LoraShape& s);
bool suits_prefill(const LoraShape& s, const Machine& m);
/// Whether shapes of shrink_wgmma.cu can: x of 16 bits, weights of its type or of float32.
bool runs_wgmma(const LoraShape& s, const Machine& m);
/// Runs of so many tiles of 64 tokens. The host does not know how tokens are shared out: it takes
/// all adapters to be there and the last run of each to be half full.
double likely_runs(const LoraShape& s, int tiles);
/// K chunks that a CTA of it takes one after the other, of float32 weights, at most.
inline constexpr int kMostLeaves = 8;
/// It in a shape, of K chunks with so many a CTA.
ShrinkPlan wgmma_plan(int shape, int leaves);
/// The shape of it that takes one 16-bit type the fewest clocks.
ShrinkPlan wgmma_shrink(const LoraShape& s, const Machine& m);
/// The shape of one K chunk a CTA, and where it leaves partials sooner than the decode kernel does.
ShrinkPlan leaf_shrink(const LoraShape& s, const Machine& m, Partials partials);
bool suits_leaves(const LoraShape& s, const Machine& m);
/// The clocks of the busiest SM with one of these, of one 16-bit type.
double wgmma_clocks(const LoraShape& s, const Machine& m, const ShrinkPlan& c);
/// Tiles of 16 tokens on mma.sync, all of K a CTA, and the clocks with a shape of that kernel.
ShrinkPlan mma_shrink(const LoraShape& s);
double mma_clocks(const LoraShape& s, const Machine& m, int shape);
/// Tiles of them at most, along z of the grid; and whether they are faster than tiles of 64 of one
/// of the wgmma shapes.
inline constexpr std::int64_t kMostMmaTiles = 32768;
bool suits_mma(const LoraShape& s, const Machine& m, const ShrinkPlan& mma,
               const ShrinkPlan& wgmma);
/// What suits many tokens of an adapter where wgmma runs.
ShrinkPlan sm90_shrink(const LoraShape& s, const Machine& m);
/// Whether persistent CTAs of shrink can: of lora_apply, a plan and boxes of stacked A.
bool runs_walk(const LoraShape& s, const Machine& m);
/// They in a shape, and whether that is faster than `c`, which it then becomes.
ShrinkPlan walk_plan(int shape);
bool suits_walk(const LoraShape& s, const Machine& m, ShrinkPlan& c);
/// That, or tiles of 16 tokens of which a CTA sums all of K.
ShrinkPlan walking_shrink(const LoraShape& s, const Machine& m);
ExpandPlan wide_expand(int shape);
/// Whether it is faster than those for lower ranks, and whether the persistent one is.
bool suits_wide(const LoraShape& s, const Machine& m);
/// Whether all CTAs of ranks 65 to 128 run at once in one of these or in the prefill kernel, and
/// then how.
bool suits_round(const LoraShape& s, const Machine& m, ExpandPlan& c);
bool suits_wide_walk(const LoraShape& s, const Machine& m);
ExpandPlan decode_expand(const LoraShape& s, const Machine& m);
/// With so many columns a CTA, and groups of them that share an MMA step.
ExpandPlan direct_expand(int cols, int groups);
/// Whether groups of columns can share a step: in any order, as on sm_90.
bool shares_steps(const LoraShape& s, const Machine& m);
/// With columns that suit it, and where it is faster.
ExpandPlan choose_direct(const LoraShape& s, const Machine& m);
bool suits_direct(const LoraShape& s);
/// Whether persistent CTAs of low ranks can: of lora_apply, a plan, and B that the copy engine
/// takes.
bool runs_bulk(const LoraShape& s, const Machine& m);
ExpandPlan bulk_expand(const LoraShape& s, const Machine& m);
/// The shrink of tiles of 16 that leaves partials, where these suit.
ShrinkPlan decode_shrink(const LoraShape& s, const Machine& m);
/// Whether they are faster, and the shrink before them.
bool suits_bulk(const LoraShape& s, const Machine& m);
ShrinkPlan shrink_before_bulk(const LoraShape& s, const Machine& m);
ExpandPlan parts_expand(const LoraShape& s, const Machine& m);
/// The one that keeps B, with runs of 2^log_run tiles, and where it can.
ExpandPlan kept_expand(int log_run);
bool runs_kept(const LoraShape& s, const Machine& m);
ShrinkPlan parts_shrink(const LoraShape& s, const Machine& m);
/// Whether tiles of 16 pay for float32 weights where those of 64 would be half full, too: their
/// kernels start sooner than those on wgmma. (us on an H200, tiles of 64 and of 16: 1,262 tokens of
/// 26 adapters, rank 16, 3,072 to 1,024, 19.4 and 12.7; 4,641 of 168, rank 8, 2,048 to 2,048, 54
/// and 48; 2,347 of 84, rank 4, 4,096 to 16,384, 138 and 126; but 1,934 of 67, rank 32, 5,120 to 3
/// x 1,280, 108 and 186; without partials 839 of 24, rank 16, 53,248 to 16,384, 163 and 452.)
bool light_parts(const LoraShape& s);

/// Of mixtures of dtypes, and of float32 throughout.
ShrinkPlan choose_parts_shrink(const LoraShape& s, const Machine& m);
ExpandPlan choose_parts_expand(const LoraShape& s, const Machine& m);

/// Whether the one kernel of lora_apply can, with so many columns a CTA: all of K fits its shared
/// memory.
bool runs_one(const LoraShape& s, const Machine& m, int cols);
ExpandPlan one_expand(int cols);
/// Whether it is faster than two, and then how.
bool suits_one(const LoraShape& s, const Machine& m, ExpandPlan& c);

/// Whether persistent warps of shrink can: of aligned x and A, and a plan of not too many tiles.
bool runs_stream(const LoraShape& s, const Machine& m);
/// They, in so many CTAs an SM; such as suit, and the most that leave no warp of an SM out.
ShrinkPlan stream_shrink(const LoraShape& s, Partials partials, int per_sm);
int stream_per_sm(const LoraShape& s, const Machine& m);
int stream_most_per_sm(const LoraShape& s, const Machine& m);
/// Whether they are faster than the CTAs of the decode shrink `c`.
bool suits_stream(const LoraShape& s, const Machine& m, const ShrinkPlan& c);
/// Whether they pay where partials of the largest rank would not be light, but those of adapters'
/// own ranks, half of it on average, are.
bool streams_own_ranks(const LoraShape& s, const Machine& m);

/// Of any.
ShrinkPlan choose_shrink(const LoraShape& s, const Machine& m);
ExpandPlan choose_expand(const LoraShape& s, const Machine& m);
/// Whether CTAs of expand may make h together, a cluster for all of its CTAs.
bool shares_h(const LoraShape& s, const Machine& m, const ShrinkPlan& shrink,
              const ExpandPlan& expand);
/// CTAs of such a cluster, where clusters are faster; otherwise 1.
int h_cluster(const LoraShape& s, const Machine& m, const ExpandPlan& c);
/// CTAs of the decode shrink that leaves partials, with so many rank rows and K chunks each.
std::int64_t decode_shrink_ctas(const LoraShape& s, int rows, int chunks);
/// Whether all of them find an SM of their own beside expand's.
bool shrink_fits(const LoraShape& s, const Machine& m, int rows, int chunks, const ExpandPlan& c);
/// Whether the chip has registers for all CTAs of both kernels, where shrink takes long K chunks.
bool both_fit(const LoraShape& s, const Machine& m, int rows, int chunks, const ExpandPlan& c);
/// Whether an SM has room for a CTA of so many K chunks, and how many of low ranks are to take.
bool takes_chunks(const LoraShape& s, const Machine& m, int chunks);
void take_chunks(const LoraShape& s, const Machine& m, const ExpandPlan& expand, ShrinkPlan& c);
/// Chunks that such a CTA takes at least where there are rounds of them.
int chunks_of_cta(const LoraShape& s, const Machine& m);
/// Who adds the partials of tiles of 16 tokens.
Partials tile_partials(const LoraShape& s, const Machine& m, const ExpandPlan& expand);
/// The fewest rank rows of a CTA of the decode shrink with which its CTAs find an SM each beside
/// expand's; 0: none do.
int room_rows(const LoraShape& s, const Machine& m, const ExpandPlan& expand);
/// Rank rows of a CTA of it elsewhere, of so many CTAs a tile if each took all of them.
int shared_rows(const LoraShape& s, const Machine& m, std::int64_t ctas_per_tile);
/// More of them, where the CTAs of `rows` do not find an SM each beside expand's, but those of as
/// many as a CTA multiplies at once do; otherwise `rows`.
int own_sm_rows(const LoraShape& s, const Machine& m, int rows, const ExpandPlan& expand);
/// Whether CTAs of so many are more than two rounds, of ranks 65 to 128 and some tokens of an
/// adapter: wgmma is faster, though its tiles of 64 are mostly empty.
bool suits_wgmma_of_few(const LoraShape& s, const Machine& m, int rows);
/// Leaves of which the decode expand has the partials of a piece of h on their way at once.
inline constexpr std::int64_t kLeavesAtOnce = 32;
/// Whether the decode expand could add the partials of chunks of K, and so has no kernel for that.
bool may_add_chunks(const LoraShape& s, const Machine& m);
/// Whether the decode expand adds the partials of the wgmma shrink's chunks, two kernels in place
/// of three, and then how.
bool adds_chunks(const LoraShape& s, const Machine& m, ShrinkPlan& shrink, ExpandPlan& expand);
/// Of ranks above 32, aligned y and so many likely tiles: CTAs of the decode expand in fewer
/// registers, four an SM, where they have long to stream, and their columns.
void share_round(const LoraShape& s, const Machine& m, std::int64_t likely, ExpandPlan& c);
/// CTAs of the decode expand that run at once, where the device is to cut columns by the tiles that
/// there are; otherwise 0.
int expand_round(const LoraShape& s, const Machine& m, const ExpandPlan& c);
/// CTAs of the decode expand that share an SM.
std::int64_t decode_expand_per_sm(const LoraShape& s, const Machine& m, const ExpandPlan& c);
void give_room(const LoraShape& s, const Machine& m, ShrinkPlan& shrink, ExpandPlan& expand);

}  // namespace mortar::lora
