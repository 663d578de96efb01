// SPDX-License-Identifier: Apache-2.0
// The loops of an expand, for any multiply-add unit: y[t, n] (+)= sum_r h[t, r] B[n, r] in register
// tiles of kTileTokens tokens x kTileVecs vectors of columns. A step loads kTileVecs vectors of
// packed B and broadcasts one entry of h per token.
//
// y is read and written once, a tile of each row at a time, and the next tile is fetched meanwhile;
// a last tile that is narrower goes through a buffer, with the same arithmetic.
//
// Included once per SIMD level, between the lines that turn on its instructions, with
// MORTAR_LEVEL_NAMESPACE defined. `Unit` gives:
//   Y             element type of y;  Entry, that of h
//   Vec, Packed   kLanes floats, kLanes packed units;  zero(), load(const std::uint32_t*)
//   kParts        entries of h in a unit (steps that one unit of B makes)
//   part<i>(Packed), broadcast(Entry), multiply(h, b, Vec)
//   update(Vec (&)[kTileVecs], bool add, Y*), which adds or stores a tile of a row

namespace mortar {
namespace MORTAR_LEVEL_NAMESPACE {

using lora::cpu::ExpandBlock;
using lora::cpu::kPackColumns;

template <class Unit, int kTokens>
struct ExpandTile {
  using Y = typename Unit::Y;
  using Entry = typename Unit::Entry;
  using Vec = typename Unit::Vec;
  static constexpr int kVecs = Unit::kTileVecs;
  static constexpr std::int64_t kColumns = kVecs * Unit::kLanes;
  static_assert(kPackColumns % kColumns == 0, "a tile must not straddle packed panels");

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

  static void run(const ExpandBlock& block, std::int64_t token, std::int64_t column) {
    Vec sum[kTokens][kVecs];
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      MORTAR_UNROLL
      for (int v = 0; v < kVecs; ++v) sum[t][v] = Unit::zero();
    }
    for (int t = 0; t < kTokens; ++t) {
      const char* next = reinterpret_cast<const char*>(row(block, token + t, column + kColumns));
      MORTAR_UNROLL
      for (std::int64_t at = 0; at < kColumns * std::int64_t{sizeof(Y)}; at += 64) {
        __builtin_prefetch(next + at, 1);
      }
    }
    const Entry* h = static_cast<const Entry*>(block.h) + token * block.h_stride;
    const std::uint32_t* b =
        block.b + column / kPackColumns * block.panel_stride + column % kPackColumns;
    for (std::int64_t u = 0; u < block.units; ++u, b += kPackColumns, h += Unit::kParts) {
      typename Unit::Packed unit[kVecs];
      MORTAR_UNROLL
      for (int v = 0; v < kVecs; ++v) unit[v] = Unit::load(b + v * Unit::kLanes);
      step<0>(unit, h, block.h_stride, sum);
      if constexpr (Unit::kParts == 2) step<1>(unit, h, block.h_stride, sum);
    }
    const std::int64_t columns = block.num_columns - column;
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      Y* y = row(block, token + t, column);
      if (columns >= kColumns) {
        Unit::update(sum[t], block.add, y);
      } else {
        Y edge[kColumns] = {};
        std::memcpy(edge, y, columns * sizeof(Y));
        Unit::update(sum[t], block.add, edge);
        std::memcpy(y, edge, columns * sizeof(Y));
      }
    }
  }

  static Y* row(const ExpandBlock& block, std::int64_t token, std::int64_t column) {
    return static_cast<Y*>(block.y_rows[token]) + column;
  }
};

template <class Unit, int kTokens>
void expand_rows(const ExpandBlock& block, std::int64_t token) {
  using Tile = ExpandTile<Unit, kTokens>;
  for (std::int64_t n = 0; n < block.num_columns; n += Tile::kColumns) Tile::run(block, token, n);
}

template <class Unit>
void expand(const ExpandBlock& block) {
  constexpr int kTokens = Unit::kTileTokens;
  std::int64_t t = 0;
  for (; t + kTokens <= block.num_tokens; t += kTokens) expand_rows<Unit, kTokens>(block, t);
  for (; t + 2 <= block.num_tokens; t += 2) expand_rows<Unit, 2>(block, t);
  for (; t < block.num_tokens; ++t) expand_rows<Unit, 1>(block, t);
}

}  // namespace MORTAR_LEVEL_NAMESPACE
}  // namespace mortar
