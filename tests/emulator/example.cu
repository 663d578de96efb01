// SPDX-License-Identifier: Apache-2.0
// Kernels that show what the emulator notices: example CASE prints "right", "wrong" or the error.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int kThreads = 128;

/// Turns a block's numbers round, by way of shared memory.
__global__ void turn(const int* from, int* to, int count) {
  __shared__ int numbers[kThreads];
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) numbers[i] = from[i];
  __syncthreads();
  if (i < count) to[i] = numbers[count - 1 - i];
}

/// The same with an asynchronous copy, which the thread that made it waits for.
__global__ void turn_copies(const int* from, int* to, int count) {
  __shared__ int numbers[kThreads];
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) {
    const auto at = static_cast<unsigned>(__cvta_generic_to_shared(numbers + i));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from + i) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  if (i < count) to[i] = numbers[count - 1 - i];
}

/// The same, by way of a word to which every thread writes the same number.
__global__ void turn_same(const int* from, int* to, int count) {
  __shared__ int numbers[kThreads], last;
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) numbers[i] = from[i];
  last = count - 1;
  __syncthreads();
  if (i < count) to[i] = numbers[last - i];
}

/// The same, by way of a word of each warp that its first lane writes before a shuffle, which
/// orders no memory.
__global__ void turn_told(const int* from, int* to, int count) {
  __shared__ int numbers[kThreads], last[kThreads];
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) numbers[i] = from[i];
  __syncthreads();
  if (i % 32 == 0) last[i] = count - 1;
  const int first = __shfl_sync(~0u, i, 0);
  const int end = last[first];
  if (i < count) to[i] = numbers[end - i];
}

/// The sum over a warp of each lane's number, in every lane.
__global__ void sum(const int* from, int* to, int) {
  int v = from[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  to[threadIdx.x] = v;
}

}  // namespace

int main(int argc, char** argv) {
  const char* name = argc > 1 ? argv[1] : "";
  const int past = argc > 2 ? std::atoi(argv[2]) : 0;  // how far the kernel reads past the input
  const int count = std::strcmp(name, "sum") == 0 ? 32 : 100;
  std::vector<int> in(count), out(count), wanted(count);
  int total = 0;
  for (int i = 0; i < count; ++i) total += in[i] = 3 * i + 1;
  for (int i = 0; i < count; ++i) wanted[i] = count == 32 ? total : in[count - 1 - i];
  int *from = nullptr, *to = nullptr;
  cudaMalloc(&from, count * sizeof(int));
  cudaMalloc(&to, (count + past) * sizeof(int));
  cudaMemcpy(from, in.data(), count * sizeof(int), cudaMemcpyHostToDevice);
  auto* kernel = count == 32                      ? &sum
                 : std::strcmp(name, "turn") == 0 ? &turn
                 : std::strcmp(name, "same") == 0 ? &turn_same
                 : std::strcmp(name, "told") == 0 ? &turn_told
                                                  : &turn_copies;
  kernel<<<1, count == 32 ? 32 : kThreads>>>(from, to, count + past);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    std::puts(error == cudaErrorIllegalAddress ? "illegal address" : cudaGetErrorString(error));
    return 1;
  }
  cudaMemcpy(out.data(), to, count * sizeof(int), cudaMemcpyDeviceToHost);
  std::puts(out == wanted ? "right" : "wrong");
  return out == wanted ? 0 : 1;
}
