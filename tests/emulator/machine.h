// SPDX-License-Identifier: Apache-2.0
// Runs the grids of a launch: a fiber for every thread, all on one thread of the host, in an order
// that a seed shuffles at every point where threads wait for each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"

namespace emulator {

struct Warp;
struct Cta;
struct Cluster;

struct Fiber : Thread {
  void* sp = nullptr;
  Warp* warp = nullptr;
  unsigned lane = 0;
  unsigned index = 0;           ///< of the thread in its CTA
  const char* waits = nullptr;  ///< for messages: what for, and
  unsigned at = 0;              ///< the instruction that waits
  u64 wait_address = 0;         ///< an mbarrier's, with
  unsigned wait_parity = 0;
  unsigned barrier = 0;        ///< a named barrier's
  bool cluster_waits = false;  ///< has arrived at the cluster's barrier, in this phase:
  u32 cluster_phase = 0;
  /// Copies by cp.async that have not landed; `group_ends` has the last one's number of each group.
  struct Copy {
    u32 to;
    u64 from;
    u32 bytes, from_bytes;
    u64 number;
    u32 at;  ///< the instruction
    bool done;
  };
  std::vector<Copy> copies;
  std::vector<u64> group_ends;
  u64 copy_number = 0;
};

/// Lanes that wait for each other at one instruction of a whole warp.
struct Group {
  void (*run)(Warp&, u32 lanes);
  u32 mask, arrived;
};

/// A wgmma that has not been waited for, and a hash of what it read.
struct Product {
  u64 a, b, hash;
  u32 n, flags, at;
};

struct Warp {
  Cta* cta = nullptr;
  Fiber* fibers = nullptr;  ///< its 32 lanes
  u32 alive = 0, runnable = 0, turn = 0;
  bool listed = false;
  std::vector<Group> groups;
  std::vector<Product> products;
  std::vector<std::size_t> product_groups;  ///< how many products each committed group ends
};

struct NamedBarrier {
  unsigned arrived = 0, expected = 0, ones = 0;
  std::vector<Fiber*> waiting, all;
};

struct Cta {
  Cluster* cluster = nullptr;
  unsigned rank = 0, alive = 0;
  u64 window = 0;  ///< address of its shared memory
  std::array<unsigned, 3> id{};
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Fiber[]>> fibers;
  std::array<NamedBarrier, 16> barriers;
};

/// Something that happens at a later moment: a copy by another unit that lands.
struct Event {
  Cta* cta;
  std::function<void()> run;
};

struct Accesses;

struct Cluster {
  std::vector<Cta> ctas;
  std::shared_ptr<Accesses> accesses;  ///< where races are looked for
  unsigned alive = 0;
  bool finished = false;
  unsigned arrived = 0;  ///< at the cluster's barrier
  u32 phase = 0;         ///< of that barrier
  std::vector<Fiber*> waiting;
  std::vector<Fiber*> at_mbarriers;
  std::vector<Event> events;
};

struct LaunchRequest {
  std::string name;
  void (*entry)(Thread*);
  std::array<unsigned, 3> grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
  unsigned static_smem = 0, dynamic_smem = 0;
  bool cooperative = false;
  u64 params = 0;
  const u64* symbols = nullptr;
  /// Text of an instruction and its place in the source.
  std::function<std::string(unsigned at)> describe;
};

/// Empty if the grid ran to its end, else what went wrong, which has been printed too.
std::string run_grid(const LaunchRequest& request);

// For the instructions' own files.

inline Fiber* fiber(Thread* t) { return static_cast<Fiber*>(t); }
u32 random_bits();
[[noreturn]] void fail(Fiber* f, u32 at, const std::string& what);
/// Waits until another fiber or an event calls wake().
void block(Fiber* f, const char* what, u32 at);
void wake(Fiber* f);
/// Runs `run` once all lanes of mask that live have called; returns after that.
void collective(Fiber* f, void (*run)(Warp&, u32 lanes), u32 mask, u32 at, const char* what);
/// Lets others run.
void yield(Fiber* f);
inline void later(Cta* cta, std::function<void()> run) {
  cta->cluster->events.push_back({cta, std::move(run)});
}
/// What has to hold when a thread has ended; called by the machine.
void barriers_after_exit(Fiber* f);
/// Shared address to address, checked: [shared, shared + bytes) lies in a window of the cluster.
void* shared_at(Fiber* f, u32 shared, u32 bytes, u32 at);

}  // namespace emulator
