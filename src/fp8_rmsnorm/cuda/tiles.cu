// SPDX-License-Identifier: Apache-2.0
// Pass over tiles of aligned rows: y quantised and transposed, once rstd is known.
//
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale, q_t[n,m] = y / scale_t
// bytes  : M N e_x + scales read, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16: 105 MB -> 24.5 us at 4.28 TB/s (copy roof of an H200), less
//          what of x is still in L2: tiles run from the last to the first, and outputs are marked
//          for eviction, so that the end of x stays there
// limit  : memory: warps wait for x more than half of the time, at 10 instructions an element of 25
//          and 2.8 TB/s. A thread has 4 rows of 16 columns; its bytes are transposed in registers
//          4 x 4 and meet those of other rows in shared memory, without bank conflicts. Stores of
//          both outputs are runs of 128 bytes. The next tile is on its way while this one is stored
// wrong  : rows of q_t that do not begin at multiples of 16 bytes (M % 16 != 0) are stored in
//          words, shifted into place
#include "device/byte_transpose.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/tile.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

/// One scale for all; the same by COAT's roundings, where scale and y are bfloat16; scales of q_t's
/// own rows or groups; the maxima that the former take.
enum class TilePass { kPlain, kCompat, kTurned, kColumnMaxima };

/// Where a thread's part of a tile lies, from the last tile to the first.
class TileCursor {
 public:
  std::int64_t row0;
  int column0;

  __device__ __forceinline__ TileCursor(const ForwardParams& p)
      : across_(ceil_div(static_cast<int>(p.input.hidden), kTileColumns)) {
    const auto tiles = static_cast<unsigned>(p.plan.tile_plan.tiles);
    const auto across = static_cast<unsigned>(across_);
    left_ = static_cast<int>(tiles) - 1 - static_cast<int>(blockIdx.x);
    const unsigned index = left_ < 0 ? 0 : static_cast<unsigned>(left_);
    row0 = std::int64_t{index / across} * kTileRows;
    column0 = static_cast<int>(index % across) * kTileColumns;
    step_rows_ = static_cast<int>(gridDim.x / across) * kTileRows;
    step_columns_ = static_cast<int>(gridDim.x % across) * kTileColumns;
  }
  __device__ __forceinline__ bool valid() const { return left_ >= 0; }
  __device__ __forceinline__ void advance() {
    left_ -= static_cast<int>(gridDim.x);
    row0 -= step_rows_;
    column0 -= step_columns_;
    if (column0 < 0) {
      column0 += across_ * kTileColumns;
      row0 -= kTileRows;
    }
  }

 private:
  int across_, left_, step_rows_, step_columns_;
};

/// A thread's operands: x, and the words of its scales, of rstd and of one weight.
template <class T>
struct TileOperands {
  static constexpr int kElements = kPiece<T>, kPieces = 16 / kElements;
  uint4 raw[kThreadRows][kPieces];
  std::uint32_t scale[kThreadRows], rstd[kThreadRows];
  std::uint32_t weight = 0;

  __device__ __forceinline__ void load(const ForwardParams& p, const TileCursor& at, int c, int r) {
    const int hidden = static_cast<int>(p.input.hidden);
    const std::int64_t row = at.row0 + kThreadRows * r;
    const int left = static_cast<int>(min(p.input.rows - row, std::int64_t{kThreadRows}));
    const int column = at.column0 + c * kElements;
    if (left < kThreadRows || at.column0 + kTileColumns > hidden) {  // zeros outside
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        scale[m] = rstd[m] = 0;
#pragma unroll
        for (int k = 0; k < kPieces; ++k) raw[m][k] = make_uint4(0, 0, 0, 0);
      }
    }
    const std::int64_t stride = p.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    const char* x = static_cast<const char*>(p.input.x.data) + row * stride +
                    column * static_cast<int>(sizeof(T));
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m, x += stride) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        device::load_if(m < left && column + k * 8 * kElements < hidden, raw[m][k], x + k * 128);
      }
    }
    if constexpr (kIsFloat8<T>) {
      const bool narrow = narrow_scales(p);
      const std::int64_t bytes = narrow ? 2 : 4, step = p.input.x_scale.row_stride * bytes;
      const char* s = static_cast<const char*>(p.input.x_scale.data) + row * step +
                      (column >> log2_of(p.input.x_group)) * bytes;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m, s += step) {
        load_word_if(m < left && column < hidden, narrow, scale[m], s);
      }
    }
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      load_word_if(p.norm && m < left, false, rstd[m], p.rstd + row + m);
    }
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));  // its place is made anew, not kept for all tiles
    const int n = at.column0 + column_of_weight(thread);
    const bool narrow = p.weight.dtype != DType::kFloat32;
    load_word_if(p.norm && threadIdx.x < kTileColumns && n < hidden, narrow, weight,
                 static_cast<const char*>(p.weight.data) + n * (narrow ? 2 : 4));
  }

  /// The column of a tile whose weight lies at place i in shared memory.
  __device__ __forceinline__ static int column_of_weight(int i) {
    return column_of<kElements>(i / 4 % 8, i / 32) + i % 4;
  }
  __device__ __forceinline__ static bool narrow_scales(const ForwardParams& p) {
    return p.input.x_scale.dtype != DType::kFloat32;
  }
};

