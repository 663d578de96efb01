// SPDX-License-Identifier: Apache-2.0
// A barrier in shared memory on which threads wait and copies report.
#pragma once

#include "machine.h"

namespace emulator {

/// Counts down `arrivals`, and adds `bytes` to (or, negative, takes from) what the phase expects.
void mbarrier_update(Fiber* f, u32 barrier, u32 arrivals, s64 bytes, u32 at);
/// Calls fail() if [shared, shared + bytes) lies in a block of the cluster that has ended.
void require_alive(Fiber* f, u32 shared, u32 at);

}  // namespace emulator
