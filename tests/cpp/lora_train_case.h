// SPDX-License-Identifier: Apache-2.0
// Operands of a LoRA training step with guard bytes around all of them, its run on a device, and
// its comparison with the float64 oracle.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/float_element.h"
#include "guarded_tensor.h"
#include "lora/train/reference.h"
#include "mortar/lora_train.h"

namespace mortar::testing {

enum class RowsBy { kOne, kSegments, kPlan };
enum class BaseIs { kNone, kApart, kInPlace };

struct TrainCase {
  std::string name;
  std::int64_t rows = 37, hidden = 72;
  std::vector<std::int64_t> widths = {56};
  std::vector<int> ranks = {8};  ///< of (adapter, slice) l * S + s, cyclic; 0: no pair
  int adapters = 1;
  DType x = DType::kFloat32, w = DType::kFloat32, y = DType::kFloat32;
  DType grad = DType::kFloat32, dx = DType::kFloat32;
  RowsBy by = RowsBy::kOne;
  BaseIs base = BaseIs::kNone;
  std::vector<float> p = {};
  LoraDropoutOn on = LoraDropoutOn::kInput;
  bool without_rng = false;         ///< of p of 0 and 1, which draw nothing
  bool add = false;                 ///< to dx, da and db
  bool keep_h = true;               ///< else the backward computes it again
  bool transposed = false;          ///< columns of every matrix are dense
  bool transposed_weights = false;  ///< those of A and B alone
  Layout layout = {};
  bool wants_dx = true, wants_da = true, wants_db = true;
  bool empty_segment = false;
};

/// A matrix in a guarded buffer, with dense rows or dense columns.
class GuardedMatrix {
 public:
  GuardedMatrix() = default;
  GuardedMatrix(DType dtype, std::int64_t rows, std::int64_t columns, const TrainCase& c,
                Device device)
      : transposed_(c.transposed),
        memory_(dtype, c.transposed ? std::vector{columns, rows} : std::vector{rows, columns},
                c.layout, device) {}

  GuardedTensor& memory() { return memory_; }
  Tensor view() const { return turned(memory_.view()); }
  Tensor host() const { return turned(memory_.host()); }

 private:
  Tensor turned(Tensor t) const {
    if (!transposed_) return t;
    std::swap(t.shape[0], t.shape[1]);
    std::swap(t.strides[0], t.strides[1]);
    return t;
  }
  bool transposed_ = false;
  GuardedTensor memory_;
};

/// Everything that one step needs, on `device` with a copy on the host.
class TrainStep {
 public:
  TrainStep(const TrainCase& which, Device d) : c(which), device(d), rng_(1234) {
    const int slices = static_cast<int>(c.widths.size());
    make_rows();
    x = matrix(c.x, c.rows, c.hidden, true);
    for (int l = 0; l < c.adapters; ++l) {
      for (int s = 0; s < slices; ++s) {
        const int rank = c.ranks[(l * slices + s) % c.ranks.size()];
        a.push_back(rank > 0 ? matrix(c.w, rank, c.hidden, true, c.transposed_weights)
                             : GuardedMatrix());
        b.push_back(rank > 0 ? matrix(c.w, c.widths[s], rank, true, c.transposed_weights)
                             : GuardedMatrix());
        da.push_back(rank > 0 ? matrix(c.grad, rank, c.hidden, c.add) : GuardedMatrix());
        db.push_back(rank > 0 ? matrix(c.grad, c.widths[s], rank, c.add) : GuardedMatrix());
        ranks_.push_back(rank);
        scales_.push_back(0.5f + 0.25f * static_cast<float>((l + s) % 3));
      }
    }
    for (int s = 0; s < slices; ++s) {
      base.push_back(matrix(c.y, c.rows, c.widths[s], true));
      y.push_back(matrix(c.y, c.rows, c.widths[s], c.base == BaseIs::kInPlace));
      dy.push_back(matrix(c.y, c.rows, c.widths[s], true));
    }
    dx = matrix(c.dx, c.rows, c.hidden, c.add);
    random = GuardedTensor(DType::kInt64, {2}, {}, device);
    random.data<std::int64_t>()[0] = 0x123456789abcdef;
    random.data<std::int64_t>()[1] = -77;
    random.upload();
    const std::int64_t width = lora_train_hidden_width(problem(true));
    h = GuardedTensor(c.w, {c.rows, width}, {}, device);
  }

