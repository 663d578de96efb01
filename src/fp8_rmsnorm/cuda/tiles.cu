// SPDX-License-Identifier: Apache-2.0
// Pass over tiles of aligned rows: y quantised and transposed, once rstd is known.
//
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale, q_t[n,m] = y / scale_t
// bytes  : M N e_x + scales read, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16: 105 MB -> 24.5 us at 4.28 TB/s (copy roof of an H200), less
//          what of x is still in L2: tiles run from the last to the first, and outputs are marked
//          for eviction, so that the end of x stays there
// limit  : memory, but for the first tile's way in and the last one's out, and barriers: 0.4 of the
//          issue rate at 10 instructions an element. A thread has 4 rows of 16 columns; its bytes
//          are transposed in registers 4 x 4 and meet those of other rows in shared memory, without
//          bank conflicts. Stores of both outputs are runs of 128 bytes. The next tile of x comes
//          to shared memory meanwhile. Stochastic rounding adds as many instructions again
// wrong  : where rows of q_t do not begin at sectors of 32 bytes (M % 32 != 0), tiles overlap by 32
//          rows, or 16: a third more work for whole sectors of q_t. Scales of groups of 128 rows
//          leave no room for that: their q_t is stored in words, shifted into place
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/tile_codes.cuh"
#include "fp8_rmsnorm/cuda/tile_maxima.cuh"
#include "fp8_rmsnorm/cuda/tile_operands.cuh"
#include "fp8_rmsnorm/cuda/tile_store.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

/// One scale for all; the same by COAT's roundings, where scale and y are bfloat16; scales of q_t's
/// own rows or groups; the maxima that the former take.
enum class TilePass { kPlain, kCompat, kTurned, kColumnMaxima };

/// The words of draws of a thread's part of a tile: those of row m and quad k.
template <int kElements>
__device__ __forceinline__ void draw_tile(const Draws& draws, std::int64_t row, int column,
                                          int hidden,
                                          std::uint32_t (&words)[kThreadRows][kThreadQuads]) {
  constexpr int kQuads = kElements / 4;
#pragma unroll
  for (int m = 0; m < kThreadRows; ++m) {
    const auto index = static_cast<std::uint64_t>((row + m) * hidden + column);
#pragma unroll
    for (int k = 0; k < kThreadQuads; k += kQuads) {
      std::uint32_t of_piece[kQuads];
      draw_words(draws, index + column_of<kElements>(0, k), of_piece);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) words[m][k + i] = of_piece[i];
    }
  }
}

template <class T, TilePass kPass, bool kDrawn>
inline constexpr int kPerSm = TilesPlan::per_sm(sizeof(T), kDrawn, kPass == TilePass::kTurned,
                                                MORTAR_FP8_INSTRUCTIONS);

