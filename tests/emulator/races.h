// SPDX-License-Identifier: Apache-2.0
// Races over shared memory: two accesses to a word, one of them a write, that nothing orders.
// Looked for where MORTAR_EMULATOR_RACES is set.
//
// Every thread of a cluster has a vector clock (Fidge, 1988): of each other thread, up to when what
// that did lies before what this one does. Barriers of the block, of a warp and of the cluster,
// mbarriers, st.async and accesses that are atomic or volatile carry clocks on; shuffles do not. A
// thread that only arrives at a barrier of the block is taken to wait there, and phases of an
// mbarrier are not told apart, so a race may be missed, but none is reported that is ordered.
#pragma once

#include <vector>

#include "machine.h"

namespace emulator {

enum class AccessKind : u32 { kRead, kWrite, kOrdering };

bool looks_for_races();
/// Nothing has been accessed yet: before a cluster runs.
void forget_accesses(Cluster& cluster);
/// What these threads did lies before what they do from now on.
void order(const std::vector<Fiber*>& threads);
/// What f did lies before what those do that receive from `place` later.
void send_order(Fiber* f, u64 place);
void receive_order(Fiber* f, u64 place);
/// The same by a copy that lands later: f's clock now, empty where races are not looked for.
std::vector<u32> order_so_far(Fiber* f);
void send_order(Fiber* f, u64 place, const std::vector<u32>& so_far);
/// Calls fail() where another thread's access is not ordered with this one. Of other memory than
/// shared memory nothing is noted.
void note_access(Fiber* f, u64 address, u32 bytes, AccessKind kind, u32 at);
/// Bytes that a copy of another unit wrote, which an mbarrier tells of.
void note_copied(Fiber* f, u64 address, u32 bytes);

}  // namespace emulator
