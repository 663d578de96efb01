// SPDX-License-Identifier: Apache-2.0
// Copies that land later than they are issued. Until then what they write is poisoned, so that a
// reader that does not wait is seen.
#include <cstring>

#include "mbarrier.h"
#include "memory.h"
#include "races.h"
#include "tensor_map.h"

namespace emulator {
namespace {

/// Lets the copies of a thread that were issued as `last` or earlier land.
void land(Fiber* f, u64 last) {
  for (Fiber::Copy& c : f->copies) {
    if (c.done || c.number > last) continue;
    c.done = true;
    note_access(f, f->smem + c.to, c.bytes, AccessKind::kWrite, c.at);
    auto* to = reinterpret_cast<char*>(f->smem + c.to);
    std::memcpy(to, reinterpret_cast<const void*>(c.from), c.from_bytes);
    std::memset(to + c.from_bytes, 0, c.bytes - c.from_bytes);
  }
  std::erase_if(f->copies, [](const Fiber::Copy& c) { return c.done; });
}

void require(Fiber* f, bool holds, u32 at, const char* what) {
  if (!holds) fail(f, at, what);
}

/// Elements of a box of a tensor, one row of the box at a time: f(row, address or 0 where outside,
/// elements of it inside).
template <class F>
void for_rows(const TensorMap& map, const s64* first, F f) {
  u32 at[5] = {};
  u64 row = 0;
  for (;;) {
    bool inside = true;
    u64 address = map.base;
    for (u32 d = 1; d < map.rank; ++d) {
      const s64 c = first[d] + at[d];
      inside = inside && c >= 0 && c < static_cast<s64>(map.dims[d]);
      address += static_cast<u64>(c) * map.strides[d - 1];
    }
    f(row++, inside ? address : 0);
    u32 d = 1;
    for (; d < map.rank && ++at[d] == map.box[d]; ++d) at[d] = 0;
    if (d >= map.rank) return;
  }
}

u32 swizzled(u32 shared, u32 swizzle) {
  const u32 bits = swizzle == 3 ? 7 : swizzle == 2 ? 3 : swizzle == 1 ? 1 : 0;
  return shared ^ ((shared >> 7 & bits) << 4);
}

void copy_box(Fiber* f, const TensorMap& map, const s64* first, u32 to, u32 at) {
  const u32 row_bytes = map.box[0] * map.element_bytes;
  for_rows(map, first, [&](u64 row, u64 address) {
    for (u32 i = 0; i < map.box[0]; ++i) {
      const s64 c = first[0] + i;
      const u32 shared = to + row * row_bytes + i * map.element_bytes;
      auto* out = reinterpret_cast<char*>(f->smem + swizzled(shared, map.swizzle));
      if (address == 0 || c < 0 || c >= static_cast<s64>(map.dims[0])) {
        std::memset(out, 0, map.element_bytes);
        continue;
      }
      const u64 from = address + static_cast<u64>(c) * map.element_bytes;
      if (EMU_BAD(from, map.element_bytes)) emu_fault(f, from, map.element_bytes, at);
      std::memcpy(out, reinterpret_cast<const void*>(from), map.element_bytes);
    }
  });
}

/// The map of a copy from or to `shared`.
TensorMap tensor_map(Fiber* f, u32 rank, u64 address, u32 shared, u32 at) {
  require(f, address % 64 == 0, at, "a misaligned tensor map");
  if (!allowed(address, sizeof(TensorMap))) emu_fault(f, address, sizeof(TensorMap), at);
  const TensorMap map = *reinterpret_cast<const TensorMap*>(address);
  require(f, map.magic == TensorMap::kMagic && map.rank == rank, at, "not such a tensor map");
  require(f, shared % 128 == 0, at, "a tensor copy at a misaligned address");
  return map;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

void emu_cp_async(Thread* t, u32 to, u64 from, u32 bytes, u32 from_bytes, u32 at) {
  Fiber* f = fiber(t);
  const u64 a = f->smem + to;
  if (EMU_BAD(a, bytes)) emu_fault(f, a, bytes, at);
  require(f, from_bytes <= bytes, at, "a copy of more bytes than its size");
  if (from_bytes != 0 && (from % bytes != 0 || !allowed(from, from_bytes))) {
    emu_fault(f, from, from_bytes, at);
  }
  note_access(f, a, bytes, AccessKind::kWrite, at);
  std::memset(reinterpret_cast<void*>(a), poison(), bytes);
  f->copies.push_back({to, from, bytes, from_bytes, ++f->copy_number, at, false});
}

void emu_cp_async_commit(Thread* t, u32) {
  Fiber* f = fiber(t);
  f->group_ends.push_back(f->copy_number);
}

void emu_cp_async_wait(Thread* t, u32 groups, u32 all, u32) {
  Fiber* f = fiber(t);
  if (all) {
    f->group_ends.clear();
    land(f, f->copy_number);
  } else if (f->group_ends.size() > groups) {
    const std::size_t done = f->group_ends.size() - groups;
    land(f, f->group_ends[done - 1]);
    f->group_ends.erase(f->group_ends.begin(), f->group_ends.begin() + done);
  }
}

void emu_cp_async_mbarrier(Thread* t, u32 barrier, u32 noinc, u32 at) {
  Fiber* f = fiber(t);
  require(f, noinc != 0, at, "cp.async.mbarrier.arrive without .noinc is not emulated");
  const u64 last = f->copy_number;
  later(f->warp->cta, [=] {
    land(f, last);
    send_order(f, f->smem + barrier);
    mbarrier_update(f, barrier, 1, 0, at);
  });
}

void emu_bulk_copy(Thread* t, u32 to, u64 from, u32 bytes, u32 barrier, u32 ctas, u32 at) {
  Fiber* f = fiber(t);
  require(f, to % 16 == 0 && from % 16 == 0 && bytes % 16 == 0, at, "a misaligned bulk copy");
  if (!allowed(from, bytes)) emu_fault(f, from, bytes, at);
  const auto one = [=](u32 target, u32 target_barrier) {
    require_alive(f, target, at);
    note_access(f, f->smem + target, bytes, AccessKind::kWrite, at);
    std::memset(shared_at(f, target, bytes, at), poison(), bytes);
    later(f->warp->cta, [=] {
      note_copied(f, f->smem + target, bytes);
      std::memcpy(shared_at(f, target, bytes, at), reinterpret_cast<const void*>(from), bytes);
      mbarrier_update(f, target_barrier, 0, -s64{bytes}, at);
    });
  };
  constexpr u32 kOffset = (1 << 24) - 1;
  if (ctas == 0) one(to, barrier);
  for (u32 rank = 0; rank < 16; ++rank) {
    if (ctas >> rank & 1) one(rank << 24 | (to & kOffset), rank << 24 | (barrier & kOffset));
  }
}

void emu_bulk_send(Thread* t, u32 to, u32 from, u32 bytes, u32 barrier, u32 at) {
  Fiber* f = fiber(t);
  require(f, to % 16 == 0 && from % 16 == 0 && bytes % 16 == 0, at, "a misaligned bulk copy");
  require_alive(f, to, at);
  note_access(f, f->smem + to, bytes, AccessKind::kWrite, at);
  std::memset(shared_at(f, to, bytes, at), poison(), bytes);
  later(f->warp->cta, [=] {
    require_alive(f, to, at);
    require_alive(f, from, at);
    note_copied(f, f->smem + to, bytes);
    std::memcpy(shared_at(f, to, bytes, at), shared_at(f, from, bytes, at), bytes);
    mbarrier_update(f, barrier, 0, -s64{bytes}, at);
  });
}

void emu_tensor_copy(Thread* t, u32 rank, u32 to, u64 address, u32 barrier, u32 ctas, u32 at) {
  Fiber* f = fiber(t);
  const TensorMap map = tensor_map(f, rank, address, to, at);
  u32 bytes = map.element_bytes;
  for (u32 d = 0; d < rank; ++d) bytes *= map.box[d];
  s64 first[5] = {};
  for (u32 d = 0; d < rank; ++d) first[d] = static_cast<s32>(t->in[d]);
  const auto one = [&](u32 target, u32 target_barrier) {
    require_alive(f, target, at);
    note_access(f, f->smem + target, bytes, AccessKind::kWrite, at);
    std::memset(shared_at(f, target, bytes, at), poison(), bytes);
    later(f->warp->cta, [f, map, target, target_barrier, bytes, at, c = std::to_array(first)] {
      note_copied(f, f->smem + target, bytes);
      copy_box(f, map, c.data(), target, at);
      mbarrier_update(f, target_barrier, 0, -s64{bytes}, at);
    });
  };
  constexpr u32 kOffset = (1 << 24) - 1;
  if (ctas == 0) one(to, barrier);
  for (u32 i = 0; i < 16; ++i) {
    if (ctas >> i & 1) one(i << 24 | (to & kOffset), i << 24 | (barrier & kOffset));
  }
}

void emu_tensor_store(Thread* t, u32 rank, u64 address, u32 from, u32 at) {
  Fiber* f = fiber(t);
  const TensorMap map = tensor_map(f, rank, address, from, at);
  s64 first[5] = {};
  for (u32 d = 0; d < rank; ++d) first[d] = static_cast<s32>(t->in[d]);
  const u32 row_bytes = map.box[0] * map.element_bytes;
  for_rows(map, first, [&](u64 row, u64 line) {
    for (u32 i = 0; line != 0 && i < map.box[0]; ++i) {
      const s64 c = first[0] + i;
      if (c < 0 || c >= static_cast<s64>(map.dims[0])) continue;
      const u64 to = line + static_cast<u64>(c) * map.element_bytes;
      if (EMU_BAD(to, map.element_bytes)) emu_fault(f, to, map.element_bytes, at);
      const u32 shared = from + row * row_bytes + i * map.element_bytes;
      std::memcpy(reinterpret_cast<void*>(to),
                  shared_at(f, swizzled(shared, map.swizzle), map.element_bytes, at),
                  map.element_bytes);
    }
  });
}

void emu_st_async(Thread* t, u32 to, u32 words, u32 barrier, u32 at) {
  Fiber* f = fiber(t);
  if (f->warp->cta->cluster->ctas.size() == 1) {
    fail(f, at, "sends by st.async in a cluster of one CTA: an illegal instruction on a GPU");
  }
  const u64 a = f->smem + to;
  const u32 bytes = 4 * words;
  if (EMU_BAD(a, bytes)) emu_fault(f, a, bytes, at);
  require_alive(f, to, at);
  note_access(f, a, bytes, AccessKind::kWrite, at);
  std::array<u32, 4> values{};
  std::memcpy(values.data(), t->in, bytes);
  later(f->warp->cta, [=, so_far = order_so_far(f)] {
    require_alive(f, to, at);
    note_copied(f, a, bytes);
    send_order(f, f->smem + barrier, so_far);
    std::memcpy(reinterpret_cast<void*>(a), values.data(), bytes);
    mbarrier_update(f, barrier, 0, -s64{bytes}, at);
  });
}
