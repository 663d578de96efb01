// SPDX-License-Identifier: Apache-2.0
// A random multi-LoRA problem and its operands on one device, with copies on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/int_math.h"
#include "guarded_tensor.h"
#include "mortar/lora.h"

namespace mortar::testing {

/// How tokens map to adapters.
enum class Map { kRandom, kAllBase, kOneAdapter, kDistinct, kOutOfRange };

struct LoraCase {
  std::string name;
  std::int64_t tokens = 7;
  std::int64_t hidden = 96;
  std::vector<std::int64_t> widths{40};
  int adapters = 3;
  std::vector<int> ranks{8};  ///< of adapter a, slice s (slices differ in tables only), cycled
  DType x = DType::kFloat32, w = DType::kFloat32, y = DType::kFloat32;
  Map map = Map::kRandom;
  bool table = false;     ///< pointers instead of stacked tensors
  bool one_rank = false;  ///< stacked without a tensor of ranks, which are all the same
  bool segments = false;  ///< segment tensors instead of a plan
  bool add = true;
  bool strided = false;  ///< misaligned, with gaps between rows
  std::int64_t offset = 0;
  float scale = 0.5f;
};
inline void PrintTo(const LoraCase& c, std::ostream* out) { *out << c.name; }

inline std::vector<std::int32_t> make_map(const LoraCase& c, std::mt19937& rng) {
  std::vector<std::int32_t> map(c.tokens);
  std::uniform_int_distribution<std::int32_t> any(-1, c.adapters - 1);
  const std::int32_t wild[] = {-2,
                               -1000,
                               c.adapters,
                               c.adapters + 7,
                               std::numeric_limits<std::int32_t>::max(),
                               std::numeric_limits<std::int32_t>::min()};
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    switch (c.map) {
      case Map::kRandom:
        map[t] = any(rng);
        break;
      case Map::kAllBase:
        map[t] = -1;
        break;
      case Map::kOneAdapter:
        map[t] = c.adapters - 1;
        break;
      case Map::kDistinct:
        map[t] = static_cast<std::int32_t>((t * 7 + 3) % c.adapters);
        break;
      case Map::kOutOfRange:
        map[t] = t % 3 == 1 ? wild[t % 6] : any(rng);
        break;
    }
  }
  return map;
}

class LoraOperands {
 public:
  LoraOperands(const LoraCase& lora_case, Device on, unsigned seed = 1) : c(lora_case), device(on) {
    std::mt19937 rng(seed);
    const Layout layout = c.strided ? Layout{1, 3} : Layout{};
    x = GuardedTensor(c.x, {c.tokens, c.hidden}, layout, on);
    x.fill_random(rng);
    x.upload();
    y = GuardedTensor(c.y, {c.tokens, c.offset + total_width() + (c.strided ? 5 : 0)}, layout, on);
    y.fill_random(rng);
    y.upload();
    for (int a = 0; a < c.adapters; ++a) {
      for (int s = 0; s < slices(); ++s) max_rank_ = std::max(max_rank_, rank_of(a, s));
    }
    std::mt19937 weights_rng(seed + 1000);  // batches of any size share their weights
    c.table ? make_table(weights_rng) : make_stacked(weights_rng);
    set_map(make_map(c, rng));
  }

  int slices() const { return static_cast<int>(c.widths.size()); }
  int max_rank() const { return max_rank_; }
  std::int64_t total_width() const {
    return std::accumulate(c.widths.begin(), c.widths.end(), std::int64_t{0});
  }

  LoraWeights weights() const { return weights_of(false); }
  LoraWeights host_weights() const { return weights_of(true); }

  /// Changes the map and rebuilds the groups in place, as a serving step does.
  void set_map(std::vector<std::int32_t> new_map) {
    map = std::move(new_map);
    if (!has_map_) {
      token_adapter = int_tensor(map, device);
      plan = GuardedTensor(DType::kInt32, {lora_plan_size(c.tokens, c.adapters)}, {}, device);
      has_map_ = true;
    }
    std::copy(map.begin(), map.end(), token_adapter.data<std::int32_t>());
    token_adapter.upload();
    if (c.segments) {
      make_segments();
    } else {
      lora_plan(token_adapter.view(), c.adapters, plan.view(), Stream{});
    }
  }

