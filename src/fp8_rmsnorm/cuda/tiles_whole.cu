// SPDX-License-Identifier: Apache-2.0
// Pass over tiles of aligned rows where none reaches beyond the matrix, both outputs are wanted,
// and one scale serves all of the tensor: what tiles.cu does, without its choices.
//
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale, q_t[n,m] = the same
// bytes  : M N e_x + scales read, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16: 105 MB -> 24.5 us at 4.28 TB/s (copy roof of an H200), less
//          what of x is still in L2: tiles run from the last to the first
// limit  : memory, and where a CTA has few tiles their instructions: of 4 rows of 16 columns a
//          thread makes codes by 310 of them, and some 150 bring operands and store results
// wrong  : sizes that are not multiples of 128, one output alone, stochastic rounding, float32 x
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/tile_codes.cuh"
#include "fp8_rmsnorm/cuda/tile_operands.cuh"
#include "fp8_rmsnorm/cuda/tile_store.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

/// A CTA's tiles, from the last to the first.
struct WholeTiles {
  int left, row0, column0;

  __device__ __forceinline__ explicit WholeTiles(const ForwardParams& p) {
    const TileCursor first(p);
    left = static_cast<int>(p.plan.tile_plan.tiles) - 1 - static_cast<int>(blockIdx.x);
    row0 = static_cast<int>(first.row0);
    column0 = first.column0;
  }
  __device__ __forceinline__ void advance(const TileWalk& walk) {
    left -= static_cast<int>(gridDim.x);
    row0 -= walk.step_down * kTileRows;
    column0 -= walk.step_across * kTileColumns;
    if (column0 >= 0) return;
    column0 += walk.across * kTileColumns;
    row0 -= kTileRows;
  }
};

/// What a thread brings along for a tile: words of scales, of rstd and of one weight in registers,
/// and its pieces of x in a stage of shared memory, as TileOperands has them.
template <class T>
struct WholeOperands {
  static constexpr int kElements = kPiece<T>, kPieces = 16 / kElements;
  std::uint32_t scale[kThreadRows], weight;
  uint4 rstd;

  /// `stage`: of the thread. Of a base that is the same for all threads ptxas 13.0 made copies that
  /// an H200 refused as illegal instructions (LDGSTS [R+UR], with a policy of L2).
  __device__ __forceinline__ static void copy(const ForwardParams& p, const WholeTiles& at,
                                              const char* x, std::uint32_t stage) {
    const std::int64_t stride = p.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    x += at.row0 * stride + at.column0 * static_cast<int>(sizeof(T));
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m, x += stride) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        device::cp_async_16(stage + (m * kPieces + k) * TileOperands<T>::kStep, x + k * 128, 16,
                            device::kEvictFirst);
      }
    }
  }
  __device__ __forceinline__ void load(const ForwardParams& p, const WholeTiles& at, int c, int r) {
    const int row = at.row0 + kThreadRows * r;
    if constexpr (kIsFloat8<T>) {
      const int column = at.column0 + c * kElements;
      if (TileOperands<T>::narrow_scales(p)) {
        load_scales<true>(p.input, row, column, kThreadRows, scale);
      } else {
        load_scales<false>(p.input, row, column, kThreadRows, scale);
      }
    }
    if (!p.norm) return;
    rstd = __ldcg(reinterpret_cast<const uint4*>(p.rstd + row));
    if (threadIdx.x >= kTileColumns) return;
    const int n = at.column0 + TileOperands<T>::column_of_weight(static_cast<int>(threadIdx.x));
    const char* weights = static_cast<const char*>(p.weight.data);
    if (p.weight.dtype == DType::kFloat32) {
      load_word_if<false>(true, weight, weights + n * 4);
    } else {
      load_word_if<true>(true, weight, weights + n * 2);
    }
  }
};

struct WholeShared {
  float weights[kTileColumns];  ///< quad k of thread c at 4 * (8 k + c)
  std::uint32_t scratch[32];
  unsigned char transposed[kTileColumns * kTileRows];
};