  /// The arguments of a call, with device or host tensors; valid until the next call.
  LoraTrainProblem problem(bool host) {
    pairs_.clear();
    LoraTrainProblem p;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      LoraTrainPair pair;
      if (ranks_[i] > 0) pair = {get(a[i], host), get(b[i], host), scales_[i]};
      pairs_.push_back(pair);
    }
    p.pairs = pairs_;
    p.num_slices = static_cast<int>(c.widths.size());
    std::copy(c.widths.begin(), c.widths.end(), p.widths.begin());
    p.weight_dtype = c.w;
    if (c.by == RowsBy::kSegments) p.rows.offsets = host ? offsets.host() : offsets.view();
    if (c.by == RowsBy::kPlan && !host) p.rows.plan = plan.view();
    p.dropout.p = c.p;
    p.dropout.on = c.on;
    if (!c.without_rng) p.dropout.rng = host ? random.host() : random.view();
    return p;
  }

  LoraTrainForward forward_arguments(bool host) {
    LoraTrainForward f;
    f.x = get(x, host);
    list_(y, host, &ys_);
    list_(c.base == BaseIs::kInPlace ? y : base, host, &bases_);
    f.y = ys_;
    if (c.base != BaseIs::kNone) f.base = bases_;
    if (c.keep_h) f.h = host ? h.host() : h.view();
    return f;
  }

  LoraTrainBackward backward_arguments(bool host) {
    LoraTrainBackward f;
    list_(dy, host, &dys_);
    f.dy = dys_;
    f.x = get(x, host);
    if (c.keep_h) f.h = host ? h.host() : h.view();
    if (c.wants_dx) f.dx = get(dx, host);
    f.add_dx = c.add;
    grads_.assign(ranks_.size(), LoraTrainGrads{});
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i] == 0) continue;
      if (c.wants_da) grads_[i].a = get(da[i], host);
      if (c.wants_db) grads_[i].b = get(db[i], host);
      grads_[i].add_a = grads_[i].add_b = c.add;
    }
    f.grads = grads_;
    return f;
  }

  void run_forward() {
    const LoraTrainProblem p = problem(false);
    const LoraTrainForward f = forward_arguments(false);
    run([&] { return lora_train_forward_workspace(p, f); },
        [&](const Tensor& w) { lora_train_forward(p, f, w, Stream{}); });
  }
  void run_backward() {
    const LoraTrainProblem p = problem(false);
    const LoraTrainBackward f = backward_arguments(false);
    run([&] { return lora_train_backward_workspace(p, f); },
        [&](const Tensor& w) { lora_train_backward(p, f, w, Stream{}); });
  }

  /// What a step may write.
  std::vector<GuardedTensor*> outputs() {
    std::vector<GuardedTensor*> all{&dx.memory(), &h};
    for (GuardedMatrix& m : y) all.push_back(&m.memory());
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (ranks_[i] == 0) continue;
      all.push_back(&da[i].memory());
      all.push_back(&db[i].memory());
    }
    return all;
  }

  const TrainCase c;
  const Device device;
  std::vector<std::int32_t> map;
  GuardedMatrix x, dx;
  std::vector<GuardedMatrix> a, b, da, db, base, y, dy;
  GuardedTensor h, random, offsets, plan;

 private:
  static Tensor get(const GuardedMatrix& m, bool host) { return host ? m.host() : m.view(); }
  static void list_(const std::vector<GuardedMatrix>& from, bool host, std::vector<Tensor>* to) {
    to->clear();
    for (const GuardedMatrix& m : from) to->push_back(get(m, host));
  }

  GuardedMatrix matrix(DType dtype, std::int64_t rows, std::int64_t columns, bool fill,
                       bool transposed = false) {
    TrainCase own = c;
    own.transposed = own.transposed || transposed;
    GuardedMatrix m(dtype, rows, columns, own, device);
    if (fill) m.memory().fill_random(rng_);
    m.memory().upload();
    return m;
  }

  /// The workspace has exactly the bytes asked for, poisoned, with guards; there is none for none.
  template <class Query, class Op>
  void run(const Query& query, const Op& op) {
    const std::int64_t bytes = query();
    GuardedTensor workspace = byte_tensor(bytes, device);
    op(bytes > 0 ? workspace.view() : Tensor{});
    workspace.download();
    EXPECT_TRUE(workspace.guards_intact()) << "wrote outside the workspace";
    for (GuardedTensor* t : outputs()) {
      t->download();
      EXPECT_TRUE(t->guards_intact()) << "wrote outside an output";
    }
  }

  void make_rows() {
    map.assign(c.rows, 0);
    if (c.by == RowsBy::kSegments) {
      std::vector<std::int32_t> ends{0};
      for (int l = 1; l <= c.adapters; ++l) {
        ends.push_back(static_cast<std::int32_t>(c.rows * l * l / (c.adapters * c.adapters)));
      }
      if (c.empty_segment && c.adapters > 2) ends[2] = ends[1];
      for (int l = 0; l < c.adapters; ++l) {
        std::fill(map.begin() + ends[l], map.begin() + ends[l + 1], l);
      }
      offsets = int_tensor(ends, device);
    } else if (c.by == RowsBy::kPlan) {
      std::uniform_int_distribution<int> any(-1, c.adapters - 1);
      for (std::int32_t& id : map) id = any(rng_);
      if (c.empty_segment) std::replace(map.begin(), map.end(), 1, -1);
      GuardedTensor ids = int_tensor(map, device);
      plan = GuardedTensor(DType::kInt32, {lora_plan_size(c.rows, c.adapters)}, {}, device);
      lora_plan(ids.view(), c.adapters, plan.view(), Stream{});
      plan.download();
    }
  }

  std::mt19937 rng_;
  std::vector<int> ranks_;
  std::vector<float> scales_;
  std::vector<LoraTrainPair> pairs_;
  std::vector<LoraTrainGrads> grads_;
  std::vector<Tensor> ys_, bases_, dys_;
};