  /// Changes a value of stacked B.
  void set_b(int slice, std::int64_t adapter, std::int64_t column, int rank, float value) {
    GuardedTensor& b = b_[slice];
    const Tensor t = b.host();
    b.set(adapter * t.strides[0] + column * t.strides[1] + rank, value);
    b.upload();
  }

  LoraGroups groups() const {
    return c.segments ? LoraGroups::from_segments(sorted_.view(), ids_.view(), counts_.view(),
                                                  starts_.view())
                      : LoraGroups::from_plan(plan.view(), c.tokens, c.adapters);
  }

  /// Of exactly the size that lora_apply or lora_shrink asks for.
  GuardedTensor apply_workspace() const {
    return byte_tensor(lora_apply_workspace(x.view(), weights()), device);
  }
  GuardedTensor shrink_workspace() const {
    return byte_tensor(lora_shrink_workspace(x.view(), weights()), device);
  }

  const LoraCase c;
  const Device device;
  std::vector<std::int32_t> map;
  GuardedTensor x, y, token_adapter, plan;

 private:
  int rank_of(int adapter, int slice) const {
    return c.ranks[(adapter + (c.table ? slice : 0)) % c.ranks.size()];
  }
  float scale_of(int adapter) const { return 0.25f + 0.5f * static_cast<float>(adapter % 4); }

