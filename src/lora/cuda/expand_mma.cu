// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T on tensor cores, B and y of one 16-bit type.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h
// FLOP   = 2 M N r: never the limit below r of about 256
// 32 tokens of 32 adapters, qkv, r16: 7.1 MB -> 1.7 us;  8192 tokens, 16 adapters: 204 MB -> 48 us
// limit  : DRAM (y in prefill, B in decode)
//
// A CTA takes one column block of one slice and a few consecutive tiles of tokens; B stays in
// shared memory as long as the adapter does. Inside groups of 32 columns the rows of B are stored
// permuted, so that each lane's MMA results are 8 consecutive columns: y moves as 16-byte accesses
// straight between registers and global memory.
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kGroupCols = 32;  ///< columns whose results a quad of lanes shares
constexpr int kGroups = 2;      ///< groups that a warp has in flight
constexpr int kLeafLoads = 8;

template <class T_, int kWarpsM_, int kWarpsN_>
struct Traits {
  using T = T_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kTokens = 16 * kWarpsM;
  static constexpr int kMinCtas = kThreads > 128 ? 2 : 4;  ///< per SM, or too few bytes are in flight
  static constexpr int kPassCols = kWarpsN * kGroups * kGroupCols;  ///< columns of one pass
};

/// Where real column c lies in shared memory: column 8a + 2j + b of a group goes to row 8j + 2a + b,
/// so that fragment j's eight rows are neighbours.
__device__ __forceinline__ int permuted(int c) {
  return (c & ~31) | ((c & 6) << 2) | ((c >> 2) & 6) | (c & 1);
}

/// Elements of a row of B or h in shared memory: whole MMA steps, and 16 bytes so that ldmatrix
/// has no bank conflicts.
__host__ __device__ constexpr int row_pitch(int rank) { return round_up(rank, 16) + 8; }

/// B rows [first, first + cols) of one slice -> shared memory, zeros past the rank.
template <class T>
__device__ void load_b(T* sB, const SliceWeights& w, std::int64_t first, int cols, int valid_cols,
                       int pitch, int num_threads) {
  const int pieces = (pitch - 8) / 8;
  for (int i = threadIdx.x; i < valid_cols * pieces; i += num_threads) {
    const int c = i / pieces, r = i % pieces * 8;
    const T* src = static_cast<const T*>(w.b) + (first + c) * w.b_row_stride + r;
    T* dst = sB + permuted(c) * pitch + r;
    if (r + 8 <= w.rank && device::is_aligned<T, 8>(src)) {
      device::cp_async_16(dst, src);
    } else {
      *reinterpret_cast<device::Pack<T, 8>*>(dst) = device::load_pack<T, 8>(src, w.rank - r);
    }
  }
}

/// One element of h: the slabs added in order, scaled, not yet rounded.
__device__ __forceinline__ float load_h(const HView& h, std::int64_t at, float scale) {
  if (!h.raw) return device::load_as_float(h.data, h.dtype, at);
  const float* slab = static_cast<const float*>(h.data) + at;
  float v = slab[0];
#pragma unroll kLeafLoads
  for (int z = 1; z < h.num_slabs; ++z) v += slab[z * h.slab_stride];
  return v * scale;
}

