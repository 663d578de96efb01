// SPDX-License-Identifier: Apache-2.0
#include "mbarrier.h"

#include <cstring>

#include "races.h"

namespace emulator {
namespace {

/// The 64 bits of a barrier as this emulator lays them out; `tag` tells an initialised one.
struct Word {
  u64 phase : 1;
  u64 pending : 20;
  u64 count : 20;
  s64 bytes : 21;
  u64 tag : 2;
};
static_assert(sizeof(Word) == 8);
constexpr u32 kTag = 2;
constexpr u32 kMaxCount = (1 << 20) - 1;

Word& word_at(Fiber* f, u32 barrier, u32 at) {
  if (barrier % 8 != 0) fail(f, at, "a misaligned mbarrier");
  auto& w = *static_cast<Word*>(shared_at(f, barrier, 8, at));
  if (w.tag != kTag) fail(f, at, "an mbarrier that is not initialised");
  return w;
}

}  // namespace

void require_alive(Fiber* f, u32 shared, u32 at) {
  const auto& ctas = f->warp->cta->cluster->ctas;
  const u32 rank = shared >> 24;
  if (rank >= ctas.size()) fail(f, at, "shared memory of a block that the cluster lacks");
  if (ctas[rank].alive == 0) fail(f, at, "shared memory of a block that has ended");
}

void mbarrier_update(Fiber* f, u32 barrier, u32 arrivals, s64 bytes, u32 at) {
  require_alive(f, barrier, at);
  Word& w = word_at(f, barrier, at);
  w.bytes += bytes;
  if (arrivals > w.pending) fail(f, at, "more arrivals at an mbarrier than it expects");
  w.pending -= arrivals;
  if (w.pending != 0 || w.bytes != 0) return;
  w.phase ^= 1;
  w.pending = w.count;
  const u64 address = f->smem + barrier;
  auto& waiting = f->warp->cta->cluster->at_mbarriers;
  for (std::size_t i = 0; i < waiting.size();) {
    Fiber* other = waiting[i];
    if (other->wait_address != address) {
      ++i;
      continue;
    }
    waiting[i] = waiting.back();
    waiting.pop_back();
    wake(other);
  }
}

}  // namespace emulator

using namespace emulator;

void emu_mbarrier_init(Thread* t, u32 barrier, u32 count, u32 at) {
  Fiber* f = fiber(t);
  if (barrier % 8 != 0) fail(f, at, "a misaligned mbarrier");
  if (count == 0 || count > kMaxCount) fail(f, at, "an mbarrier of that many arrivals");
  Word w{};
  w.pending = w.count = count;
  w.tag = kTag;
  std::memcpy(shared_at(f, barrier, 8, at), &w, 8);
}

u64 emu_mbarrier_arrive(Thread* t, u32 barrier, u32 count, u32 expect, u32 at) {
  send_order(fiber(t), fiber(t)->smem + barrier);
  mbarrier_update(fiber(t), barrier, count, expect, at);
  return 0;
}

void emu_mbarrier_expect(Thread* t, u32 barrier, u32 bytes, u32 at) {
  mbarrier_update(fiber(t), barrier, 0, bytes, at);
}

void emu_mbarrier_wait(Thread* t, u32 barrier, u32 parity, u32 at) {
  Fiber* f = fiber(t);
  while (word_at(f, barrier, at).phase == (parity & 1)) {
    f->wait_address = f->smem + barrier;
    f->warp->cta->cluster->at_mbarriers.push_back(f);
    block(f, "an mbarrier", at);
    if (word_at(f, barrier, at).phase != (parity & 1)) break;
    fail(f, at, "an mbarrier that went through two phases before a thread saw the first");
  }
  receive_order(f, f->smem + barrier);
}

u32 emu_mbarrier_test(Thread* t, u32 barrier, u32 parity, u32 at) {
  Fiber* f = fiber(t);
  if (word_at(f, barrier, at).phase == (parity & 1)) yield(f);
  if (word_at(f, barrier, at).phase == (parity & 1)) return 0;
  receive_order(f, f->smem + barrier);
  return 1;
}