  /// Rows past an adapter's own rank stay NaN: nothing may read them.
  void make_stacked(std::mt19937& rng) {
    const Layout layout = c.strided ? Layout{1, 1} : Layout{};
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int s = 0; s < slices(); ++s) {
      GuardedTensor a(c.w, {c.adapters, max_rank_, c.hidden}, layout, device);
      GuardedTensor b(c.w, {c.adapters, c.widths[s], max_rank_}, layout, device);
      const Tensor ta = a.host(), tb = b.host();
      for (int l = 0; l < c.adapters; ++l) {
        for (int r = 0; r < rank_of(l, s); ++r) {
          for (std::int64_t k = 0; k < c.hidden; ++k) {
            a.set(l * ta.strides[0] + r * ta.strides[1] + k, uniform(rng));
          }
          for (std::int64_t n = 0; n < c.widths[s]; ++n) {
            b.set(l * tb.strides[0] + n * tb.strides[1] + r, uniform(rng));
          }
        }
      }
      a.upload();
      b.upload();
      a_.push_back(std::move(a));
      b_.push_back(std::move(b));
    }
    ranks_ = GuardedTensor(DType::kInt32, {c.adapters}, {}, device);
    scales_ = GuardedTensor(DType::kFloat32, {c.adapters}, {}, device);
    for (int l = 0; l < c.adapters; ++l) {
      ranks_.data<std::int32_t>()[l] = rank_of(l, 0);
      scales_.data<float>()[l] = scale_of(l);
    }
    ranks_.upload();
    scales_.upload();
  }

  /// Elements of a matrix with what keeps the next one 16-byte aligned.
  std::int64_t padded(std::int64_t elements) const {
    return round_up<std::int64_t>(elements, 16 / dtype_size(c.w));
  }

  /// All matrices of a slice lie in one pool, NaN between them.
  void make_table(std::mt19937& rng) {
    table_ = GuardedTensor(DType::kInt64, {c.adapters, slices(), 4}, {}, device);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int s = 0; s < slices(); ++s) {
      std::int64_t total_a = 0, total_b = 0;
      for (int l = 0; l < c.adapters; ++l) {
        total_a += padded(rank_of(l, s) * c.hidden);
        total_b += padded(rank_of(l, s) * c.widths[s]);
      }
      GuardedTensor a(c.w, {total_a}, {}, device), b(c.w, {total_b}, {}, device);
      std::int64_t at_a = 0, at_b = 0;
      for (int l = 0; l < c.adapters; ++l) {
        const std::int64_t rank = rank_of(l, s);
        for (std::int64_t i = 0; i < rank * c.hidden; ++i) a.set(at_a + i, uniform(rng));
        for (std::int64_t i = 0; i < rank * c.widths[s]; ++i) b.set(at_b + i, uniform(rng));
        LoraTableEntry& e = table_.data<LoraTableEntry>()[l * slices() + s];
        e.a = reinterpret_cast<std::uint64_t>(a.view().data) + at_a * dtype_size(c.w);
        e.b = reinterpret_cast<std::uint64_t>(b.view().data) + at_b * dtype_size(c.w);
        e.rank = static_cast<std::int32_t>(rank);
        e.scale = scale_of(l);
        e.unused = 0;
        if (rank == 0 && s % 2 == 0) e.a = e.b = 0;  // both ways to leave a slice alone
        at_a += padded(rank * c.hidden);
        at_b += padded(rank * c.widths[s]);
      }
      a.upload();
      b.upload();
      a_.push_back(std::move(a));
      b_.push_back(std::move(b));
    }
    table_.upload();
    make_host_table();
  }

  void make_host_table() {
    host_table_ = GuardedTensor(DType::kInt64, {c.adapters, slices(), 4});
    for (int s = 0; s < slices(); ++s) {
      for (int l = 0; l < c.adapters; ++l) {
        LoraTableEntry& e = host_table_.data<LoraTableEntry>()[l * slices() + s];
        e = table_.data<LoraTableEntry>()[l * slices() + s];
        if (e.a == 0) continue;
        const auto move = [](std::uint64_t p, const GuardedTensor& t) {
          return p - reinterpret_cast<std::uint64_t>(t.view().data) +
                 reinterpret_cast<std::uint64_t>(t.host().data);
        };
        e.a = move(e.a, a_[s]);
        e.b = move(e.b, b_[s]);
      }
    }
  }

  LoraWeights weights_of(bool host) const {
    if (c.table) {
      return LoraWeights::from_table(host ? host_table_.host() : table_.view(), c.w, max_rank_,
                                     c.hidden, c.widths);
    }
    std::vector<Tensor> a, b;
    for (int s = 0; s < slices(); ++s) {
      a.push_back(host ? a_[s].host() : a_[s].view());
      b.push_back(host ? b_[s].host() : b_[s].view());
    }
    const Tensor ranks = c.one_rank ? Tensor{} : host ? ranks_.host() : ranks_.view();
    return LoraWeights::stacked(a, b, ranks, host ? scales_.host() : scales_.view());
  }

  /// In the manner of vLLM's tables: base tokens first as a group of -1, then the adapters in use,
  /// then unused groups; entries of sorted_tokens past the counts are stale.
  void make_segments() {
    std::vector<std::int32_t> sorted, ids, counts, starts;
    for (std::int32_t id = -1; id < c.adapters; ++id) {
      const auto start = static_cast<std::int32_t>(sorted.size());
      for (std::int64_t t = 0; t < c.tokens; ++t) {
        const bool base = map[t] < 0 || map[t] >= c.adapters;
        if (base ? id == -1 : map[t] == id) sorted.push_back(static_cast<std::int32_t>(t));
      }
      if (static_cast<std::int64_t>(sorted.size()) == start) continue;
      ids.push_back(id);
      starts.push_back(start);
      counts.push_back(static_cast<std::int32_t>(sorted.size()) - start);
    }
    ids.resize(c.adapters + 1, -1);
    counts.resize(c.adapters + 1, 0);
    starts.resize(c.adapters + 2, 1 << 30);
    sorted.push_back(1 << 30);
    sorted.push_back(-5);
    sorted_ = int_tensor(sorted, device);
    ids_ = int_tensor(ids, device);
    counts_ = int_tensor(counts, device);
    starts_ = int_tensor(starts, device);
  }

  bool has_map_ = false;
  int max_rank_ = 0;
  std::vector<GuardedTensor> a_, b_;
  GuardedTensor ranks_, scales_, table_, host_table_;
  GuardedTensor sorted_, ids_, counts_, starts_;
};

}  // namespace mortar::testing