template <class Tr>
struct YPass {
  device::Pack<typename Tr::T, 8> v[2][kGroups];  ///< [row half][group]
};

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kMinCtas)
    expand_mma_kernel(const __grid_constant__ ExpandParams p) {
  using T = typename Tr::T;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int tokens[Tr::kTokens];

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp % Tr::kWarpsM, warp_n = warp / Tr::kWarpsM;
  const int block = blockIdx.x;
  int slice = 0;
  while (slice + 1 < p.weights.num_slices && block >= p.block_start[slice + 1]) ++slice;
  const std::int64_t first_col = static_cast<std::int64_t>(block - p.block_start[slice]) * p.cols;
  std::int64_t y_col = p.offset + first_col;
  for (int s = 0; s < slice; ++s) y_col += p.weights.widths[s];
  const int cols = static_cast<int>(
      min(static_cast<std::int64_t>(p.cols), p.weights.widths[slice] - first_col));

  const int first = p.h.by_position ? first_position(p.groups, p.tiles, p.weights.num_adapters,
                                                     Tr::kTokens)
                                    : 0;
  T* sB = reinterpret_cast<T*>(smem);
  int adapter = -1, pitch = 0;
  SliceWeights w;
  bool waited = false;
  for (int i = 0; i < p.tiles_per_cta; ++i) {
    const int local = static_cast<int>(blockIdx.y) * p.tiles_per_cta + i;
    Tile tile;
    if (local >= p.tiles.num ||
        !find_tile(p.groups, p.tiles, p.weights.num_adapters, Tr::kTokens, p.tiles.first + local,
                   &tile)) {
      break;
    }

    // Load B and the token indices; both are older than the predecessor.
    if (tile.adapter != adapter) {
      adapter = tile.adapter;
      w = p.weights.get(adapter, slice);
      if (w.rank > p.h.width) w.rank = p.h.width;
      pitch = row_pitch(w.rank);
      if (w.rank > 0) load_b(sB, w, first_col, p.cols, cols, pitch, Tr::kThreads);
    }
    device::cp_async_commit();
    if (w.rank == 0) continue;  // the same for the whole CTA
    for (int k = threadIdx.x; k < Tr::kTokens; k += Tr::kThreads) {
      tokens[k] = tile_token(p.groups, p.tiles, tile, k);
    }
    __syncthreads();
    if (!waited) {
      device::pdl_wait();
      device::pdl_trigger();
      waited = true;
    }

    // Load y of the first pass, then h.
    T* y_row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = tokens[warp_m * 16 + half * 8 + lane / 4];
      y_row[half] = token < 0 ? nullptr
                              : static_cast<T*>(p.y.data) + token * p.y.row_stride + y_col;
    }
    const auto column = [&](int pass, int g) {
      return pass * Tr::kPassCols + (g * Tr::kWarpsN + warp_n) * kGroupCols + lane % 4 * 8;
    };
    const auto load_y = [&](int pass) {
      YPass<Tr> y;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int c = column(pass, g);
          const int valid = p.add_inputs && y_row[half] != nullptr ? cols - c : 0;
          y.v[half][g] = device::load_pack<T, 8>(y_row[half] + c, valid);
        }
      }
      return y;
    };
    const int passes = ceil_div(cols, Tr::kPassCols);
    YPass<Tr> y = load_y(0);

    T* sH = sB + p.cols * pitch;
    const int padded = pitch - 8;
    const float h_scale = p.scale * w.scale;
    const int live_rows = round_up(tile.count, 16);
    const bool direct = !p.h.raw && p.h.dtype == p.y.dtype && w.rank % 8 == 0;
    if (direct) {
      for (int k = threadIdx.x; k < live_rows * (padded / 8); k += Tr::kThreads) {
        const int place = k / (padded / 8), r = k % (padded / 8) * 8;
        const std::int64_t row = h_row(p.h, tile, first, place, place < tile.count ? tokens[place] : -1);
        const T* src = static_cast<const T*>(p.h.data) + slice * p.h.slice_stride +
                       row * p.h.row_stride + r;
        T* dst = sH + place * pitch + r;
        if (row >= 0 && r < w.rank && device::is_aligned<T, 8>(src)) {
          device::cp_async_16(dst, src);
        } else {
          *reinterpret_cast<device::Pack<T, 8>*>(dst) =
              device::load_pack<T, 8>(src, row >= 0 ? w.rank - r : 0);
        }
      }
    } else {
      for (int k = threadIdx.x; k < live_rows * padded; k += Tr::kThreads) {
        const int place = k / padded, r = k % padded;
        const std::int64_t row = h_row(p.h, tile, first, place, place < tile.count ? tokens[place] : -1);
        const float v = row >= 0 && r < w.rank
                            ? load_h(p.h, slice * p.h.slice_stride + row * p.h.row_stride + r,
                                     h_scale)
                            : 0.0f;
        sH[place * pitch + r] = device::from_float<T>(v);
      }
    }
    device::cp_async_commit();
    device::cp_async_wait<0>();
    __syncthreads();

    // Compute and store, one pass of columns at a time; the next pass's y is in flight meanwhile.
    if (warp_m * 16 < tile.count) {
      for (int pass = 0; pass < passes; ++pass) {
        YPass<Tr> next;
        if (pass + 1 < passes) next = load_y(pass + 1);
        float acc[kGroups][4][4] = {};
        for (int r = 0; r < padded; r += 16) {
          std::uint32_t h_frag[4];
          device::ldmatrix_x4(h_frag,
                              sH + (warp_m * 16 + lane % 16) * pitch + r + lane / 16 * 8);
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const int row0 = pass * Tr::kPassCols + (g * Tr::kWarpsN + warp_n) * kGroupCols;
            if (row0 >= cols) break;
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
              std::uint32_t b[4];
              const int row = row0 + j * 8 + lane / 16 * 8 + lane % 8;
              device::ldmatrix_x4(b, sB + row * pitch + r + lane / 8 % 2 * 8);
              device::mma_16816<T>(acc[g][j], h_frag, b[0], b[1]);
              device::mma_16816<T>(acc[g][j + 1], h_frag, b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (y_row[half] == nullptr) continue;
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const int c = column(pass, g);
            if (c >= cols) break;
            device::Pack<T, 8> out;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                const float delta = acc[g][j][half * 2 + b];
                const float old = p.add_inputs ? device::to_float(y.v[half][g].v[2 * j + b]) : 0.0f;
                out.v[2 * j + b] = device::from_float<T>(old + delta);
              }
            }
            device::store_pack<T, 8>(y_row[half] + c, out, cols - c);
          }
        }
        y = next;
      }
    }
    __syncthreads();
  }
  if (!waited) {
    device::pdl_wait();
    device::pdl_trigger();
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class T, int kWarpsM, int kWarpsN>
void launch_tile(const ExpandParams& p, const ExpandConfig& c, Stream stream) {
  using Tr = Traits<T, kWarpsM, kWarpsN>;
  device::Launch l;
  l.grid = expand_grid(p);
  l.threads = Tr::kThreads;
  l.smem = static_cast<std::size_t>(p.cols + c.tile_tokens) * row_pitch(p.h.width) * sizeof(T);
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_mma_kernel<Tr>>("lora_expand", l, p);
}

template <class T>
void launch_typed(const ExpandParams& p, const ExpandConfig& c, Stream stream) {
  if (c.tile_tokens == 16) return launch_tile<T, 1, 4>(p, c, stream);
  if (c.tile_tokens == 64) return launch_tile<T, 4, 2>(p, c, stream);
  fail(ErrorKind::kRuntime, concat("lora_expand: no kernel for tiles of ", c.tile_tokens));
}

}  // namespace

void expand_mma(const ExpandParams& p, const ExpandConfig& c, Stream stream) {
  if (p.y.dtype == DType::kBFloat16) {
    launch_typed<__nv_bfloat16>(p, c, stream);
  } else {
    launch_typed<__half>(p, c, stream);
  }
}

}  // namespace mortar::lora::cuda
