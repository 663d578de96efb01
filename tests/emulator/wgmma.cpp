// SPDX-License-Identifier: Apache-2.0
// Products of matrices in shared memory. They are computed when issued; what they read is looked at
// again when they are waited for, so that memory which changed too early is seen.
#include <algorithm>
#include <cstring>
#include <vector>

#include "machine.h"
#include "matrix.h"

namespace emulator {
namespace {

struct Operand {
  u32 start, leading, stride, swizzle;
  bool transposed;  ///< M or N is contiguous instead of K

  Operand(u64 descriptor, bool is_transposed)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        swizzle(descriptor >> 62),
        transposed(is_transposed) {}

  /// Offset of the 8 elements that start at (row, k), the first of them a multiple of 8 along the
  /// contiguous dimension.
  u32 chunk(u32 row, u32 k) const {
    const u32 pitch = swizzle == 0 ? 16 : 256 >> swizzle;  // bytes of a row of an atom
    u32 offset = start;
    if (!transposed) {
      offset += row / 8 * stride + row % 8 * pitch;
      offset += swizzle == 0 ? k / 8 * leading : k * 2;
    } else if (swizzle == 0) {
      offset += row / 8 * stride + k / 8 * leading + k % 8 * 16;
    } else {
      const u32 elements = pitch / 2;
      offset += row / elements * leading + row % elements * 2 + k / 8 * stride + k % 8 * pitch;
    }
    const u32 bits = swizzle == 1 ? 7 : swizzle == 2 ? 3 : swizzle == 3 ? 1 : 0;
    return offset ^ ((offset >> 7 & bits) << 4);
  }
};

/// out[k][row] of `rows` rows from `first`, and a hash of the bytes.
template <std::size_t kRows>
u64 read(Fiber* f, const Operand& o, u32 first, u32 rows, u32 kind, double (*out)[kRows], u32 at) {
  u64 hash = 0;
  const u32 base = f->smem_base;
  const auto chunk = [&](u32 row, u32 k, u32(&words)[4]) {
    const u64 a = f->smem + base + o.chunk(row, k);
    if (EMU_BAD(a, 16)) emu_fault(f, a, 16, at);
    std::memcpy(words, reinterpret_cast<const void*>(a), 16);
    for (const u32 word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull + (hash >> 29);
  };
  u32 words[4];
  if (o.transposed) {
    for (u32 k = 0; k < 16; ++k) {
      for (u32 row = 0; row < rows; row += 8) {
        chunk(first + row, k, words);
        if (out == nullptr) continue;
        for (u32 i = 0; i < 4; ++i) {
          unpack(words[i], kind, out[k][row + 2 * i], out[k][row + 2 * i + 1]);
        }
      }
    }
  } else {
    for (u32 row = 0; row < rows; ++row) {
      for (u32 k = 0; k < 16; k += 8) {
        chunk(first + row, k, words);
        if (out == nullptr) continue;
        for (u32 i = 0; i < 4; ++i) {
          unpack(words[i], kind, out[k + 2 * i][row], out[k + 2 * i + 1][row]);
        }
      }
    }
  }
  return hash;
}

constexpr u32 kRegisters = 4;  ///< of the flags: the first operand is in registers

/// The first operand of a warp as mma m16n8k16 takes it: four words a lane.
void take(const Warp& w, u32 kind, double (&out)[16][16]) {
  for (u32 lane = 0; lane < 32; ++lane) {
    const u32 row = lane / 4, k = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) {
      const u32 r = row + i % 2 * 8, c = k + i / 2 * 8;
      unpack(w.fibers[lane].in[9 + i], kind, out[c][r], out[c + 1][r]);
    }
  }
}

u64 wide(const u32* in) { return in[0] | u64{in[1]} << 32; }

void run_wgmma(Warp& w, u32) {
  alignas(64) static double a[16][16];
  alignas(64) static double b[16][256];
  alignas(64) static double d[16][256];
  Fiber* f = &w.fibers[0];
  const u32 n = f->in[0], kind = f->in[1], flags = f->in[7], at = f->in[8];
  const u32 first = f->index / 32 % 4 * 16;
  const u64 a_bits = wide(f->in + 2), b_bits = wide(f->in + 4);
  const Operand a_at(a_bits, flags & 1), b_at(b_bits, flags & 2);
  u64 hash = 0;
  if (flags & kRegisters) {
    take(w, kind, a);
  } else {
    hash = read(f, a_at, first, 16, kind, a, at);
  }
  hash += read(f, b_at, 0, n, kind, b, at);
  w.products.push_back({a_bits, b_bits, hash, n, flags, at});
  for (u32 i = 0; i < 16; ++i) {
    for (u32 j = 0; j < n; ++j) d[i][j] = 0;
    for (u32 k = 0; k < 16; ++k) {
      const double v = a[k][i];
      for (u32 j = 0; j < n; ++j) d[i][j] += v * b[k][j];
    }
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    Fiber& to = w.fibers[lane];
    const u32 g = lane / 4, c = lane % 4 * 2;
    const bool add = to.in[6] != 0;
    for (u32 i = 0; i < n / 2; ++i) {
      const double sum = d[g + i / 2 % 2 * 8][i / 4 * 8 + c + i % 2];
      const float v = static_cast<float>(add ? sum + to.wide[i] : sum);
      to.wide[i] = BITS(f32, float_bits(v));
    }
  }
}

void run_commit(Warp& w, u32) { w.product_groups.push_back(w.products.size()); }

void run_wait(Warp& w, u32) {
  Fiber* f = &w.fibers[0];
  const u32 groups = f->in[0];
  if (w.product_groups.size() <= groups) return;
  const std::size_t done = w.product_groups[w.product_groups.size() - groups - 1];
  for (std::size_t i = 0; i < done; ++i) {
    const Product& p = w.products[i];
    const Operand a_at(p.a, p.flags & 1), b_at(p.b, p.flags & 2);
    u64 hash = 0;
    if (!(p.flags & kRegisters)) {
      hash = read<16>(f, a_at, f->index / 32 % 4 * 16, 16, 0, nullptr, p.at);
    }
    hash += read<256>(f, b_at, 0, p.n, 0, nullptr, p.at);
    if (hash != p.hash) fail(f, p.at, "wgmma whose operands changed before it was waited for,");
  }
  w.products.erase(w.products.begin(), w.products.begin() + done);
  w.product_groups.erase(w.product_groups.begin(), w.product_groups.end() - groups);
  for (std::size_t& end : w.product_groups) end -= done;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

void emu_wgmma(Thread* t, u32 n, u32 kind, u64 a, u64 b, u32 add, u32 flags, u32 at) {
  const u32 in[] = {n,
                    kind,
                    static_cast<u32>(a),
                    static_cast<u32>(a >> 32),
                    static_cast<u32>(b),
                    static_cast<u32>(b >> 32),
                    add,
                    flags,
                    at};
  std::copy(std::begin(in), std::end(in), t->in);
  collective(fiber(t), run_wgmma, ~0u, at, "wgmma of its warp");
}

void emu_wgmma_registers(Thread* t, u32 n, u32 kind, const u32* a, u64 b, u32 add, u32 flags,
                         u32 at) {
  std::copy(a, a + 4, t->in + 9);
  emu_wgmma(t, n, kind, 0, b, add, flags | kRegisters, at);
}

void emu_wgmma_commit(Thread* t, u32 at) {
  collective(fiber(t), run_commit, ~0u, at, "wgmma.commit_group of its warp");
}

void emu_wgmma_wait(Thread* t, u32 groups, u32 at) {
  t->in[0] = groups;
  collective(fiber(t), run_wait, ~0u, at, "wgmma.wait_group of its warp");
}
