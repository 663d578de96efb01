// SPDX-License-Identifier: Apache-2.0
// Pass over tiles: y quantised and transposed, once rstd is known.
//
// y[m,n] = z rstd (w + offset)     q[m,n] = y / scale, q_t[n,m] = y / scale_t
// bytes  : M N e_x + scales read, M N for q and for q_t
// M=8192 N=4096 e4m3, groups of 16: 105 MB -> 24.5 us at 4.28 TB/s (copy roof of an H200), less
//          what of x is still in L2: tiles run from the last to the first, and outputs are marked
//          for eviction, so that the end of x stays there
// limit  : DRAM and instructions: 21 an element of 24. A thread has 4 rows of 16 columns; its bytes
//          are transposed in registers 4 x 4 and meet those of other rows in shared memory, without
//          bank conflicts. Stores of both outputs are runs of 128 bytes
// wrong  : rows of q_t that do not begin at multiples of 16 bytes (M % 16 != 0) are stored in
//          words, shifted into place
#include "device/byte_transpose.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kRows = TilesPlan::kRows, kColumns = TilesPlan::kColumns;
constexpr int kThreads = TilesPlan::kThreads, kWarps = kThreads / 32;
constexpr int kThreadRows = 4, kThreadQuads = 4;  ///< quads of columns
static_assert(kRows == kThreads / 8 * kThreadRows, "eight threads share a row");
static_assert(kColumns == 8 * 4 * kThreadQuads, "a thread has 16 columns");

/// The quantisation with one scale for all, rounded to nearest, is what most calls are: it has a
/// kernel without the registers that the rest needs.
enum class TilePass { kPlain, kGeneral, kColumnMaxima };

/// Column of a tile at which quad k of thread c of a row begins: pieces of a row lie side by side
/// over the eight threads, so that each access of a warp is whole sectors.
template <int kElements>
__device__ __forceinline__ int column_of(int c, int k) {
  constexpr int kQuads = kElements / 4;
  return k / kQuads * (8 * kElements) + c * kElements + k % kQuads * 4;
}

struct SharedTile {
  float weights[kColumns];          ///< quad k of thread c at 4 * (8 k + c)
  float inverse[kWarps][kColumns];  ///< likewise: of the columns, for each warp's 16 rows
  std::uint32_t scratch[32];
  unsigned char transposed[kColumns * kRows];
};

/// Stores the tile's columns, `rows` bytes of each, to rows of q_t whose first is `to`.
__device__ __forceinline__ void store_columns(const SharedTile& tile, char* to, std::int64_t stride,
                                              int rows, int columns, int piece_columns,
                                              bool aligned) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto piece_at = [&](int column, int piece) {
    return tile.transposed + column * 128 + ((piece ^ (column / piece_columns)) & 7) * 16;
  };
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kColumns * 8 / kThreads; ++i) {
      const int column = i * (kThreads / 8) + thread / 8, piece = thread % 8;
      if (column >= columns || piece * 16 >= rows) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(piece_at(column, piece));
      char* p = to + column * stride + piece * 16;
      if (piece * 16 + 16 <= rows) {
        __stcs(reinterpret_cast<uint4*>(p), v);
      } else {
        store_unaligned(p, v, rows - piece * 16);
      }
    }
    return;
  }
  // A warp a column: lane l stores the aligned word that ends with byte 4 l + 3 - shift, from the
  // words l - 1 and l of the column; then the last bytes.
  const int lane = thread % 32;
#pragma unroll 1
  for (int column = thread / 32; column < columns; column += kWarps) {
    char* p = to + column * stride;
    const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(p) % 4);
    const std::uint32_t word =
        *reinterpret_cast<const std::uint32_t*>(piece_at(column, lane / 4) + lane % 4 * 4);
    const std::uint32_t before = __shfl_up_sync(0xffffffffu, word, 1);
    const std::uint32_t out = shift == 0 ? word : __funnelshift_l(before, word, 8 * shift);
    const int first = 4 * lane - shift;  // of the column's bytes
    const bool whole = first >= 0 && first + 4 <= rows;
    if (whole) {
      __stcs(reinterpret_cast<std::uint32_t*>(p + first), out);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= 0 && first + i < rows) p[first + i] = static_cast<char>(out >> (8 * i));
      }
    }
    if (lane == 31) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= 4 - shift && 124 + i < rows) p[124 + i] = static_cast<char>(word >> (8 * i));
      }
    }
  }
}

