// SPDX-License-Identifier: Apache-2.0
// The loops of a shrink, for any dot-product unit: h[t, r] = sum_k x[t, k] A[r, k] in register
// tiles of kTileTokens x kTileRanks dot products, each with a vector of partial sums along K.
//
// A tile step costs (tokens + ranks) loads for tokens * ranks multiply-adds. K goes by in chunks of
// Unit::kChunk elements, and a chunk's sums are summed over the lanes and added to the chunks
// before: so much for the order of summation, which is the same for every batch. A chunk of A is
// copied, the rows of a tile step by step side by side (rows of 4096 elements would all fall on the
// same few lines of the first level, which a tile's copy stays in while a block of tokens passes
// by); the first tokens leave the copy as they go. The block's chunk of x stays in the second
// level. Every tile fetches a piece of what comes next, the next block's x and the next chunk's A,
// so that memory works all the time. Up to one tile of tokens, as in decoding, A is read in place.
//
// Included once per SIMD level, between the lines that turn on its instructions, with
// MORTAR_LEVEL_NAMESPACE defined. `Unit` gives:
//   X, A          element types; Copy, the type of A's elements in the buffer
//   Vec           partial sums, kLanes floats;  zero(), store(Vec, float*), and add_pairs(a, b):
//                 sums of neighbouring lanes, those of a first
//   kStep         elements of K in one step;  kChunk, in one chunk
//   kFetchesNext  whether a tile fetches the next tokens into the first level
//   load_x(const X*), load_a(const A*), load_a(const Copy*), dot(x, a, Vec)
//   store_a(a, Copy*), what load_a() gave

namespace mortar {
namespace MORTAR_LEVEL_NAMESPACE {

using lora::cpu::kMaxShrinkRanks;
using lora::cpu::kMaxShrinkTokens;
using lora::cpu::ShrinkBlock;

/// One tile's rows of A in place. Steps are numbered from the start of the chunk. kFetches: 1 KB
/// ahead is fetched too, for few tokens wait for A, and hardware stops where a page ends.
template <class Unit, bool kFetches>
struct RowsInPlace {
  using A = typename Unit::A;
  const A* row[Unit::kTileRanks];

  auto load(std::int64_t step, int r) const {
    const A* at = row[r] + step * Unit::kStep;
    if (kFetches) __builtin_prefetch(reinterpret_cast<const char*>(at) + 1024);
    return Unit::load_a(at);
  }
  /// A last step of `count` elements, padded with zeros.
  auto load_part(std::int64_t step, int r, std::int64_t count) const {
    A padded[Unit::kStep] = {};
    std::memcpy(padded, row[r] + step * Unit::kStep, count * sizeof(A));
    return Unit::load_a(padded);
  }
};

/// One tile's chunk of A as the first tokens leave it in the buffer: [step][rank][kStep], the last
/// step padded with zeros.
template <class Unit>
struct CopiedRows {
  using Copy = typename Unit::Copy;
  static_assert(Unit::kChunk % Unit::kStep == 0, "a chunk must end with a whole step");
  const Copy* data;

  auto load(std::int64_t step, int r) const {
    return Unit::load_a(data + (step * Unit::kTileRanks + r) * Unit::kStep);
  }
  auto load_part(std::int64_t step, int r, std::int64_t) const { return load(step, r); }
};

/// Reads in place and leaves the copy: on its own the copy would cost a sixth of a block's time,
/// beside products it is almost free.
template <class Unit>
struct CopyingRows {
  RowsInPlace<Unit, true> rows;
  typename Unit::Copy* data;

  auto load(std::int64_t step, int r) const { return copy(rows.load(step, r), step, r); }
  auto load_part(std::int64_t step, int r, std::int64_t count) const {
    return copy(rows.load_part(step, r, count), step, r);
  }
  template <class V>
  V copy(V v, std::int64_t step, int r) const {
    Unit::store_a(v, data + (step * Unit::kTileRanks + r) * Unit::kStep);
    return v;
  }
};

/// Hands out rows [0, count) in order and evenly over so many runs, at most one a run.
class Spread {
 public:
  Spread() = default;
  Spread(std::int64_t count, std::int64_t runs)
      : rate_(std::min((count << kBits) / runs, std::int64_t{1} << kBits)) {}
  std::int64_t take() {
    const std::int64_t row = at_ >> kBits;
    at_ += rate_;
    return row;
  }

 private:
  static constexpr int kBits = 20;
  std::int64_t rate_ = 0, at_ = 0;
};

template <class Unit, int kTokens>
struct ShrinkTile {
  using X = typename Unit::X;
  using A = typename Unit::A;
  using Vec = typename Unit::Vec;
  static constexpr int kRanks = Unit::kTileRanks;