/// kDrawn: rounded stochastically, for the dtypes of which TilesPlan::draws() says so.
template <class T, TilePass kPass, bool kDrawn>
__global__ void __launch_bounds__(kTileThreads, kPerSm<T, kPass, kDrawn>)
    tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kPieces = 16 / kElements;
  constexpr bool kTurned = kPass == TilePass::kTurned, kMaxima = kPass == TilePass::kColumnMaxima;
  constexpr int kStages = TilesPlan::stages(sizeof(T));
  using Operands = TileOperands<T>;
  __shared__ __align__(16) SharedTile tile;
  extern __shared__ uint4 stages[];

  // Coordinates: thread c of the eight that share rows 4 r to 4 r + 3.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int c = thread % 8, r = thread / 8;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden);
  const bool per_group = p.out.scaling == Fp8Scaling::kGroup;
  // Where the thread's rows lie in its first column: device::transposed_offset().
  unsigned char* columns =
      tile.transposed + device::transposed_offset<kElements>(c * kElements, r / 4) + r % 4 * 4;
  // The thread's places in the stages: of the tile that is worked on, and of the next.
  unsigned char* here = reinterpret_cast<unsigned char*>(stages) + thread * 16;
  unsigned char* there = here + (kStages - 1) * Operands::kStage;
  TileCursor at(p);

  // Load.
  if (!p.x_is_there) device::pdl_wait();
  if (at.valid()) Operands::copy(p, at, c, r, device::smem_address(here));
  device::cp_async_commit();
  if (p.x_is_there) device::pdl_wait();
  device::pdl_trigger();
  Operands in;
  if (at.valid()) in.load(p, at, c, r);
  const Draws draws(kDrawn ? p.out.rng : nullptr);
  float inverse = 1.0f;
  if constexpr (!kTurned && !kMaxima) {
    inverse = inverse_of(tensor_scale(p, tile.scratch));
    if (kPass == TilePass::kCompat) inverse = finite_or_nan(inverse * (1.0f + 0x1p-22f));
  }

  while (at.valid()) {
    TileCursor next = at;
    next.advance();
    const auto copy_next = [&] {
      if (next.valid()) Operands::copy(p, next, c, r, device::smem_address(there));
      device::cp_async_commit();
    };
    if constexpr (kStages == 2) copy_next();
    const std::int64_t row0 = at.row0, my_row = row0 + kThreadRows * r;
    const int column0 = at.column0;
    const bool whole = row0 + kTileRows <= rows && column0 + kTileColumns <= hidden;
    // Draws do not wait for x. The codes take their words' places.
    std::uint32_t codes[kThreadRows][kThreadQuads];
    if constexpr (kDrawn) {
      draw_tile<kElements>(draws, my_row, column0 + c * kElements, hidden, codes);
    }
    float factor[kThreadRows], rstd[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      float scale = 1.0f;
      if constexpr (kIsFloat8<T>) {
        scale = scale_of_word(Operands::narrow_scales(p), in.scale[m]);
      }
      rstd[m] = p.norm ? __uint_as_float(in.rstd[m]) : 1.0f;
      if constexpr (kPass == TilePass::kCompat) {
        factor[m] = scale;
      } else if constexpr (kPass == TilePass::kPlain) {
        factor[m] = finite_or_nan(finite_or_nan(rstd[m] * inverse) * scale);
      } else {
        factor[m] = finite_or_nan(scale * rstd[m]);
      }
    }
    bool infinite = false;
    if (thread < kTileColumns) {
      const float weight =
          p.norm ? float_of_word(p.weight.dtype, in.weight) + p.weight_offset : 1.0f;
      tile.weights[thread] = weight;
      infinite = fabsf(weight) > kLargestFloat;
    }
    if (next.valid()) in.load(p, next, c, r);
    device::cp_async_wait<kStages - 1>();
    // Weights are there; the last tile's columns have been read.
    if constexpr (kTurned || kMaxima) {
      infinite = __syncthreads_or(infinite);
    } else {
      __syncthreads();
    }

    // Quad k of row m: of the pieces that the thread reads whenever a new one begins.
    uint4 raw[kThreadRows];
    const auto read = [&](int k) {
      if (k % kQuads != 0) return;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        raw[m] =
            *reinterpret_cast<const uint4*>(here + (m * kPieces + k / kQuads) * Operands::kStep);
      }
    };
    const auto quad = [&](int m, int k, const float4& w, float(&y)[4]) {
      unpack4<T>(raw[m], k % kQuads, y);
      const float by[4] = {w.x, w.y, w.z, w.w};
      weigh<kPass == TilePass::kCompat>(y, by, factor[m], rstd[m]);
    };
    const auto step = [&] {
      if constexpr (kStages == 1) copy_next();
      at = next;
      unsigned char* const read = here;
      here = there;
      there = read;
    };
    const auto is_row = [&](int m) { return __float_as_uint(factor[m]) != Operands::kNoRow; };
    const auto weights_of = [&](int k) {
      return *reinterpret_cast<const float4*>(&tile.weights[4 * (8 * k + c)]);
    };

    // Reduce: maxima of the columns over a warp's 16 rows, then over a group's.
    if constexpr (kTurned || kMaxima) {
      if (kMaxima || (per_group && !p.out.given_scale)) {
        std::uint32_t most[kThreadQuads][4];
#pragma unroll
        for (int k = 0; k < kThreadQuads; ++k) {
          read(k);
          largest_of_rows<T>(raw, k % kQuads, factor, weights_of(k), infinite, is_row, most[k]);
        }
        const int quad = scatter_quads(most, r);
        *reinterpret_cast<uint4*>(&tile.inverse[warp][4 * (8 * quad + c)]) =
            make_uint4(most[0][0], most[0][1], most[0][2], most[0][3]);
        __syncthreads();
      }
    }
    if constexpr (kMaxima) {
      if (thread < kTileColumns) {
        std::uint32_t bits = 0;
#pragma unroll
        for (int w = 0; w < kTileWarps; ++w) {
          bits = max(bits, device::magnitude_bits(tile.inverse[w][thread]));
        }
        const int n = column0 + Operands::column_of_weight(thread);
        if (n < hidden) atomicMax(p.column_maxima + n, bits);
      }
      step();
      continue;
    }
    int group_warp = 0;  // the first warp of this one's group of rows
    if constexpr (kTurned) {
      // The scales of q_t's rows; their inverses times the weights take the first warp's maxima's
      // place.
      const int group_rows = per_group ? p.out.group : kTileRows, group_warps = group_rows / 16;
      group_warp = warp & -group_warps;
      for (int j = thread; j < kTileColumns * (kTileRows / group_rows); j += kTileThreads) {
        const int of = j % kTileColumns, first_warp = j / kTileColumns * group_warps;
        const int n = column0 + Operands::column_of_weight(of);
        const std::int64_t row = row0 + first_warp * 16;
        float s = 1.0f;
        if (n < hidden && row < rows) {
          float* scale_t = p.out.scale_t.data + n * p.out.scale_t.row_stride +
                           (per_group ? row / group_rows * p.out.scale_t.group_stride : 0);
          if (p.out.given_scale) {
            s = __ldcg(scale_t);
          } else if (per_group) {
            std::uint32_t bits = 0;
            for (int w = first_warp; w < first_warp + group_warps; ++w) {
              bits = max(bits, device::magnitude_bits(tile.inverse[w][of]));
            }
            s = scale_for(p.out, __uint_as_float(bits));
            *scale_t = s;
          } else {
            s = scale_for(p.out, __uint_as_float(__ldcg(p.column_maxima + n)));
            if (row0 == 0) *scale_t = s;
          }
        }
        tile.inverse[first_warp][of] = finite_or_nan(tile.weights[of] * inverse_of(s));
      }
      __syncthreads();
    }

    // Compute.
    const auto encode = [&](auto tag) {
      using Out = typename decltype(tag)::type;
#pragma unroll
      for (int k = 0; k < kThreadQuads; ++k) {
        read(k);
        float4 w;
        if constexpr (kTurned) {
          w = *reinterpret_cast<const float4*>(&tile.inverse[group_warp][4 * (8 * k + c)]);
        } else {
          w = weights_of(k);
        }
        std::uint32_t of_rows[kThreadRows];
#pragma unroll
        for (int m = 0; m < kThreadRows; ++m) {
          float y[4];
          quad(m, k, w, y);
          if constexpr (kPass == TilePass::kCompat) divide_rounded(y, inverse);
          if constexpr (kDrawn) {
            of_rows[m] = device::pack_fp8x4<Out>(y, codes[m][k]);
          } else {
            of_rows[m] = device::pack_fp8x4<Out>(y);
          }
          codes[m][k] = of_rows[m];
        }
        store_columns(of_rows, columns + column_of<kElements>(0, k) * kTileRows, kTileRows);
      }
    };
    if (p.out.dtype == DType::kFloat8E4M3) {
      encode(TypeTag<Float8E4M3>());
    } else {
      encode(TypeTag<Float8E5M2>());
    }

    // Store.
    const bool overlaps = p.walk.rows < kTileRows;
    if (!kTurned && p.out.q.given() && (!overlaps || kThreadRows * r < p.walk.rows)) {
      char* q =
          static_cast<char*>(p.out.q.data) + my_row * p.out.q.row_stride + column0 + c * kElements;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m, q += p.out.q.row_stride) {
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          std::uint32_t words[kQuads];
#pragma unroll
          for (int i = 0; i < kQuads; ++i) words[i] = codes[m][k * kQuads + i];
          if (whole || (my_row + m < rows && column0 + (8 * k + c) * kElements < hidden)) {
            store_codes<kElements>(q + k * 8 * kElements, words, kElements, true);
          }
        }
      }
    }
    step();
    __syncthreads();  // the columns are there; the weights have been read
    if (overlaps) {
      store_overlapping_columns<kElements>(p, tile.transposed, row0, column0);
    } else if (p.out.q_t.given()) {
      store_columns_of<kElements>(p, tile.transposed, row0, column0, whole);
    }
  }
}

