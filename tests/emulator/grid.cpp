// SPDX-License-Identifier: Apache-2.0
// Brings the blocks of a grid onto the machine, in shuffled order, and runs them to their end.
#include <cstdio>
#include <cstring>
#include <numeric>

#include "memory.h"
#include "races.h"
#include "scheduler.h"

namespace emulator {
namespace {

constexpr unsigned kReservedSmem = 1024;  // what the system keeps below a block's own

void load_cta(Cta& cta, Cluster& cluster, unsigned rank, std::size_t slot,
              const std::array<unsigned, 3>& id, std::size_t first_stack) {
  const LaunchRequest& r = *machine.request;
  const unsigned threads = r.block[0] * r.block[1] * r.block[2];
  const unsigned bytes = kReservedSmem + r.static_smem + r.dynamic_smem;
  cta.cluster = &cluster;
  cta.rank = rank;
  cta.id = id;
  const u64 base = kSharedBase + slot * kSharedSlot;
  cta.window = base + (u64{rank} << kSharedWindowBits);
  std::memset(reinterpret_cast<void*>(cta.window), poison(), bytes);
  cta.barriers = {};
  cta.alive = threads;
  const unsigned warps = (threads + 31) / 32;
  if (cta.warps.size() != warps) {
    cta.fibers.clear();
    cta.warps.assign(warps, {});
    for (Warp& w : cta.warps) {
      w.fibers = cta.fibers.emplace_back(new Fiber[32]).get();
    }
  }
  for (unsigned i = 0; i < threads; ++i) {
    Warp& w = cta.warps[i / 32];
    Fiber& f = w.fibers[i % 32];
    w.cta = &cta;
    f.warp = &w;
    f.lane = i % 32;
    f.index = i;
    f.waits = nullptr;
    f.cluster_waits = false;
    f.looks_for_races = looks_for_races();
    f.copies.clear();
    f.group_ends.clear();
    u32* s = f.special;
    s[kTidX] = i % r.block[0];
    s[kTidY] = i / r.block[0] % r.block[1];
    s[kTidZ] = i / r.block[0] / r.block[1];
    for (int d = 0; d < 3; ++d) {
      s[kNtidX + d] = r.block[d];
      s[kCtaidX + d] = id[d];
      s[kNctaidX + d] = r.grid[d];
      s[kClusteridX + d] = id[d] / r.cluster[d];
      s[kNclusteridX + d] = r.grid[d] / r.cluster[d];
      s[kClusterCtaidX + d] = id[d] % r.cluster[d];
      s[kClusterNctaidX + d] = r.cluster[d];
    }
    s[kClusterCtarank] = rank;
    s[kClusterNctarank] = r.cluster[0] * r.cluster[1] * r.cluster[2];
    s[kLaneid] = i % 32;
    s[kWarpid] = i / 32;
    s[kNwarpid] = warps;
    s[kSmid] = random_bits() % 132;
    s[kNsmid] = 132;
    s[kDynamicSmem] = r.dynamic_smem;
    s[kTotalSmem] = bytes;
    f.smem_base = rank << kSharedWindowBits;
    f.smem = base;
    f.params = r.params;
    f.symbols = r.symbols;
    prepare(f, first_stack + i);
  }
  for (unsigned i = 0; i < warps; ++i) {
    Warp& w = cta.warps[i];
    const unsigned lanes = std::min(32u, threads - i * 32);
    w.alive = w.runnable = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.turn = random_bits() & 31;
    w.groups.clear();
    w.products.clear();
    w.product_groups.clear();
    w.listed = false;
    enlist(w);
  }
}

void report_waits(const std::vector<Cluster>& clusters) {
  int lines = 0;
  for (const Cluster& cluster : clusters) {
    for (const Cta& cta : cluster.ctas) {
      for (const Warp& w : cta.warps) {
        for (u32 rest = w.alive; rest != 0 && lines < 24;) {
          const Fiber& f = w.fibers[__builtin_ctz(rest)];
          u32 same = 0;
          for (u32 r = rest; r != 0; r &= r - 1) {
            const Fiber& other = w.fibers[__builtin_ctz(r)];
            if (other.waits == f.waits && other.at == f.at) same |= 1u << other.lane;
          }
          std::fprintf(stderr, "  block (%u,%u,%u) warp %u lanes %08x wait for %s: %s\n", cta.id[0],
                       cta.id[1], cta.id[2], f.index / 32, same, f.waits ? f.waits : "nothing",
                       machine.request->describe(f.at).c_str());
          rest &= ~same;
          ++lines;
        }
      }
    }
  }
}

}  // namespace

std::string run_grid(const LaunchRequest& r) {
  set_up();
  machine.request = &r;
  machine.failure.clear();
  machine.ready.clear();
  machine.idle_polls = 0;
  const unsigned in_cluster = r.cluster[0] * r.cluster[1] * r.cluster[2];
  const unsigned threads = r.block[0] * r.block[1] * r.block[2];
  const std::size_t clusters = std::size_t{r.grid[0]} * r.grid[1] * r.grid[2] / in_cluster;
  std::vector<u32> order(clusters);
  std::iota(order.begin(), order.end(), 0u);
  for (std::size_t i = clusters; i > 1; --i) std::swap(order[i - 1], order[random_bits() % i]);
  std::size_t resident = 1 + random_bits() % 2;
  if (r.cooperative) resident = clusters;
  resident = std::min({resident, clusters, std::size_t{kSharedSlots}});

  static std::vector<Cluster> slots;
  if (slots.size() < resident) {
    slots.clear();  // Cta and Warp point at each other, so they never move
    slots.resize(resident);
  }
  const unsigned bytes = kReservedSmem + r.static_smem + r.dynamic_smem;
  std::size_t next = 0, running = 0;
  const auto load = [&](std::size_t slot) {
    Cluster& cluster = slots[slot];
    const u32 number = order[next++];
    if (cluster.ctas.size() != in_cluster) {
      cluster.ctas.clear();
      cluster.ctas.resize(in_cluster);
    }
    cluster.alive = in_cluster * threads;
    cluster.finished = false;
    cluster.arrived = cluster.phase = 0;
    cluster.waiting.clear();
    cluster.at_mbarriers.clear();
    cluster.events.clear();
    forget_accesses(cluster);
    const std::array<unsigned, 3> per{r.grid[0] / r.cluster[0], r.grid[1] / r.cluster[1],
                                      r.grid[2] / r.cluster[2]};
    const std::array<unsigned, 3> first{number % per[0] * r.cluster[0],
                                        number / per[0] % per[1] * r.cluster[1],
                                        number / per[0] / per[1] * r.cluster[2]};
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const std::array<unsigned, 3> id{first[0] + rank % r.cluster[0],
                                       first[1] + rank / r.cluster[0] % r.cluster[1],
                                       first[2] + rank / r.cluster[0] / r.cluster[1]};
      load_cta(cluster.ctas[rank], cluster, rank, slot, id, (slot * in_cluster + rank) * threads);
    }
    ++running;
  };
  for (std::size_t slot = 0; slot < resident; ++slot) {
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const u64 window = kSharedBase + slot * kSharedSlot + (u64{rank} << kSharedWindowBits);
      allow(window + kReservedSmem, bytes - kReservedSmem);
    }
    load(slot);
  }
  const auto fire = [&](Cluster& cluster) {
    const std::size_t i = random_bits() % cluster.events.size();
    Event event = std::move(cluster.events[i]);
    cluster.events.erase(cluster.events.begin() + i);
    event.run();
  };
  std::vector<Cluster*> with_events;
  while (running > 0 && machine.failure.empty()) {
    if (!machine.ready.empty()) {
      const std::size_t i = random_bits() % machine.ready.size();
      Warp* w = machine.ready[i];
      if (w->runnable == 0) {
        w->listed = false;
        machine.ready[i] = machine.ready.back();
        machine.ready.pop_back();
      } else {
        machine.current = pick(*w);
        emu_switch(&machine.scheduler_sp, machine.current->sp);
        machine.current = nullptr;
        if (!machine.failure.empty()) break;
        if (w->runnable == 0 && machine.ready[i] == w) {
          w->listed = false;
          machine.ready[i] = machine.ready.back();
          machine.ready.pop_back();
        } else {
          w->turn = random_bits() & 31;
        }
      }
    }
    bool progress = !machine.ready.empty();
    for (std::size_t slot = 0; slot < resident; ++slot) {
      Cluster& cluster = slots[slot];
      if (!cluster.events.empty() && (!progress || (random_bits() & 7) == 0)) {
        fire(cluster);
        progress = true;
      }
      if (cluster.alive == 0 && !cluster.finished) {
        if (!cluster.events.empty()) {
          machine.failure =
              r.name + ": a block ended while copies to its shared memory were in flight";
          std::fprintf(stderr, "emulator: %s\n", machine.failure.c_str());
          break;
        }
        --running;
        cluster.finished = true;
        if (next < clusters) load(slot);
        progress = true;
      }
    }
    if (!progress && running > 0 && machine.failure.empty()) {
      machine.failure = r.name + ": every thread waits";
      std::fprintf(stderr, "emulator: %s\n", machine.failure.c_str());
      report_waits(slots);
    }
  }
  machine.current = nullptr;
  for (std::size_t slot = 0; slot < resident; ++slot) {
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const u64 window = kSharedBase + slot * kSharedSlot + (u64{rank} << kSharedWindowBits);
      forbid(window, bytes);
    }
  }
  return machine.failure;
}

}  // namespace emulator
