// SPDX-License-Identifier: Apache-2.0
// Products of matrices. A sum of 16 products and what it is added to is rounded once: the products
// are exact in float64.
#include "machine.h"
#include "matrix.h"

namespace emulator {
namespace {

/// kind 0: bfloat16, 1: float16.
void run_mma(Warp& w, u32) {
  alignas(64) double a[16][16];
  alignas(64) double b[16][8];
  const u32 kind = w.fibers[0].in[0];
  for (u32 lane = 0; lane < 32; ++lane) {
    const u32* in = w.fibers[lane].in + 1;
    const u32 g = lane / 4, c = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) {
      unpack(in[i], kind, a[g + i % 2 * 8][c + i / 2 * 8], a[g + i % 2 * 8][c + i / 2 * 8 + 1]);
    }
    for (u32 i = 0; i < 2; ++i) unpack(in[4 + i], kind, b[c + i * 8][g], b[c + i * 8 + 1][g]);
  }
  alignas(64) double d[16][8];
  for (u32 i = 0; i < 16; ++i) {
    for (u32 j = 0; j < 8; ++j) d[i][j] = 0;
    for (u32 k = 0; k < 16; ++k) {
      for (u32 j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
    }
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    Fiber& f = w.fibers[lane];
    const u32 g = lane / 4, c = lane % 4 * 2;
    for (u32 i = 0; i < 4; ++i) {
      const double sum = d[g + i / 2 * 8][c + i % 2];
      f.out[i] = float_bits(static_cast<float>(sum + BITS(f32, f.in[7 + i])));
    }
  }
}

}  // namespace
}  // namespace emulator

using namespace emulator;

void emu_mma(Thread* t, u32 kind, u32 at) {
  t->in[0] = kind;
  collective(fiber(t), run_mma, ~0u, at, "mma of its warp");
}