/// Copies what a step reads from one whose matrices may lie otherwise; of one that adds to
/// gradients, before it does.
inline void copy_inputs(TrainStep& from, TrainStep* to) {
  const auto copy = [](GuardedMatrix& a, GuardedMatrix* b) {
    const Tensor source = a.host(), target = b->host();
    for (std::int64_t i = 0; i < source.shape[0]; ++i) {
      for (std::int64_t j = 0; j < source.shape[1]; ++j) {
        store_float(
            target.data, target.dtype, i * target.strides[0] + j * target.strides[1],
            load_float(source.data, source.dtype, i * source.strides[0] + j * source.strides[1]));
      }
    }
    b->memory().upload();
  };
  copy(from.x, &to->x);
  const bool in_place = to->c.base == BaseIs::kInPlace;
  for (std::size_t i = 0; i < from.a.size(); ++i) {
    copy(from.a[i], &to->a[i]);
    copy(from.b[i], &to->b[i]);
    if (from.c.add && from.c.ranks[i % from.c.ranks.size()] > 0) {
      copy(from.da[i], &to->da[i]);
      copy(from.db[i], &to->db[i]);
    }
  }
  if (from.c.add) copy(from.dx, &to->dx);
  for (std::size_t s = 0; s < from.dy.size(); ++s) {
    copy(from.dy[s], &to->dy[s]);
    copy(from.base[s], in_place ? &to->y[s] : &to->base[s]);
  }
}

/// Every element of `got` within the error of its estimate.
inline void expect_near(const Tensor& got, std::span<const lora::train::Estimate> want,
                        const std::string& what) {
  const std::int64_t columns = got.shape[1];
  ASSERT_EQ(want.size(), static_cast<std::size_t>(got.shape[0] * columns)) << what;
  int failures = 0;
  for (std::int64_t i = 0; i < got.shape[0] * columns && failures < 3; ++i) {
    const std::int64_t at = i / columns * got.strides[0] + i % columns * got.strides[1];
    const double value = load_float(got.data, got.dtype, at);
    const bool same_special = (std::isnan(value) && std::isnan(want[i].value)) ||
                              (std::isinf(value) && value == want[i].value);
    if (same_special || std::abs(value - want[i].value) <= want[i].error) continue;
    ++failures;
    ADD_FAILURE() << what << "[" << i / columns << ", " << i % columns << "] is " << value
                  << ", expected " << want[i].value << " +- " << want[i].error;
  }
}

