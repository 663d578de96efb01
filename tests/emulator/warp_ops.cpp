// SPDX-License-Identifier: Apache-2.0
// Instructions that lanes of a warp execute together, but for products of matrices.
#include <cstring>

#include "races.h"

namespace emulator {
namespace {

constexpr u32 kNothing = 0xffffffff;  // what a lane reads from one that takes no part

template <class F>
void for_lanes(u32 lanes, F f) {
  for (; lanes != 0; lanes &= lanes - 1) f(static_cast<u32>(__builtin_ctz(lanes)));
}

void run_shfl(Warp& w, u32 lanes) {
  for_lanes(lanes, [&](u32 lane) {
    Fiber& f = w.fibers[lane];
    const u32 mode = f.in[0], b = f.in[2] & 31, clamp = f.in[3] & 31, segment = f.in[3] >> 8 & 31;
    const u32 most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int from = 0;
    bool inside = false;
    switch (mode) {
      case 0:
        from = static_cast<int>(lane) - static_cast<int>(b);
        inside = from >= static_cast<int>(most);
        break;
      case 1:
        from = lane + b;
        inside = from <= static_cast<int>(most);
        break;
      case 2:
        from = lane ^ b;
        inside = from <= static_cast<int>(most);
        break;
      default:
        from = least | (b & ~segment);
        inside = from <= static_cast<int>(most);
    }
    if (!inside) from = lane;
    f.out[0] = lanes >> from & 1 ? w.fibers[from].in[1] : kNothing;
    f.out[1] = inside;
  });
}

void run_vote(Warp& w, u32 lanes) {
  u32 ballot = 0;
  for_lanes(lanes, [&](u32 lane) { ballot |= (w.fibers[lane].in[1] != 0) << lane; });
  for_lanes(lanes, [&](u32 lane) {
    Fiber& f = w.fibers[lane];
    const bool uniform = ballot == 0 || ballot == lanes;
    const u32 results[4] = {ballot, ballot == lanes, ballot != 0, uniform};
    f.out[0] = results[f.in[0]];
  });
}

void run_match(Warp& w, u32 lanes) {
  for_lanes(lanes, [&](u32 lane) {
    Fiber& f = w.fibers[lane];
    u32 same = 0;
    for_lanes(lanes, [&](u32 other) {
      const Fiber& o = w.fibers[other];
      same |= (o.in[1] == f.in[1] && o.in[2] == f.in[2]) << other;
    });
    f.out[1] = same == lanes;
    f.out[0] = f.in[0] == 0 || same == lanes ? same : 0;
  });
}

void run_redux(Warp& w, u32 lanes) {
  u32 sum = 0;
  bool first = true;
  for_lanes(lanes, [&](u32 lane) {
    const u32 v = w.fibers[lane].in[1];
    const s32 a = static_cast<s32>(sum), b = static_cast<s32>(v);
    if (first) {
      sum = v;
      first = false;
      return;
    }
    switch (w.fibers[lane].in[0]) {
      case 0:
        sum += v;
        break;
      case 1:
        sum = sum < v ? sum : v;
        break;
      case 2:
        sum = sum > v ? sum : v;
        break;
      case 3:
        sum = static_cast<u32>(a < b ? a : b);
        break;
      case 4:
        sum = static_cast<u32>(a > b ? a : b);
        break;
      case 5:
        sum &= v;
        break;
      case 6:
        sum |= v;
        break;
      default:
        sum ^= v;
    }
  });
  for_lanes(lanes, [&](u32 lane) { w.fibers[lane].out[0] = sum; });
}

void run_barrier(Warp& w, u32 lanes) {
  std::vector<Fiber*> met;
  for_lanes(lanes, [&](u32 lane) { met.push_back(&w.fibers[lane]); });
  order(met);
}

void* row_at(const Fiber& f) { return reinterpret_cast<void*>(f.smem + f.in[2]); }

/// Checks the row of 16 bytes that a lane names.
u64 matrix_row(Fiber* f, u32 address, u32 at) {
  const u64 a = f->smem + address;
  if (EMU_BAD(a, 16)) emu_fault(f, a, 16, at);
  return a;
}

void run_elect(Warp& w, u32 lanes) {
  const u32 leader = __builtin_ctz(lanes);
  for_lanes(lanes, [&](u32 lane) {
    w.fibers[lane].out[0] = leader;
    w.fibers[lane].out[1] = lane == leader;
  });
}

void run_ldmatrix(Warp& w, u32) {
  const u32 count = w.fibers[0].in[0];
  const bool transposed = w.fibers[0].in[1] != 0;
  for (u32 m = 0; m < count; ++m) {
    u16 tile[8][8];
    for (u32 row = 0; row < 8; ++row) {
      Fiber& f = w.fibers[m * 8 + row];
      std::memcpy(tile[row], row_at(f), 16);
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 r = lane / 4, c = lane % 4 * 2;
      const u32 low = transposed ? tile[c][r] : tile[r][c];
      const u32 high = transposed ? tile[c + 1][r] : tile[r][c + 1];
      w.fibers[lane].out[m] = low | high << 16;
    }
  }
}

void run_stmatrix(Warp& w, u32) {
  const u32 count = w.fibers[0].in[0];
  const bool transposed = w.fibers[0].in[1] != 0;
  for (u32 m = 0; m < count; ++m) {
    u16 tile[8][8];
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 r = lane / 4, c = lane % 4 * 2, v = w.fibers[lane].in[4 + m];
      (transposed ? tile[c][r] : tile[r][c]) = static_cast<u16>(v);
      (transposed ? tile[c + 1][r] : tile[r][c + 1]) = static_cast<u16>(v >> 16);
    }
    for (u32 row = 0; row < 8; ++row) {
      Fiber& f = w.fibers[m * 8 + row];
      std::memcpy(row_at(f), tile[row], 16);
    }
  }
}

}  // namespace
}  // namespace emulator

