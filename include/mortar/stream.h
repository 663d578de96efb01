// SPDX-License-Identifier: Apache-2.0
// The explicit stream that every op takes.
#pragma once

namespace mortar {

/// An ordered queue of device work. For CUDA tensors `handle` is a cudaStream_t (null is the
/// default stream); for CPU tensors it is ignored and the op has finished when it returns.
struct Stream {
  void* handle = nullptr;
};

}  // namespace mortar