  /// Adds the products of elements [begin, end), one chunk, to `sums`, of kMaxShrinkRanks per
  /// token. Meanwhile one line a step of `far_x` and of `far_a` is fetched into the second level:
  /// without a branch, which would cost more than a line that is not needed. `next_rows`: the next
  /// tokens.
  template <class Rows>
  static void run(const X* const* x_rows, const X* const* next_rows, const Rows a,
                  std::int64_t begin, std::int64_t end, const X* far_x, const A* far_a,
                  float* sums) {
    const X* x[kTokens];
    [[maybe_unused]] const X* next[kTokens];
    Vec sum[kTokens][kRanks];
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      x[t] = x_rows[t] + begin;
      next[t] = next_rows[t] + begin;
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) sum[t][r] = Unit::zero();
    }
    const std::int64_t steps = (end - begin) / Unit::kStep, rest = (end - begin) % Unit::kStep;
    decltype(Unit::load_x(x[0])) xv[kTokens];
    const auto multiply = [&](std::int64_t step) __attribute__((always_inline)) {
      MORTAR_UNROLL
      for (int t = 0; t < kTokens; ++t) xv[t] = Unit::load_x(x[t] + step * Unit::kStep);
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const auto av = a.load(step, r);
        MORTAR_UNROLL
        for (int t = 0; t < kTokens; ++t) sum[t][r] = Unit::dot(xv[t], av, sum[t][r]);
      }
    };
    std::int64_t step = 0;
    for (; step + 2 <= steps; step += 2) {
      constexpr std::int64_t kBytes = Unit::kStep * sizeof(X);
      MORTAR_UNROLL
      for (std::int64_t at = 0; at < 2 * kBytes; at += 64) {
        MORTAR_UNROLL
        for (int t = 0; Unit::kFetchesNext && t < kTokens; ++t) {
          __builtin_prefetch(reinterpret_cast<const char*>(next[t]) + step * kBytes + at);
        }
        __builtin_prefetch(reinterpret_cast<const char*>(far_x) + step * kBytes + at, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(far_a) + step * kBytes + at, 0, 2);
      }
      multiply(step);
      multiply(step + 1);
    }
    if (step < steps) multiply(step);
    if (rest > 0) {
      for (int t = 0; t < kTokens; ++t) {
        X padded[Unit::kStep] = {};
        std::memcpy(padded, x[t] + steps * Unit::kStep, rest * sizeof(X));
        xv[t] = Unit::load_x(padded);
      }
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const auto av = a.load_part(steps, r, rest);
        MORTAR_UNROLL
        for (int t = 0; t < kTokens; ++t) sum[t][r] = Unit::dot(xv[t], av, sum[t][r]);
      }
    }
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) add_chunk(sum[t], begin == 0, sums + t * kMaxShrinkRanks);
  }

 private:
  /// Adds up the lanes of every vector, neighbours first, and adds the results to `sums`.
  static inline __attribute__((always_inline)) void add_chunk(Vec (&v)[kRanks], bool first,
                                                              float* sums) {
    alignas(64) float total[kRanks < Unit::kLanes ? Unit::kLanes : kRanks];
    add_lanes<kRanks, Unit::kLanes>(v, total);
    for (int r = 0; r < kRanks; ++r) sums[r] = first ? total[r] : sums[r] + total[r];
  }

  /// kCount vectors with kLanes lanes for each result.
  template <int kCount, int kLanes>
  static inline __attribute__((always_inline)) void add_lanes(Vec (&v)[kRanks], float* total) {
    constexpr int kHalf = kCount > 1 ? kCount / 2 : 1;
    if constexpr (kLanes == 1) {
      MORTAR_UNROLL
      for (int i = 0; i < kCount; ++i) Unit::store(v[i], total + i * Unit::kLanes);
    } else {
      MORTAR_UNROLL
      for (int i = 0; i < kHalf; ++i) {
        v[i] = Unit::add_pairs(v[2 * i % kCount], v[(2 * i + 1) % kCount]);
      }
      add_lanes<kHalf, kLanes / 2>(v, total);
    }
  }
};

/// One shrink: what its tiles have in common.
template <class Unit>
class Shrink {
  using X = typename Unit::X;
  using A = typename Unit::A;
  using Copy = typename Unit::Copy;
  static constexpr int kRanks = Unit::kTileRanks;
  static constexpr std::int64_t kTokens = 3;
  static constexpr std::int64_t kBlock = 96;  ///< tokens whose chunk of x stays in the second level
  static constexpr std::int64_t kLongRow = 1024;  ///< elements

 public:
  explicit Shrink(const ShrinkBlock& block)
      : block_(block),
        x_(reinterpret_cast<const X* const*>(block.x_rows)),
        a_(static_cast<const A*>(block.a)),
        num_tokens_(block.num_tokens),
        in_place_(num_tokens_ <= kTokens),
        num_tiles_((block.num_ranks + kRanks - 1) / kRanks),
        next_x_rows_(x_) {}

