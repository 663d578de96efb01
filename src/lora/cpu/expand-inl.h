// SPDX-License-Identifier: Apache-2.0
// The loops of an expand, for any multiply-add unit: y[t, n] (+)= sum_r h[t, r] B[n, r] in register
// tiles of kTileTokens tokens x kTileVecs vectors of columns. A step loads kTileVecs vectors of
// packed B and broadcasts one entry of h per token.
//
// Panels of B go by one after the other, so that one stays in the first-level cache while all
// tokens of the block pass. y is read and written once, a tile of each row at a time. A tile that
// is needed in some time is fetched into the second level meanwhile, a line per step: all at once
// they would fill the buffers that the loads of this tile need. A last tile that is narrower goes
// through a buffer, with the same arithmetic.
//
// Included once per SIMD level, between the lines that turn on its instructions, with
// MORTAR_LEVEL_NAMESPACE defined. `Unit` gives:
//   Y             element type of y;  Entry, that of h
//   Vec, Packed   kLanes floats, kLanes packed units;  zero(), load(const std::uint32_t*)
//   kParts        entries of h in a unit (steps that one unit of B makes)
//   part<i>(Packed), broadcast(Entry), multiply(h, b, Vec)
//   update(Vec (&)[kTileVecs], float scale, const Y* base, Y*), which scales a tile of a row, adds
//                 the base unless that is null, and stores it

namespace mortar {
namespace MORTAR_LEVEL_NAMESPACE {

using lora::cpu::ExpandBlock;
using lora::cpu::kPackColumns;

/// The tile of y, and of a base that lies elsewhere, that is fetched while another is computed.
struct RowsAhead {
  void* const* y_rows;
  const void* const* base_rows;  ///< or null
  std::int64_t offset;           ///< bytes
};

template <class Unit, int kTokens>
struct ExpandTile {
  using Y = typename Unit::Y;
  using Entry = typename Unit::Entry;
  using Vec = typename Unit::Vec;
  static constexpr int kVecs = Unit::kTileVecs;
  static constexpr std::int64_t kColumns = kVecs * Unit::kLanes;
  static_assert(kPackColumns % kColumns == 0, "a tile must not straddle packed panels");

  static constexpr std::int64_t kRowLines = ceil_div<std::int64_t>(kColumns * sizeof(Y), 64);
  static constexpr std::int64_t kLines = kTokens * kRowLines;  ///< cache lines of a tile of y

  template <bool kWrite, class Rows>
  static inline __attribute__((always_inline)) void fetch(Rows rows, std::int64_t offset,
                                                          std::int64_t line) {
    const char* row = static_cast<const char*>(rows[line / kRowLines]);
    __builtin_prefetch(row + offset + line % kRowLines * 64, kWrite, 2);
  }

  template <int kPart>
  static inline __attribute__((always_inline)) void step(const typename Unit::Packed (&unit)[kVecs],
                                                         const Entry* h, std::int64_t h_stride,
                                                         Vec (&sum)[kTokens][kVecs]) {
    decltype(Unit::template part<kPart>(unit[0])) b[kVecs];
    MORTAR_UNROLL
    for (int v = 0; v < kVecs; ++v) b[v] = Unit::template part<kPart>(unit[v]);
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      const auto hv = Unit::broadcast(h[t * h_stride + kPart]);
      MORTAR_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[t][v] = Unit::multiply(hv, b[v], sum[t][v]);
    }
  }