/// fl(y / scale) but for its lowest 8 bits, where y is rounded to bfloat16 and the scale is one,
/// with `inverse` = 1 / scale, a little above: then a quotient that lies halfway between two 8-bit
/// floats comes out exactly, and any other, 2^-13 of itself or more from there, on its side of it.
__device__ __forceinline__ float divide_bf16(float y, float inverse) {
  return __uint_as_float(__float_as_uint(__fmul_rn(y, inverse)) & 0xffffff00u);
}

template <class T, TilePass kPass>
inline constexpr int kPerSm = TilesPlan::per_sm(sizeof(T));

template <class T, TilePass kPass>
__global__ void __launch_bounds__(kTileThreads, kPerSm<T, kPass>)
    tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kPieces = 16 / kElements;
  constexpr bool kTurned = kPass == TilePass::kTurned, kMaxima = kPass == TilePass::kColumnMaxima;
  __shared__ __align__(16) SharedTile tile;

  // Coordinates: thread c of the eight that share rows 4 r to 4 r + 3.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int c = thread % 8, r = thread / 8;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden);
  const bool per_group = p.out.scaling == Fp8Scaling::kGroup;
  // Where the thread's rows lie in its first column: device::transposed_offset().
  unsigned char* columns =
      tile.transposed + device::transposed_offset<kElements>(c * kElements, r / 4) + r % 4 * 4;
  TileCursor at(p);

  // Load.
  device::pdl_wait();
  device::pdl_trigger();
  TileOperands<T> in;
  if (at.valid()) in.load(p, at, c, r);
  float inverse = 1.0f;
  if constexpr (!kTurned && !kMaxima) {
    inverse = inverse_of(tensor_scale(p, tile.scratch));
    if (kPass == TilePass::kCompat) inverse = finite_or_nan(inverse * (1.0f + 0x1p-22f));
  }

  while (at.valid()) {
    const std::int64_t row0 = at.row0, my_row = row0 + kThreadRows * r;
    const int column0 = at.column0;
    const bool whole = row0 + kTileRows <= rows && column0 + kTileColumns <= hidden;
    float factor[kThreadRows], rstd[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      float scale = 1.0f;
      if constexpr (kIsFloat8<T>) {
        scale = scale_of_word(TileOperands<T>::narrow_scales(p), in.scale[m]);
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
    if (thread < kTileColumns) {
      tile.weights[thread] =
          p.norm ? float_of_word(p.weight.dtype, in.weight) + p.weight_offset : 1.0f;
    }
    __syncthreads();  // weights are there; the last tile's columns have been read

    const auto quad = [&](int m, int k, const float4& w, float(&y)[4]) {
      unpack4<T>(in.raw[m][k / kQuads], k % kQuads, y);
      const float by[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kPass == TilePass::kCompat) {
          y[j] = normalise(y[j], factor[m], rstd[m], by[j]);
        } else {
          y[j] = y[j] * factor[m] * by[j];
        }
      }
    };
    const auto weights_of = [&](int k) {
      return *reinterpret_cast<const float4*>(&tile.weights[4 * (8 * k + c)]);
    };

    // Reduce: maxima of the columns over a warp's 16 rows, then over a group's.
    if constexpr (kTurned || kMaxima) {
      if (kMaxima || (per_group && !p.out.given_scale)) {
#pragma unroll
        for (int k = 0; k < kThreadQuads; ++k) {
          const float4 w = weights_of(k);
          float most[4] = {};
#pragma unroll
          for (int m = 0; m < kThreadRows; ++m) {
            float y[4];
            quad(m, k, w, y);
#pragma unroll
            for (int j = 0; j < 4; ++j) most[j] = device::max_magnitude(most[j], y[j]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            most[j] = device::max_magnitude(most[j], __shfl_xor_sync(0xffffffffu, most[j], 8));
            most[j] = device::max_magnitude(most[j], __shfl_xor_sync(0xffffffffu, most[j], 16));
          }
          if (r % 4 == 0) {
            *reinterpret_cast<float4*>(&tile.inverse[warp][4 * (8 * k + c)]) =
                make_float4(most[0], most[1], most[2], most[3]);
          }
        }
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
        const int n = column0 + TileOperands<T>::column_of_weight(thread);
        if (n < hidden) atomicMax(p.column_maxima + n, bits);
      }
      at.advance();
      if (at.valid()) in.load(p, at, c, r);
      continue;
    }
    if constexpr (kTurned) {
      // The scales of q_t's rows; their inverses times the weights take the maxima's place.
      const int group_rows = per_group ? p.out.group : kTileRows, group_warps = group_rows / 16;
      for (int j = thread; j < kTileColumns * (kTileRows / group_rows); j += kTileThreads) {
        const int of = j % kTileColumns, first_warp = j / kTileColumns * group_warps;
        const int n = column0 + TileOperands<T>::column_of_weight(of);
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
        const float scaled = finite_or_nan(tile.weights[of] * inverse_of(s));
        for (int w = first_warp; w < first_warp + group_warps; ++w) tile.inverse[w][of] = scaled;
      }
      __syncthreads();
    }

    // Compute.
    std::uint32_t codes[kThreadRows][kThreadQuads];
    const auto encode = [&](auto tag) {
      using Out = typename decltype(tag)::type;
#pragma unroll
      for (int k = 0; k < kThreadQuads; ++k) {
        float4 w;
        if constexpr (kTurned) {
          w = *reinterpret_cast<const float4*>(&tile.inverse[warp][4 * (8 * k + c)]);
        } else {
          w = weights_of(k);
        }
        std::uint32_t of_rows[4], of_columns[4];
#pragma unroll
        for (int m = 0; m < kThreadRows; ++m) {
          float y[4];
          quad(m, k, w, y);
          if constexpr (kPass == TilePass::kCompat) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
              const float2 rounded =
                  device::unpack2<__nv_bfloat16>(device::pack2<__nv_bfloat16>(y[j], y[j + 1]));
              y[j] = divide_bf16(rounded.x, inverse);
              y[j + 1] = divide_bf16(rounded.y, inverse);
            }
          }
          of_rows[m] = device::pack_fp8x4<Out>(y);
          codes[m][k] = of_rows[m];
        }
        device::transpose_bytes_4x4(of_rows, of_columns);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<std::uint32_t*>(columns + (column_of<kElements>(0, k) + j) *
                                                          kTileRows) = of_columns[j];
        }
      }
    };
    if (p.out.dtype == DType::kFloat8E4M3) {
      encode(TypeTag<Float8E4M3>());
    } else {
      encode(TypeTag<Float8E5M2>());
    }

    // Store.
    if (!kTurned && p.out.q.given()) {
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
    at.advance();
    if (at.valid()) in.load(p, at, c, r);
    __syncthreads();  // the columns are there; the weights have been read
    if (p.out.q_t.given()) {
      char* q_t = static_cast<char*>(p.out.q_t.data) + column0 * p.out.q_t.row_stride + row0;
      const std::int64_t stride = p.out.q_t.row_stride;
      const int tile_rows = static_cast<int>(min(rows - row0, std::int64_t{kTileRows}));
      const int tile_columns = min(hidden - column0, kTileColumns);
      if (!p.q_t_aligned) {
        store_shifted_columns<kElements>(tile.transposed, q_t, stride, tile_rows, tile_columns);
      } else if (whole) {
        store_whole_columns<kElements>(tile.transposed, q_t, stride);
      } else {
        store_aligned_columns<kElements>(tile.transposed, q_t, stride, tile_rows, tile_columns);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------- host

template <TilePass kPass>
void launch_tiles(const ForwardParams& p, Stream stream) {
  const device::Launch launch = launch_of_tiles(p, stream);
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::launch<tiles_kernel<typename decltype(tag)::type, kPass>>(p.op, launch, p);
  });
}

}  // namespace

void tiles(const ForwardParams& p, Stream stream) {
  if (p.out.scaling != Fp8Scaling::kTensor) {
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