/// CTAs that share an SM: as many as leave the registers that the kernel needs.
template <class T, TilePass kPass>
inline constexpr int kPerSm = TilesPlan::per_sm(sizeof(T)) -
                              (kPass == TilePass::kGeneral && sizeof(T) != 2 ? 1 : 0);

template <class T, TilePass kPass>
__global__ void __launch_bounds__(kThreads, kPerSm<T, kPass>)
    tiles_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>, kQuads = kElements / 4, kPieces = 16 / kElements;
  __shared__ __align__(16) SharedTile tile;

  // Coordinates: thread c of the eight that share rows 4 r to 4 r + 3.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int c = thread % 8, r = thread / 8;
  const std::int64_t rows = p.input.rows;
  const int hidden = static_cast<int>(p.input.hidden);
  const unsigned across = static_cast<unsigned>(ceil_div(hidden, kColumns));
  const unsigned tiles = static_cast<unsigned>(p.plan.tile_plan.tiles);
  const bool compat = p.out.numerics == Fp8Numerics::kCompat;
  constexpr bool kPlain = kPass == TilePass::kPlain;
  const bool per_tensor = kPlain || p.out.scaling == Fp8Scaling::kTensor;
  const bool per_group = !kPlain && p.out.scaling == Fp8Scaling::kGroup;
  const bool makes_maxima = p.out.given_scale && p.makes_maxima();

  device::pdl_wait();
  device::pdl_trigger();
  const Draws draws(p.out.rng);
  const ScaleReader scale_reader(p.input);
  float divisor = 1.0f;
  if (per_tensor && kPass != TilePass::kColumnMaxima) {
    if (p.out.given_scale) {
      divisor = __ldcg(p.out.scale.data);
    } else {
      const float amax = reduce_maxima(p.maxima, p.plan.row_plan.grid, tile.scratch);
      divisor = scale_for(p.out, amax);
      if (blockIdx.x == 0 && thread == 0) {
        *p.out.scale.data = divisor;
        if (p.out.amax != nullptr) *p.out.amax = amax;
      }
    }
  }
  const float inverse = inverse_of(divisor);
  std::uint32_t largest_seen = 0;

  for (unsigned i = blockIdx.x; i < tiles; i += gridDim.x) {
    const unsigned index = tiles - 1 - i;  // the newest first
    const std::int64_t row0 = std::int64_t{index / across} * kRows;
    const int column0 = static_cast<int>(index % across) * kColumns;
    const std::int64_t my_row = row0 + kThreadRows * r;

    // Load.
    uint4 raw[kThreadRows][kPieces];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const int column = column0 + column_of<kElements>(c, k * kQuads);
        const bool there = my_row + m < rows && column < hidden;
        const T* x =
            static_cast<const T*>(p.input.x.data) + (my_row + m) * p.input.x.row_stride + column;
        raw[m][k] = make_uint4(0, 0, 0, 0);
        if (p.x_aligned) {
          device::load_if(there, raw[m][k], x);
        } else if (there) {
          raw[m][k] = load_unaligned(x, sizeof(T), min(kElements, hidden - column));
        }
      }
    }
    std::uint32_t word[kThreadRows];
    float scale[kThreadRows], rstd[kThreadRows];
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      const int column = column0 + column_of<kElements>(c, 0);
      const bool there = my_row + m < rows && column < hidden;
      word[m] = kIsFloat8<T> && there ? scale_reader.load(my_row + m, column) : scale_reader.unit();
      rstd[m] = p.norm && there ? __ldcg(p.rstd + my_row + m) : 1.0f;
    }
    if (thread < kColumns) {
      const int at = column_of<kElements>(thread / 4 % 8, thread / 32) + thread % 4;
      float w = 1.0f;
      if (p.norm && column0 + at < hidden) {
        w = device::load_as_float(p.weight.data, p.weight.dtype, column0 + at) + p.weight_offset;
      }
      tile.weights[thread] = w;
    }
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      scale[m] = scale_reader.to_float(word[m]);
      if (!compat) {
        scale[m] *= rstd[m];
        rstd[m] = 1.0f;
      }
    }
    __syncthreads();  // weights are there; the last tile's columns have been read
    const auto quad = [&](int m, int k, float(&y)[4]) {
      unpack4<T>(raw[m][k / kQuads], k % kQuads, y);
      const float4 w = *reinterpret_cast<const float4*>(&tile.weights[4 * (8 * k + c)]);
      y[0] = normalise(y[0], scale[m], rstd[m], w.x);
      y[1] = normalise(y[1], scale[m], rstd[m], w.y);
      y[2] = normalise(y[2], scale[m], rstd[m], w.z);
      y[3] = normalise(y[3], scale[m], rstd[m], w.w);
    };

    // Reduce: maxima of the columns over a warp's 16 rows, then over a group's.
    if (!per_tensor && (kPass == TilePass::kColumnMaxima || !p.out.given_scale)) {
      if (kPass == TilePass::kColumnMaxima || per_group) {
#pragma unroll
        for (int k = 0; k < kThreadQuads; ++k) {
          float most[4] = {};
#pragma unroll
          for (int m = 0; m < kThreadRows; ++m) {
            float y[4];
            quad(m, k, y);
#pragma unroll
            for (int j = 0; j < 4; ++j) most[j] = device::max_magnitude(most[j], y[j]);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            std::uint32_t bits = device::magnitude_bits(most[j]);
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 8));
            bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 16));
            if (r % 4 == 0) tile.inverse[warp][4 * (8 * k + c) + j] = __uint_as_float(bits);
          }
        }
        __syncthreads();
      }
    }
    if constexpr (kPass == TilePass::kColumnMaxima) {
      if (thread < kColumns) {
        std::uint32_t bits = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) bits = max(bits, __float_as_uint(tile.inverse[w][thread]));
        const int column = column0 + column_of<kElements>(thread / 4 % 8, thread / 32) + thread % 4;
        if (column < hidden) atomicMax(p.column_maxima + column, bits);
      }
      continue;
    }
    if (!per_tensor) {
      // The scales of q_t's rows, and their inverses where the maxima were.
      const int group_rows = per_group ? p.out.group : kRows, group_warps = group_rows / 16;
      for (int j = thread; j < kColumns * (kRows / group_rows); j += kThreads) {
        const int at = j % kColumns, first_warp = j / kColumns * group_warps;
        const int column = column0 + column_of<kElements>(at / 4 % 8, at / 32) + at % 4;
        const std::int64_t row = row0 + first_warp * 16;
        if (column >= hidden || row >= rows) continue;
        float* scale_t = p.out.scale_t.data + column * p.out.scale_t.row_stride +
                         (per_group ? row / group_rows * p.out.scale_t.group_stride : 0);
        float s;
        if (p.out.given_scale) {
          s = __ldcg(scale_t);
        } else if (per_group) {
          std::uint32_t bits = 0;
          for (int w = first_warp; w < first_warp + group_warps; ++w) {
            bits = max(bits, __float_as_uint(tile.inverse[w][at]));
          }
          s = scale_for(p.out, __uint_as_float(bits));
          *scale_t = s;
        } else {
          s = scale_for(p.out, __uint_as_float(__ldcg(p.column_maxima + column)));
          if (row0 == 0) *scale_t = s;
        }
        for (int w = first_warp; w < first_warp + group_warps; ++w) {
          tile.inverse[w][at] = inverse_of(s);
        }
      }
      __syncthreads();
    }

    // Compute and store.
    std::uint32_t codes[kThreadRows][kThreadQuads];