  static void run(const ExpandBlock& block, std::int64_t token, std::int64_t column,
                  const RowsAhead& ahead) {
    Vec sum[kTokens][kVecs];
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      MORTAR_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[t][v] = Unit::zero();
    }
    const Entry* h = static_cast<const Entry*>(block.h) + token * block.h_stride;
    const std::uint32_t* b =
        block.b + column / kPackColumns * block.panel_stride + column % kPackColumns;
    const auto step_unit = [&]() __attribute__((always_inline)) {
      typename Unit::Packed unit[kVecs];
      MORTAR_UNROLL
      for (int v = 0; v < kVecs; ++v) unit[v] = Unit::load(b + v * Unit::kLanes);
      step<0>(unit, h, block.h_stride, sum);
      if constexpr (Unit::kParts == 2) step<1>(unit, h, block.h_stride, sum);
      b += kPackColumns;
      h += Unit::kParts;
    };
    std::int64_t u = 0;
    if (block.units >= kLines) {
      for (; u < kLines; ++u) {
        fetch<true>(ahead.y_rows, ahead.offset, u);
        if (ahead.base_rows != nullptr) fetch<false>(ahead.base_rows, ahead.offset, u);
        step_unit();
      }
    } else {
      MORTAR_UNROLL
      for (std::int64_t i = 0; i < kLines; ++i) fetch<true>(ahead.y_rows, ahead.offset, i);
      for (std::int64_t i = 0; ahead.base_rows != nullptr && i < kLines; ++i) {
        fetch<false>(ahead.base_rows, ahead.offset, i);
      }
    }
    for (; u < block.units; ++u) step_unit();
    const std::int64_t columns = block.num_columns - column;
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      Y* y = static_cast<Y*>(block.y_rows[token + t]) + column;
      const Y* base = block.base_rows == nullptr
                          ? nullptr
                          : static_cast<const Y*>(block.base_rows[token + t]) + column;
      if (columns >= kColumns) {
        Unit::update(sum[t], block.scale, base, y);
      } else {
        Y edge[kColumns] = {};
        if (base != nullptr) std::memcpy(edge, base, columns * sizeof(Y));
        Unit::update(sum[t], block.scale, base != nullptr ? edge : nullptr, edge);
        std::memcpy(y, edge, columns * sizeof(Y));
      }
    }
  }
};

template <class Unit>
class Expand {
  using Y = typename Unit::Y;
  static constexpr std::int64_t kTokens = Unit::kTileTokens;
  static constexpr std::int64_t kColumns = ExpandTile<Unit, 1>::kColumns;

 public:
  static void run(const ExpandBlock& block) {
    // Memory answers within some 100 steps: that many tiles ahead, y is asked for.
    const std::int64_t steps = std::max<std::int64_t>(block.units, 1);
    const std::int64_t distance = kTokens * std::clamp<std::int64_t>(96 / steps, 1, 8);
    for (std::int64_t n = 0; n < block.num_columns; n += kPackColumns) {
      std::int64_t t = 0;
      for (; t + kTokens <= block.num_tokens; t += kTokens) panel<kTokens>(block, t, n, distance);
      for (; t + 4 <= block.num_tokens; t += 4) panel<4>(block, t, n, distance);
      for (; t + 2 <= block.num_tokens; t += 2) panel<2>(block, t, n, distance);
      for (; t < block.num_tokens; ++t) panel<1>(block, t, n, distance);
    }
  }

 private:
  template <int kCount>
  static void panel(const ExpandBlock& block, std::int64_t t, std::int64_t n,
                    std::int64_t distance) {
    const std::int64_t end = std::min(n + kPackColumns, block.num_columns);
    for (; n < end; n += kColumns) {
      ExpandTile<Unit, kCount>::run(block, t, n, ahead(block, t + distance, n, kCount));
    }
  }

  /// The rows from token t on, or what follows the last: the next panel, then the next block.
  static RowsAhead ahead(const ExpandBlock& block, std::int64_t t, std::int64_t n,
                         std::int64_t count) {
    if (t >= block.num_tokens) {
      t -= block.num_tokens;
      n += kPackColumns;
      if (n >= block.num_columns) {
        n = 0;
        t += block.num_tokens;
      }
    }
    t = std::min(t, block.num_rows - count);
    const bool apart = block.base_rows != nullptr && block.base_rows != block.y_rows;
    return {block.y_rows + t, apart ? block.base_rows + t : nullptr,
            n * static_cast<std::int64_t>(sizeof(Y))};
  }
};

template <class Unit>
void expand(const ExpandBlock& block) {
  Expand<Unit>::run(block);
}

}  // namespace MORTAR_LEVEL_NAMESPACE
}  // namespace mortar