/// Runs forward and backward and compares every output.
inline void expect_matches(TrainStep& step) {
  const TrainCase& c = step.c;
  using namespace lora::train;
  const Reference forward =
      reference_forward(step.problem(true), step.forward_arguments(true), step.map);
  step.run_forward();
  for (std::size_t s = 0; s < c.widths.size(); ++s) {
    expect_near(step.y[s].host(), forward.y[s], concat(c.name, ": y[", s, "]"));
  }
  if (c.keep_h) expect_near(step.h.host(), forward.h, c.name + ": h");
  const Reference backward =
      reference_backward(step.problem(true), step.backward_arguments(true), step.map);
  step.run_backward();
  if (c.wants_dx) expect_near(step.dx.host(), backward.dx, c.name + ": dx");
  for (std::size_t i = 0; i < step.da.size(); ++i) {
    const std::string pair = concat("[", i, "]");
    if (!step.problem(true).pairs[i].a.defined()) continue;
    if (c.wants_da) expect_near(step.da[i].host(), backward.da[i], c.name + ": da" + pair);
    if (c.wants_db) expect_near(step.db[i].host(), backward.db[i], c.name + ": db" + pair);
    EXPECT_TRUE(c.wants_da || step.da[i].memory().all_unchanged()) << "a frozen da was written";
    EXPECT_TRUE(c.wants_db || step.db[i].memory().all_unchanged()) << "a frozen db was written";
  }
  EXPECT_TRUE(c.wants_dx || step.dx.memory().all_unchanged()) << "dx was written";
}

/// Two tensors of one layout hold the same bytes.
inline bool same_bytes(const Tensor& a, const Tensor& b) {
  for (std::int64_t i = 0; i < a.shape[0]; ++i) {
    for (std::int64_t j = 0; j < a.shape[1]; ++j) {
      const std::int64_t size = dtype_size(a.dtype);
      const char* p = static_cast<char*>(a.data) + (i * a.strides[0] + j * a.strides[1]) * size;
      const char* q = static_cast<char*>(b.data) + (i * b.strides[0] + j * b.strides[1]) * size;
      if (std::memcmp(p, q, size) != 0) return false;
    }
  }
  return true;
}

/// Everything that two steps computed is the same to the bit.
inline void expect_same_results(TrainStep& a, TrainStep& b, const std::string& what) {
  for (std::size_t s = 0; s < a.y.size(); ++s) {
    EXPECT_TRUE(same_bytes(a.y[s].host(), b.y[s].host())) << what << ": y" << s;
  }
  EXPECT_TRUE(same_bytes(a.h.host(), b.h.host())) << what << ": h";
  EXPECT_TRUE(same_bytes(a.dx.host(), b.dx.host())) << what << ": dx";
  for (std::size_t i = 0; i < a.da.size(); ++i) {
    EXPECT_TRUE(same_bytes(a.da[i].host(), b.da[i].host())) << what << ": da" << i;
    EXPECT_TRUE(same_bytes(a.db[i].host(), b.db[i].host())) << what << ": db" << i;
  }
}

/// A step leaves the bits of the case's own where operands are transposed or misaligned.
inline void expect_strides_change_no_bit(const TrainCase& c, Device device,
                                         const std::string& what) {
  TrainCase turned = c, misaligned = c;
  turned.transposed = true;
  misaligned.layout = {3, 1};
  for (const TrainCase& one : {turned, misaligned}) {
    TrainStep first(c, device), other(one, device);
    copy_inputs(first, &other);
    first.run_forward();
    first.run_backward();
    other.run_forward();
    other.run_backward();
    expect_same_results(first, other, what + (one.transposed ? ", transposed" : ", misaligned"));
  }
}

}  // namespace mortar::testing