#pragma unroll
    for (int k = 0; k < kThreadQuads; ++k) {
      const int at = column_of<kElements>(c, k);
      std::uint32_t of_rows[4], of_columns[4];
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        float y[4];
        quad(m, k, y);
        if (makes_maxima) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            largest_seen = max(largest_seen, device::magnitude_bits(y[j]));
        }
        if (compat) {
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = divide_compat(y[j], p.norm, divisor, inverse);
        } else if (per_tensor) {
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] *= inverse;
        } else {
          const float4 inv = *reinterpret_cast<const float4*>(&tile.inverse[warp][4 * (8 * k + c)]);
          y[0] *= inv.x;
          y[1] *= inv.y;
          y[2] *= inv.z;
          y[3] *= inv.w;
        }
        const std::uint64_t element =
            static_cast<std::uint64_t>(my_row + m) * static_cast<std::uint64_t>(hidden) +
            static_cast<std::uint64_t>(column0 + at);
        of_rows[m] = encode4<!kPlain>(p.out, draws, element, y);
        codes[m][k] = of_rows[m];
      }
      if (p.out.q_t.given()) {
        device::transpose_bytes_4x4(of_rows, of_columns);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<std::uint32_t*>(
              tile.transposed + device::transposed_offset<kElements>(at + j, r / 4) + r % 4 * 4) =
              of_columns[j];
        }
      }
    }
    if (p.out.q.given() && per_tensor) {
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
          const int column = column0 + column_of<kElements>(c, k * kQuads);
          if (my_row + m >= rows || column >= hidden) continue;
          std::uint32_t words[kQuads];
#pragma unroll
          for (int i = 0; i < kQuads; ++i) words[i] = codes[m][k * kQuads + i];
          void* q = static_cast<char*>(p.out.q.data) + (my_row + m) * p.out.q.row_stride + column;
          store_codes<kElements>(q, words, hidden - column, p.q_aligned);
        }
      }
    }
    __syncthreads();  // the columns are there; the weights have been read
    if (p.out.q_t.given()) {
      store_columns(tile,
                    static_cast<char*>(p.out.q_t.data) + column0 * p.out.q_t.row_stride + row0,
                    p.out.q_t.row_stride, static_cast<int>(min(rows - row0, std::int64_t{kRows})),
                    min(hidden - column0, kColumns), kElements, p.q_t_aligned);
    }
  }

  if (makes_maxima) {
    largest_seen = device::max_block(largest_seen, tile.scratch);
    if (thread == 0) p.maxima[blockIdx.x] = largest_seen;
  }
}

