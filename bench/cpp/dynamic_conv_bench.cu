// SPDX-License-Identifier: Apache-2.0
// Times the dynamic convolution on one GPU against its byte floor.
//
// Every row is the median over graph replays of calls on buffers that rotate past the L2, so that
// each call finds its inputs in DRAM. `floor` is bytes / 4.28 TB/s, the copy rate of an H200 that
// docs and targets use; the copy rate of the machine at hand is printed first.
// Usage: dynamic_conv_bench [--brief] [--steps N] [--threads N]
//        --brief: the rows that launch choices are tuned on; --steps, --threads: other choices
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "device/launch.cuh"
#include "dynamic_conv/cuda/backend.cuh"

namespace mortar::dynamic_conv {
namespace {

using device::cuda_check;

constexpr double kFloorBandwidth = 4.28e12;
constexpr std::int64_t kColdBytes = 512 << 20;  ///< touched between two uses of a buffer

__global__ void fill_kernel(unsigned* p, std::int64_t words, unsigned seed) {
  // Two bf16 of magnitude 0.5 to 2 and random sign and mantissa a word.
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < words;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    unsigned h = static_cast<unsigned>(i) * 2654435761u + seed;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    p[i] = (h & 0x80ff80ffu) | 0x3f003f00u;
  }
}

class Buffer {
 public:
  explicit Buffer(std::int64_t bytes) {
    cuda_check(cudaMalloc(&data_, static_cast<std::size_t>(bytes + 16)), "bench");
    fill_kernel<<<1024, 256>>>(static_cast<unsigned*>(data_), bytes / 4, 12345u);
  }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  ~Buffer() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

cudaStream_t stream() {
  static cudaStream_t s = [] {
    cudaStream_t created;
    cuda_check(cudaStreamCreate(&created), "bench");
    return created;
  }();
  return s;
}

/// Median microseconds of call(set) over replays of one graph of at least `calls` calls.
double time_us(int sets, int calls, const std::function<void(int)>& call) {
  calls = (calls + sets - 1) / sets * sets;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cuda_check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), "bench");
  for (int i = 0; i < calls; ++i) call(i % sets);
  cuda_check(cudaStreamEndCapture(stream(), &graph), "bench");
  cuda_check(cudaGraphInstantiate(&executable, graph, 0), "bench");
  cudaEvent_t start, stop;
  cuda_check(cudaEventCreate(&start), "bench");
  cuda_check(cudaEventCreate(&stop), "bench");
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    cuda_check(cudaEventRecord(start, stream()), "bench");
    cuda_check(cudaGraphLaunch(executable, stream()), "bench");
    cuda_check(cudaEventRecord(stop, stream()), "bench");
    cuda_check(cudaEventSynchronize(stop), "bench");
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, start, stop), "bench");
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return 1e3 * times[times.size() / 2] / calls;
}

int sets_for(std::int64_t bytes) {
  return static_cast<int>(std::clamp<std::int64_t>(kColdBytes / bytes + 1, 2, 64));
}

struct Row {
  std::string name;
  std::int64_t batch, time, channels;
  int width;
  DType dtype = DType::kBFloat16;
  bool silu = false;
  int sequences = 0;  ///< packed
  int state_length = 0;
};

void report(const Row& r, const char* pass, double us, double bytes, double fixed, double factor) {
  const double floor = 1e6 * bytes / kFloorBandwidth, target = fixed + factor * floor;
  std::printf("%-9s %-34s %9.2f us  floor %8.2f  x%.3f  must %8.2f  %s\n", pass, r.name.c_str(), us,
              floor, us / floor, target, us <= target ? "ok" : "MISSED");
  std::fflush(stdout);
}

class Bench {
 public:
  explicit Bench(const CudaConfig* config) : config_(config) {}

  void copy_roof() {
    for (std::int64_t megabytes : {8, 32, 128, 1024}) {
      const std::int64_t bytes = megabytes << 20;
      const int sets = sets_for(2 * bytes);
      std::vector<Buffer> from, to;
      for (int i = 0; i < sets; ++i) {
        from.emplace_back(bytes);
        to.emplace_back(bytes);
      }
      const double us = time_us(sets, 20, [&](int i) {
        cudaMemcpyAsync(to[static_cast<std::size_t>(i)].data(),
                        from[static_cast<std::size_t>(i)].data(), static_cast<std::size_t>(bytes),
                        cudaMemcpyDeviceToDevice, stream());
      });
      std::printf("copy of %5lld MiB: %9.2f us, %.2f TB/s\n", static_cast<long long>(megabytes), us,
                  2e-6 * static_cast<double>(bytes) / us);
    }
  }

