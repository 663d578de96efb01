// SPDX-License-Identifier: Apache-2.0
#include "races.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <unordered_map>

#include "memory.h"

namespace emulator {

/// What has been accessed in a cluster, and its threads' clocks.
struct Accesses {
  using Clocks = std::vector<u32>;
  struct Access {
    u32 thread, clock, at;
    u32 bytes;  ///< of the word, a bit each
  };
  /// The last accesses to a word of four bytes: reads that a later write to the same bytes has not
  /// replaced, one of each thread, and writes likewise.
  struct Word {
    std::vector<Access> reads, writes;
  };
  std::unordered_map<u64, Word> words;
  std::vector<Clocks> clocks;              ///< of each thread
  std::unordered_map<u64, Clocks> places;  ///< mbarriers, words that order, the cluster's barrier
};

namespace {

u32 threads_of(const Cta& cta) { return static_cast<u32>(cta.warps.size()) * 32; }

u32 number_of(const Fiber* f) {
  const Cta& cta = *f->warp->cta;
  return cta.rank * threads_of(cta) + f->index;
}

Accesses& accesses_of(Fiber* f) {
  Cluster& cluster = *f->warp->cta->cluster;
  if (cluster.accesses == nullptr) {
    cluster.accesses = std::make_shared<Accesses>();
    const std::size_t threads = cluster.ctas.size() * threads_of(*f->warp->cta);
    cluster.accesses->clocks.assign(threads, Accesses::Clocks(threads, 0));
    for (std::size_t i = 0; i < threads; ++i) cluster.accesses->clocks[i][i] = 1;
  }
  return *cluster.accesses;
}

void join(Accesses::Clocks& to, const Accesses::Clocks& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

bool is_shared(u64 address) {
  return address >= kSharedBase && address < kSharedBase + kSharedSlots * kSharedSlot;
}

}  // namespace

bool looks_for_races() {
  static const bool looks = std::getenv("MORTAR_EMULATOR_RACES") != nullptr;
  return looks;
}

void forget_accesses(Cluster& cluster) { cluster.accesses.reset(); }

void order(const std::vector<Fiber*>& threads) {
  if (!looks_for_races() || threads.empty()) return;
  Accesses& all = accesses_of(threads.front());
  Accesses::Clocks joint;
  for (const Fiber* f : threads) join(joint, all.clocks[number_of(f)]);
  for (const Fiber* f : threads) {
    all.clocks[number_of(f)] = joint;
    ++all.clocks[number_of(f)][number_of(f)];
  }
}

void send_order(Fiber* f, u64 place) {
  if (!looks_for_races()) return;
  Accesses& all = accesses_of(f);
  Accesses::Clocks& own = all.clocks[number_of(f)];
  join(all.places[place], own);
  ++own[number_of(f)];
}

std::vector<u32> order_so_far(Fiber* f) {
  if (!looks_for_races()) return {};
  Accesses::Clocks& own = accesses_of(f).clocks[number_of(f)];
  Accesses::Clocks so_far = own;
  ++own[number_of(f)];
  return so_far;
}

void send_order(Fiber* f, u64 place, const std::vector<u32>& so_far) {
  if (looks_for_races()) join(accesses_of(f).places[place], so_far);
}

void receive_order(Fiber* f, u64 place) {
  if (!looks_for_races()) return;
  Accesses& all = accesses_of(f);
  if (const auto found = all.places.find(place); found != all.places.end()) {
    join(all.clocks[number_of(f)], found->second);
  }
}

void note_access(Fiber* f, u64 address, u32 bytes, AccessKind kind, u32 at) {
  if (!looks_for_races() || !is_shared(address)) return;
  if (kind == AccessKind::kOrdering) {
    receive_order(f, address);
    send_order(f, address);
    return;
  }
  Accesses& all = accesses_of(f);
  const u32 own = number_of(f);
  const Accesses::Clocks& clocks = all.clocks[own];
  const bool reads = kind == AccessKind::kRead;
  const auto require_before = [&](const std::vector<Accesses::Access>& others, u32 mask) {
    for (const Accesses::Access& a : others) {
      if (a.thread == own || (a.bytes & mask) == 0 || clocks[a.thread] >= a.clock) continue;
      const u32 threads = threads_of(*f->warp->cta);
      fail(f, at,
           std::string("a race: it ") + (reads ? "reads" : "writes") +
               " shared memory that thread " + std::to_string(a.thread % threads) + " of block " +
               std::to_string(a.thread / threads) + " of the cluster " +
               (reads ? "wrote" : "accessed") + " at instruction " + std::to_string(a.at) +
               ", and nothing orders the two");
    }
  };
  for (u64 word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    u32 mask = 15;
    if (bytes < 4) mask = ((1u << bytes) - 1) << address % 4;
    const Accesses::Access access{own, clocks[own], at, mask};
    Accesses::Word& w = all.words[word];
    require_before(w.writes, mask);
    if (reads) {
      std::erase_if(w.reads, [&](const auto& a) { return a.thread == own && a.bytes == mask; });
      w.reads.push_back(access);
      continue;
    }
    require_before(w.reads, mask);
    const auto covered = [&](const auto& a) { return (a.bytes & ~mask) == 0; };
    std::erase_if(w.reads, covered);
    std::erase_if(w.writes, covered);
    w.writes.push_back(access);
  }
}

void note_copied(Fiber* f, u64 address, u32 bytes) {
  if (!looks_for_races()) return;
  Accesses& all = accesses_of(f);
  for (u64 word = address / 4; word <= (address + bytes - 1) / 4; ++word) all.words.erase(word);
}

}  // namespace emulator

using namespace emulator;

void emu_access(Thread* t, u64 address, u32 bytes, u32 kind, u32 at) {
  note_access(fiber(t), address, bytes, static_cast<AccessKind>(kind), at);
}