/// amax alone, where the scale was given.
__global__ void __launch_bounds__(256) amax_kernel(const __grid_constant__ ForwardParams p) {
  __shared__ std::uint32_t scratch[32];
  device::pdl_wait();
  device::pdl_trigger();
  const int count = p.plan.tiles_make_q ? p.plan.tile_plan.grid : p.plan.row_plan.grid;
  const float amax = reduce_maxima(p.maxima, count, scratch);
  if (threadIdx.x == 0) *p.out.amax = amax;
}

// ------------------------------------------------------------------------------------------- host

template <TilePass kPass>
void launch_tiles(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = kThreads;
  launch.grid = dim3(static_cast<unsigned>(p.plan.tile_plan.grid));
  launch.stream = stream;
  launch.pdl = true;
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::launch<tiles_kernel<typename decltype(tag)::type, kPass>>(p.op, launch, p);
  });
}

}  // namespace

void tiles(const ForwardParams& p, Stream stream) {
  if (p.out.scaling == Fp8Scaling::kTensor && p.out.rng == nullptr) {
    launch_tiles<TilePass::kPlain>(p, stream);
  } else {
    launch_tiles<TilePass::kGeneral>(p, stream);
  }
}

void column_maxima(const ForwardParams& p, Stream stream) {
  launch_tiles<TilePass::kColumnMaxima>(p, stream);
}

void reduce_amax(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = 256;
  launch.grid = dim3(1);
  launch.stream = stream;
  launch.pdl = true;
  device::launch<amax_kernel>(p.op, launch, p);
}

}  // namespace mortar::fp8_rmsnorm::cuda