// ------------------------------------------------------------------------------------------- host

template <TilePass kPass, bool kDrawn = false>
void launch_tiles(const ForwardParams& p, Stream stream) {
  using DrawnDTypes = std::conditional_t<kPass == TilePass::kTurned, Float8DTypes, NarrowDTypes>;
  using DTypes = std::conditional_t<kDrawn, DrawnDTypes, InputDTypes>;
  device::Launch launch = launch_of_tiles(p, stream);
  device::visit_dtype<DTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch.smem = TilesPlan::stages(sizeof(T)) * TilesPlan::stage_bytes(sizeof(T));
    device::launch<tiles_kernel<T, kPass, kDrawn>>(p.op, launch, p);
  });
}

}  // namespace

void tiles(const ForwardParams& p, Stream stream) {
  const bool turned = p.out.scaling != Fp8Scaling::kTensor;
  if (p.out.rng != nullptr) {
    turned ? launch_tiles<TilePass::kTurned, true>(p, stream)
           : launch_tiles<TilePass::kPlain, true>(p, stream);
  } else if (turned) {
    launch_tiles<TilePass::kTurned>(p, stream);
  } else if (p.out.numerics == Fp8Numerics::kCompat) {
    launch_tiles<TilePass::kCompat>(p, stream);
  } else {
    launch_tiles<TilePass::kPlain>(p, stream);
  }
}

void column_maxima(const ForwardParams& p, Stream stream) {
  launch_tiles<TilePass::kColumnMaxima>(p, stream);
}

}  // namespace mortar::fp8_rmsnorm::cuda