  void forward_and_backward(const Row& r) {
    const std::int64_t e = dtype_size(r.dtype), tokens = r.batch * r.time * r.channels;
    const auto traffic =
        dynamic_conv_traffic(r.batch, r.time, r.channels, r.width, r.state_length, e, e);
    Shape shape;
    shape.batch = r.batch;
    shape.time = static_cast<int>(r.time);
    shape.channels = r.channels;
    shape.width = r.width;
    shape.state_length = r.state_length;
    shape.x_dtype = shape.k_dtype = r.dtype;
    shape.silu = r.silu;
    shape.sequences = {nullptr, false, static_cast<int>(r.batch), shape.time};
    const Buffer starts = make_starts(r, &shape);
    const std::int64_t state = shape.sequences.count * r.channels * r.state_length;
    const auto signal = [&](const Buffer& b, int width) {
      return Signal{b.data(), r.time * r.channels * width, r.channels * width};
    };
    const auto state_view = [&](const Buffer& b) {
      return r.state_length == 0 ? State{}
                                 : State{b.data(), r.channels * r.state_length, r.state_length, 1};
    };
    {
      const int sets = sets_for(traffic.forward);
      std::vector<Buffer> x, k, y, initial, final;
      for (int i = 0; i < sets; ++i) {
        x.emplace_back(tokens * e);
        k.emplace_back(tokens * r.width * e);
        y.emplace_back(tokens * e);
        initial.emplace_back(state * e);
        final.emplace_back(state * e);
      }
      const double us = time_us(sets, 20, [&](int i) {
        const auto s = static_cast<std::size_t>(i);
        ForwardProblem p{shape,           signal(x[s], 1),        signal(k[s], r.width),
                         signal(y[s], 1), state_view(initial[s]), state_view(final[s])};
        cuda::forward(p, config_, {stream()});
      });
      report(r, "forward", us, static_cast<double>(traffic.forward), 2, r.width == 4 ? 1.15 : 1.3);
    }
    const int sets = sets_for(traffic.backward);
    std::vector<Buffer> x, k, dy, dx, dk, initial, dfinal, dinitial;
    for (int i = 0; i < sets; ++i) {
      for (auto* list : {&x, &dy, &dx}) list->emplace_back(tokens * e);
      for (auto* list : {&k, &dk}) list->emplace_back(tokens * r.width * e);
      for (auto* list : {&initial, &dfinal, &dinitial}) list->emplace_back(state * e);
    }
    const double us = time_us(sets, 20, [&](int i) {
      const auto s = static_cast<std::size_t>(i);
      BackwardProblem p{shape,
                        signal(x[s], 1),
                        signal(k[s], r.width),
                        signal(dy[s], 1),
                        signal(dx[s], 1),
                        signal(dk[s], r.width),
                        state_view(initial[s]),
                        state_view(dfinal[s]),
                        state_view(dinitial[s])};
      cuda::backward(p, config_, {stream()});
    });
    report(r, "backward", us, static_cast<double>(traffic.backward), 2, r.width == 4 ? 1.25 : 1.3);
  }

  void step(const Row& r, bool slots) {
    const std::int64_t e = dtype_size(r.dtype), n = r.batch * r.channels;
    const auto traffic =
        dynamic_conv_traffic(r.batch, 1, r.channels, r.width, r.state_length, e, e);
    const int sets = sets_for(traffic.step);
    std::vector<Buffer> x, k, y, state;
    for (int i = 0; i < sets; ++i) {
      x.emplace_back(n * e);
      k.emplace_back(n * r.width * e);
      y.emplace_back(n * e);
      state.emplace_back(n * r.state_length * e);
    }
    std::vector<std::int32_t> order(static_cast<std::size_t>(r.batch));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));
    const Buffer slot_buffer(r.batch * 4);
    cuda_check(cudaMemcpy(slot_buffer.data(), order.data(), order.size() * 4, cudaMemcpyDefault),
               "bench");
    const double us = time_us(sets, 64, [&](int i) {
      const auto s = static_cast<std::size_t>(i);
      StepProblem p;
      p.rows = p.num_slots = r.batch;
      p.channels = r.channels;
      p.width = r.width;
      p.state_length = r.state_length;
      p.x_dtype = p.k_dtype = r.dtype;
      p.silu = r.silu;
      p.x = {x[s].data(), r.channels, 0};
      p.k = {k[s].data(), r.channels * r.width, 0};
      p.y = {y[s].data(), r.channels, 0};
      p.state = {state[s].data(), r.channels * r.state_length, r.state_length, 1};
      if (slots) p.slots = static_cast<const std::int32_t*>(slot_buffer.data());
      cuda::step(p, {stream()});
    });
    report(r, slots ? "step/slot" : "step", us, static_cast<double>(traffic.step), 2.5, 1.3);
  }

 private:
  /// Random boundaries, as cu_seqlens on the device.
  static Buffer make_starts(const Row& r, Shape* shape) {
    std::vector<std::int32_t> starts = {0, static_cast<std::int32_t>(r.time)};
    std::mt19937 rng(7);
    std::uniform_int_distribution<std::int32_t> place(0, static_cast<std::int32_t>(r.time));
    while (static_cast<int>(starts.size()) < r.sequences + 1) starts.push_back(place(rng));
    std::sort(starts.begin(), starts.end());
    Buffer buffer(static_cast<std::int64_t>(starts.size()) * 4);
    cuda_check(cudaMemcpy(buffer.data(), starts.data(), starts.size() * 4, cudaMemcpyDefault),
               "bench");
    if (r.sequences > 0) {
      shape->sequences.starts = buffer.data();
      shape->sequences.count = r.sequences;
    }
    return buffer;
  }

  const CudaConfig* config_;
};