  void run() {
    if (num_tiles_ == 0) return;
    if (in_place_) {
      for (std::int64_t tile = 0; tile < num_tiles_; ++tile) {
        // Short rows are often in a cache (K = 256: 38.7 us against 35.5 where they are fetched).
        if (block_.hidden < kLongRow) {
          for_chunks([&] { run_tokens(tile, 0, num_tokens_, rows<false>(tile)); });
        } else {
          for_chunks([&] { run_tokens(tile, 0, num_tokens_, rows<true>(tile)); });
        }
      }
    } else {
      for_chunks([&] { run_chunk(); });
    }
    for (std::int64_t t = 0; t < num_tokens_; ++t) {
      std::copy_n(sums_[t], block_.num_ranks, block_.out + t * block_.out_stride);
    }
  }

 private:
  template <class Run>
  void for_chunks(const Run& run) {
    begin_ = 0;
    do {
      end_ = std::min(block_.hidden, begin_ + Unit::kChunk);
      run();
      begin_ = end_;
    } while (begin_ < block_.hidden);
  }

  void run_chunk() {
    const bool last = end_ == block_.hidden;
    next_a_ = Spread(last ? 0 : block_.num_ranks, ceil_div(num_tokens_, kTokens) * num_tiles_);
    for (std::int64_t t = 0; t < num_tokens_; t += kBlock) {
      const std::int64_t end = std::min(num_tokens_, t + kBlock);
      const std::int64_t next = end < num_tokens_ ? end : 0;  // the first again, of the next chunk
      next_x_begin_ = end < num_tokens_ ? begin_ : end_;
      next_x_rows_ = x_ + next;
      next_x_ = Spread(next == 0 && last ? 0 : std::min(num_tokens_ - next, kBlock),
                       ceil_div(end - t, kTokens) * num_tiles_);
      for (std::int64_t tile = 0; tile < num_tiles_; ++tile) run_block(tile, t, end);
    }
  }

  void run_block(std::int64_t tile, std::int64_t t, std::int64_t end) {
    if (t == 0) {
      run_tile<kTokens>(tile, 0, CopyingRows<Unit>{rows<true>(tile), copies_[tile]});
      t = kTokens;
    }
    run_tokens(tile, t, end, CopiedRows<Unit>{copies_[tile]});
  }

  /// Rows past the last repeat it; their sums are dropped.
  template <bool kFetches>
  RowsInPlace<Unit, kFetches> rows(std::int64_t tile) const {
    RowsInPlace<Unit, kFetches> rows;
    for (int r = 0; r < kRanks; ++r) {
      const std::int64_t row = std::min<std::int64_t>(tile * kRanks + r, block_.num_ranks - 1);
      rows.row[r] = a_ + row * block_.a_row_stride + begin_;
    }
    return rows;
  }

  template <class Rows>
  void run_tokens(std::int64_t tile, std::int64_t t, std::int64_t end, const Rows& rows) {
    for (; t + kTokens <= end; t += kTokens) run_tile<kTokens>(tile, t, rows);
    if (end - t == 2) {
      run_tile<2>(tile, t, rows);
    } else if (end - t == 1) {
      run_tile<1>(tile, t, rows);
    }
  }

  template <int kCount, class Rows>
  void run_tile(std::int64_t tile, std::int64_t t, const Rows& rows) {
    const X* far_x = next_x_rows_[next_x_.take()] + next_x_begin_;
    const A* far_a = a_ + next_a_.take() * block_.a_row_stride + end_;
    const std::int64_t next = t + 2 * kTokens <= num_tokens_ ? t + kTokens : t;
    ShrinkTile<Unit, kCount>::run(x_ + t, x_ + next, rows, begin_, end_, far_x, far_a,
                                  sums_[t] + tile * kRanks);
  }

  const ShrinkBlock& block_;
  const X* const* x_;
  const A* a_;
  const std::int64_t num_tokens_;
  const bool in_place_;
  const std::int64_t num_tiles_;
  std::int64_t begin_ = 0, end_ = 0;  ///< the chunk of K
  Spread next_x_, next_a_;            ///< of the next block or chunk
  const X* const* next_x_rows_;
  std::int64_t next_x_begin_ = 0;
  alignas(64) float sums_[kMaxShrinkTokens][kMaxShrinkRanks];
  alignas(64) Copy copies_[kMaxShrinkRanks / kRanks][Unit::kChunk * kRanks];
};

template <class Unit>
void shrink(const ShrinkBlock& block) {
  Shrink<Unit>(block).run();
}

}  // namespace MORTAR_LEVEL_NAMESPACE
}  // namespace mortar