template <class T, bool kCompat>
__global__ void __launch_bounds__(kTileThreads, TilesPlan::per_sm(sizeof(T), false, false,
                                                                  MORTAR_FP8_INSTRUCTIONS))
    whole_tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kPieces = 16 / kElements;
  static_assert(TilesPlan::stages(sizeof(T)) == 2, "one tile is worked on, one on its way");
  using Operands = WholeOperands<T>;
  __shared__ __align__(16) WholeShared tile;
  extern __shared__ uint4 stages[];

  // Coordinates: thread c of the eight that share rows 4 r to 4 r + 3, and later columns r,
  // r + 32, ... of the tile, of which it stores piece c.
  const int thread = static_cast<int>(threadIdx.x), c = thread % 8, r = thread / 8;
  const std::int64_t q_stride = p.out.q.row_stride, q_t_stride = p.out.q_t.row_stride;
  const char* x = static_cast<const char*>(p.input.x.data) + c * 16 +
                  kThreadRows * r * p.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
  char* q = static_cast<char*>(p.out.q.data) + kThreadRows * r * q_stride + c * kElements;
  char* q_t = static_cast<char*>(p.out.q_t.data) + r * q_t_stride + c * 16;
  unsigned char* columns =
      tile.transposed + device::transposed_offset<kElements>(c * kElements, r / 4) + r % 4 * 4;
  const int piece = device::transposed_offset<kElements>(r, c);
  unsigned char* here = reinterpret_cast<unsigned char*>(stages) + thread * 16;
  unsigned char* there = here + TileOperands<T>::kStage;
  WholeTiles at(p);

  // Load.
  if (!p.x_is_there) device::pdl_wait();
  Operands::copy(p, at, x, device::smem_address(here));
  device::cp_async_commit();
  if (p.x_is_there) device::pdl_wait();
  device::pdl_trigger();
  Operands in;
  in.load(p, at, c, r);
  float inverse = inverse_of(tensor_scale(p, tile.scratch));
  if (kCompat) inverse = finite_or_nan(inverse * (1.0f + 0x1p-22f));

  while (true) {
    WholeTiles next = at;
    next.advance(p.walk);
    const bool more = next.left >= 0;
    if (more) Operands::copy(p, next, x, device::smem_address(there));
    device::cp_async_commit();
    const std::uint32_t words[kThreadRows] = {in.rstd.x, in.rstd.y, in.rstd.z, in.rstd.w};
    float factor[kThreadRows], rstd[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      float scale = 1.0f;
      if constexpr (kIsFloat8<T>) {
        scale = scale_of_word(TileOperands<T>::narrow_scales(p), in.scale[m]);
      }
      rstd[m] = p.norm ? __uint_as_float(words[m]) : 1.0f;
      factor[m] = kCompat ? scale : finite_or_nan(finite_or_nan(rstd[m] * inverse) * scale);
    }
    if (thread < kTileColumns) {
      tile.weights[thread] =
          p.norm ? float_of_word(p.weight.dtype, in.weight) + p.weight_offset : 1.0f;
    }
    if (more) in.load(p, next, c, r);
    device::cp_async_wait<1>();
    __syncthreads();  // weights are there; the last tile's columns have been read

    // Compute.
    std::uint32_t codes[kThreadRows][kThreadQuads];
    const auto encode = [&](auto tag) {
      using Out = typename decltype(tag)::type;
      uint4 raw[kThreadRows];
#pragma unroll
      for (int k = 0; k < kThreadQuads; ++k) {
        if (k % kQuads == 0) {
#pragma unroll
          for (int m = 0; m < kThreadRows; ++m) {
            const int place = (m * kPieces + k / kQuads) * TileOperands<T>::kStep;
            raw[m] = *reinterpret_cast<const uint4*>(here + place);
          }
        }
        const float4 w = *reinterpret_cast<const float4*>(&tile.weights[4 * (8 * k + c)]);
        const float by[4] = {w.x, w.y, w.z, w.w};
        std::uint32_t of_rows[kThreadRows];
#pragma unroll
        for (int m = 0; m < kThreadRows; ++m) {
          float y[4];
          unpack4<T>(raw[m], k % kQuads, y);
          weigh<kCompat>(y, by, factor[m], rstd[m]);
          if constexpr (kCompat) divide_rounded(y, inverse);
          codes[m][k] = of_rows[m] = device::pack_fp8x4<Out>(y);
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
    char* to = q + at.row0 * q_stride + at.column0;
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m, to += q_stride) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        std::uint32_t of_piece[kQuads];
#pragma unroll
        for (int i = 0; i < kQuads; ++i) of_piece[i] = codes[m][k * kQuads + i];
        store_codes<kElements>(to + k * 8 * kElements, of_piece, kElements, true);
      }
    }
    __syncthreads();  // the columns are there; the weights have been read
    to = q_t + at.column0 * q_t_stride + at.row0;
#pragma unroll
    for (int i = 0; i < kTileColumns / 32; ++i, to += 32 * q_t_stride) {
      __stcs(reinterpret_cast<uint4*>(to),
             *reinterpret_cast<const uint4*>(tile.transposed +
                                             offset_behind<kElements>(piece, i * 32)));
    }
    if (!more) return;
    at = next;
    unsigned char* const read = here;
    here = there;
    there = read;
  }
}

template <bool kCompat>
void launch_whole_tiles(const ForwardParams& p, Stream stream) {
  device::Launch launch = launch_of_tiles(p, stream);
  device::visit_dtype<NarrowDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch.smem = 2 * TilesPlan::stage_bytes(sizeof(T));
    device::launch<whole_tiles_kernel<T, kCompat>>(p.op, launch, p);
  });
}

}  // namespace

void whole_tiles(const ForwardParams& p, Stream stream) {
  if (p.out.numerics == Fp8Numerics::kCompat) {
    launch_whole_tiles<true>(p, stream);
  } else {
    launch_whole_tiles<false>(p, stream);
  }
}

}  // namespace mortar::fp8_rmsnorm::cuda