int run(int argc, char** argv) {
  CudaConfig config;
  const CudaConfig* chosen = nullptr;
  bool brief = false;
  for (int i = 1; i < argc; ++i) {
    brief |= std::strcmp(argv[i], "--brief") == 0;
    if (i + 1 == argc) break;
    if (std::strcmp(argv[i], "--steps") == 0)
      config.steps = std::atoi(argv[i + 1]), chosen = &config;
    if (std::strcmp(argv[i], "--threads") == 0)
      config.threads = std::atoi(argv[i + 1]), chosen = &config;
  }
  Bench bench(chosen);
  if (brief) {  // the rows that launch choices are tuned on
    bench.forward_and_backward({"1x4096x3072 W4", 1, 4096, 3072, 4});
    bench.forward_and_backward({"8x4096x3072 W4", 8, 4096, 3072, 4});
    return 0;
  }
  bench.copy_roof();
  for (const Row& r : std::vector<Row>{
           {"1x4096x3072 W4", 1, 4096, 3072, 4},
           {"8x4096x3072 W4", 8, 4096, 3072, 4},
           {"4x16384x2048 W4", 4, 16384, 2048, 4},
           {"32x512x3072 W4", 32, 512, 3072, 4},
           {"1x512x3072 W4", 1, 512, 3072, 4},
           {"8x4096x3072 W4 silu", 8, 4096, 3072, 4, DType::kBFloat16, true},
           {"8x4096x3072 W4 states", 8, 4096, 3072, 4, DType::kBFloat16, true, 0, 4},
           {"1x32768x3072 W4", 1, 32768, 3072, 4},
           {"1x32768x3072 W4 1000 seq", 1, 32768, 3072, 4, DType::kBFloat16, false, 1000},
           {"1x32768x3072 W4 1000 seq states", 1, 32768, 3072, 4, DType::kBFloat16, false, 1000, 4},
           {"8x4096x3072 W1", 8, 4096, 3072, 1},
           {"8x4096x3072 W2", 8, 4096, 3072, 2},
           {"8x4096x3072 W3", 8, 4096, 3072, 3},
           {"8x4096x3072 W5", 8, 4096, 3072, 5},
           {"8x4096x3072 W6", 8, 4096, 3072, 6},
           {"8x4096x3072 W7", 8, 4096, 3072, 7},
           {"8x4096x3072 W8", 8, 4096, 3072, 8},
           {"4x4096x3072 W4 float32", 4, 4096, 3072, 4, DType::kFloat32},
           {"8x4096x3072 W4 float16", 8, 4096, 3072, 4, DType::kFloat16},
           {"8x4096x3071 W4 (scalar)", 8, 4096, 3071, 4},
       }) {
    bench.forward_and_backward(r);
  }
  for (std::int64_t rows : {1, 32, 128, 1024}) {
    const std::string name = std::to_string(rows) + " rows x 3072 W4";
    bench.step({name + " L4", rows, 1, 3072, 4, DType::kBFloat16, true, 0, 4}, false);
    bench.step({name + " L4", rows, 1, 3072, 4, DType::kBFloat16, true, 0, 4}, true);
    bench.step({name + " L3", rows, 1, 3072, 4, DType::kBFloat16, true, 0, 3}, true);
  }
  bench.step({"128 rows x 2048 W4 L4", 128, 1, 2048, 4, DType::kBFloat16, true, 0, 4}, false);
  for (int width : {2, 3, 8}) {
    bench.step({"128 rows x 3072 W" + std::to_string(width), 128, 1, 3072, width, DType::kBFloat16,
                true, 0, width},
               true);
  }
  return 0;
}

}  // namespace
}  // namespace mortar::dynamic_conv

int main(int argc, char** argv) { return mortar::dynamic_conv::run(argc, argv); }