using namespace emulator;

u32 emu_shfl(Thread* t, u32 mode, u32 a, u32 b, u32 c, u32 mask, u32 at) {
  t->in[0] = mode, t->in[1] = a, t->in[2] = b, t->in[3] = c;
  collective(fiber(t), run_shfl, mask, at, "a shuffle of its warp");
  return t->out[0];
}

u32 emu_vote(Thread* t, u32 mode, u32 predicate, u32 mask, u32 at) {
  t->in[0] = mode, t->in[1] = predicate;
  collective(fiber(t), run_vote, mask, at, "a vote of its warp");
  return t->out[0];
}

u32 emu_match(Thread* t, u32 all, u64 value, u32 mask, u32 at) {
  t->in[0] = all, t->in[1] = static_cast<u32>(value), t->in[2] = static_cast<u32>(value >> 32);
  collective(fiber(t), run_match, mask, at, "a match of its warp");
  return t->out[0];
}

u32 emu_redux(Thread* t, u32 op, u32 value, u32 mask, u32 at) {
  t->in[0] = op, t->in[1] = value;
  collective(fiber(t), run_redux, mask, at, "a reduction of its warp");
  return t->out[0];
}

u32 emu_activemask(Thread* t) { return 1u << fiber(t)->lane; }

u32 emu_elect(Thread* t, u32 mask, u32 at) {
  collective(fiber(t), run_elect, mask, at, "elect of its warp");
  return t->out[0];
}

void emu_bar_warp(Thread* t, u32 mask, u32 at) {
  collective(fiber(t), run_barrier, mask, at, "a barrier of its warp");
}

void emu_ldmatrix(Thread* t, u32 count, u32 transposed, u32 address, u32 at) {
  Fiber* f = fiber(t);
  t->in[0] = count, t->in[1] = transposed, t->in[2] = address;
  if (f->lane < 8 * count) {
    note_access(f, matrix_row(f, address, at), 16, AccessKind::kRead, at);
  }
  collective(f, run_ldmatrix, ~0u, at, "ldmatrix of its warp");
}

void emu_stmatrix(Thread* t, u32 count, u32 transposed, u32 address, u32 at) {
  Fiber* f = fiber(t);
  t->in[0] = count, t->in[1] = transposed, t->in[2] = address;
  if (f->lane < 8 * count) {
    note_access(f, matrix_row(f, address, at), 16, AccessKind::kWrite, at);
  }
  collective(f, run_stmatrix, ~0u, at, "stmatrix of its warp");
}
