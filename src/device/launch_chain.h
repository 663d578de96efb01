// SPDX-License-Identifier: Apache-2.0
// The kernels of one op, handed to the driver together: as a graph that is kept and gets the
// parameters of each call. For two kernels that is 3.8 us of host time on an H200's host where two
// launches are 5.3; for one 3.4 against 2.9, so a lone kernel is launched.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>

#include "device/driver.h"

namespace mortar::device {

/// Launches that wait for the end of their op, and the graphs of earlier such ops. For calls on one
/// stream, one at a time: a graph does not run beside itself. Takes about 100 KB of the device per
/// graph. What cannot be in a graph is launched by itself.
class LaunchChain {
 public:
  static constexpr int kMaxKernels = 3;
  static constexpr int kMaxGraphs = 8;  ///< a ninth combination of kernels replaces the oldest
  static constexpr std::size_t kMaxParams = 1024;

  LaunchChain() = default;
  LaunchChain(const LaunchChain&) = delete;
  LaunchChain& operator=(const LaunchChain&) = delete;
  ~LaunchChain() {
    for (Graph& graph : graphs_) graph.destroy();
  }

  /// The chain of this thread's launches; null: they start at once.
  static LaunchChain*& active() {
    static thread_local LaunchChain* chain = nullptr;
    return chain;
  }

  /// Keeps a launch. False if it must be made by itself; those before it have been made then.
  bool add(const CUlaunchConfig& config, CUfunction function, const void* params, std::size_t bytes,
           const char* op) {
    if (bytes > kMaxParams || size_ == kMaxKernels) {
      submit(op);
      return false;
    }
    Kernel& kernel = kernels_[size_++];
    kernel.config = config;
    for (unsigned i = 0; i < config.numAttrs; ++i) kernel.attributes[i] = config.attrs[i];
    kernel.config.attrs = kernel.attributes;
    kernel.function = function;
    std::memcpy(kernel.params, params, bytes);
    return true;
  }

  /// Makes the launches that wait.
  void submit(const char* op) {
    const int size = size_;
    size_ = 0;
    if (size > 1) {
      Graph* graph = find(size);
      if (graph != nullptr && set(*graph)) {
        const CUstream stream = kernels_[0].config.hStream;
        return cuda_check(Driver::get().launch_graph(graph->exec, stream), op);
      }
    }
    for (int i = 0; i < size; ++i) cuda_check(launch(i, kernels_[i].config.hStream), op);
  }

  /// Forgets them, as after an error.
  void clear() { size_ = 0; }

 private:
  struct Kernel {
    CUlaunchConfig config;
    CUlaunchAttribute attributes[3];
    CUfunction function;
    alignas(16) std::byte params[kMaxParams];

    /// CTAs of a cluster, which a graph cannot change.
    unsigned cluster() const {
      for (unsigned i = 0; i < config.numAttrs; ++i) {
        if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
          return attributes[i].value.clusterDim.y;
        }
      }
      return 1;
    }
  };

  struct Graph {
    int size = 0;
    std::array<CUfunction, kMaxKernels> functions{};
    std::array<unsigned, kMaxKernels> clusters{};
    std::array<CUgraphNode, kMaxKernels> nodes{};
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;  ///< null: these kernels do not go into a graph

    /// Safe while it runs: the driver frees it afterwards.
    void destroy() {
      if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
      *this = {};
    }
  };

  CUresult launch(int i, CUstream stream) {
    CUlaunchConfig config = kernels_[i].config;
    config.hStream = stream;
    void* arguments[] = {kernels_[i].params};
    return Driver::get().launch(&config, kernels_[i].function, arguments, nullptr);
  }

  /// The graph of the kernels that wait, made where there is none; null: not possible.
  Graph* find(int size) {
    for (Graph& graph : graphs_) {
      bool same = graph.size == size;
      for (int i = 0; same && i < size; ++i) {
        same = graph.functions[i] == kernels_[i].function &&
               graph.clusters[i] == kernels_[i].cluster();
      }
      if (same) return graph.exec != nullptr ? &graph : nullptr;
    }
    Graph& graph = graphs_[next_];
    next_ = (next_ + 1) % kMaxGraphs;
    graph.destroy();
    // Captures of other threads stay valid.
    auto mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    make(graph, size);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return graph.exec != nullptr ? &graph : nullptr;
  }

  void make(Graph& graph, int size) {
    graph.size = size;
    for (int i = 0; i < size; ++i) {
      graph.functions[i] = kernels_[i].function;
      graph.clusters[i] = kernels_[i].cluster();
    }
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess) {
      bool ok = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess;
      if (ok) {
        for (int i = 0; i < size; ++i) ok = launch(i, stream) == CUDA_SUCCESS && ok;
        ok = cudaStreamEndCapture(stream, &graph.graph) == cudaSuccess && ok;
      }
      ok = ok && find_nodes(graph) && cudaGraphInstantiate(&graph.exec, graph.graph, 0) == 0;
      if (!ok) graph.exec = nullptr;
      (void)cudaStreamDestroy(stream);
    }
    (void)cudaGetLastError();
  }

  /// Which node each kernel became: they are told apart by their functions.
  static bool find_nodes(Graph& graph) {
    std::array<CUgraphNode, kMaxKernels> nodes{};
    std::size_t count = nodes.size();
    if (cudaGraphGetNodes(graph.graph, nodes.data(), &count) != cudaSuccess) return false;
    if (count != static_cast<std::size_t>(graph.size)) return false;
    for (int i = 0; i < graph.size; ++i) {
      int found = 0;
      for (int j = 0; j < graph.size; ++j) {
        CUDA_KERNEL_NODE_PARAMS params{};
        if (Driver::get().get_node(nodes[j], &params) != CUDA_SUCCESS) return false;
        if (params.func != graph.functions[i]) continue;
        graph.nodes[i] = nodes[j];
        ++found;
      }
      if (found != 1) return false;
    }
    return true;
  }

  /// Gives the graph the parameters of the kernels that wait.
  bool set(const Graph& graph) {
    for (int i = 0; i < graph.size; ++i) {
      const CUlaunchConfig& config = kernels_[i].config;
      void* arguments[] = {kernels_[i].params};
      CUDA_KERNEL_NODE_PARAMS params{};
      params.func = kernels_[i].function;
      params.gridDimX = config.gridDimX;
      params.gridDimY = config.gridDimY;
      params.gridDimZ = config.gridDimZ;
      params.blockDimX = config.blockDimX;
      params.blockDimY = config.blockDimY;
      params.blockDimZ = config.blockDimZ;
      params.sharedMemBytes = config.sharedMemBytes;
      params.kernelParams = arguments;
      if (Driver::get().set_node(graph.exec, graph.nodes[i], &params) != CUDA_SUCCESS) return false;
    }
    return true;
  }

  std::array<Kernel, kMaxKernels> kernels_;
  int size_ = 0;
  std::array<Graph, kMaxGraphs> graphs_{};
  int next_ = 0;
};

/// Gathers this thread's launches in a chain until submit(), or forgets them. For a stream that is
/// not being captured.
class ChainedLaunches {
 public:
  explicit ChainedLaunches(LaunchChain& chain) : chain_(&chain) { LaunchChain::active() = chain_; }
  ~ChainedLaunches() {
    LaunchChain::active() = nullptr;
    chain_->clear();
  }
  ChainedLaunches(const ChainedLaunches&) = delete;
  ChainedLaunches& operator=(const ChainedLaunches&) = delete;

  void submit(const char* op) { chain_->submit(op); }

 private:
  LaunchChain* chain_;
};

}  // namespace mortar::device
