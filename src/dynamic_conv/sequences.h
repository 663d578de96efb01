// SPDX-License-Identifier: Apache-2.0
// Which sequence a time step belongs to, for host and device code.
//
// Whatever cu_seqlens holds, a Walk's sequences never leave [0, N) x [0, T], never go backwards and
// end after at most N advances: that is what makes a bad cu_seqlens harmless.
#pragma once

#include <cstdint>

#include "core/int_math.h"

namespace mortar::dynamic_conv {

/// Dense (starts null: row b is sequence b, [0, T)) or packed (one row, N sequences).
struct Sequences {
  const void* starts = nullptr;  ///< cu_seqlens [N + 1]
  bool wide = false;             ///< int64, else int32
  int count = 1;                 ///< N of the pack, at least 1
  int time = 0;                  ///< T

  MORTAR_HOST_DEVICE bool packed() const { return starts != nullptr; }

  /// cu_seqlens[n] within [0, T].
  MORTAR_HOST_DEVICE int bound(int n) const {
    const std::int64_t value = wide ? static_cast<const std::int64_t*>(starts)[n]
                                    : static_cast<const std::int32_t*>(starts)[n];
    return static_cast<int>(value < 0 ? 0 : (value > time ? time : value));
  }
};

/// No step of any batch comes this late.
inline constexpr int kNever = 0x7fffffff;

/// The current sequence of someone who goes forward in time: [start, end).
struct Walk {
  int index = 0;
  int start = 0, end = 0;
  int next_end = 0;  ///< end of sequence index + 1, read ahead to hide the latency

  /// At step t of sequence `index`, which is last_start_not_after(t) (packed) or b (dense).
  MORTAR_HOST_DEVICE static Walk at(const Sequences& s, int index, int t) {
    Walk w;
    w.index = index;
    w.end = w.next_end = s.time;
    if (!s.packed()) return w;
    if (index > 0) w.start = least(s.bound(index), t);
    if (index + 1 < s.count) {
      w.end = most(s.bound(index + 1), t);
      w.read_ahead(s);
    }
    return w;
  }

  /// To the next sequence, which may be empty; `end` is kNever when there is none.
  MORTAR_HOST_DEVICE void advance(const Sequences& s) {
    if (!s.packed() || index + 1 >= s.count) {
      start = end;
      end = kNever;
      return;
    }
    ++index;
    start = end;
    end = most(next_end, start);
    read_ahead(s);
  }

  MORTAR_HOST_DEVICE bool done() const { return end == kNever; }

 private:
  MORTAR_HOST_DEVICE static int least(int a, int b) { return a < b ? a : b; }
  MORTAR_HOST_DEVICE static int most(int a, int b) { return a < b ? b : a; }
  MORTAR_HOST_DEVICE void read_ahead(const Sequences& s) {
    next_end = index + 2 < s.count ? s.bound(index + 2) : s.time;
  }
};

/// The sequence that holds step t: the last n in [0, N) with cu_seqlens[n] <= t.
inline int last_start_not_after(const Sequences& s, int t) {
  int low = 0, high = s.count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (s.bound(middle) <= t)
      low = middle;
    else
      high = middle;
  }
  return low;
}

}  // namespace mortar::dynamic_conv
