// SPDX-License-Identifier: Apache-2.0
#include "lora/train/checks.h"

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "core/byte_span.h"
#include "core/check_view.h"
#include "lora/checks.h"
#include "lora/plan_layout.h"

namespace mortar::lora::train {
namespace {

constexpr const char* kYNames[kLoraMaxSlices] = {"y[0]", "y[1]", "y[2]", "y[3]",
                                                 "y[4]", "y[5]", "y[6]", "y[7]"};
constexpr const char* kBaseNames[kLoraMaxSlices] = {"base[0]", "base[1]", "base[2]", "base[3]",
                                                    "base[4]", "base[5]", "base[6]", "base[7]"};
constexpr const char* kDyNames[kLoraMaxSlices] = {"dy[0]", "dy[1]", "dy[2]", "dy[3]",
                                                  "dy[4]", "dy[5]", "dy[6]", "dy[7]"};

Matrix matrix(const Tensor& t) {
  if (!t.defined()) return {};
  return {t.data, t.strides[0], t.strides[1], t.dtype};
}

void check_matrix(const ArgCheck& arg, const Tensor& t, const char* name, std::int64_t rows,
                  std::int64_t columns, Device device) {
  arg.shape(t, name, {rows, columns});
  check_extents(arg, t, name);
  arg.dtype(t, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  arg.device(t, name, device);
}

/// Runs `check` and adds to its message which pair it was about.
template <class Check>
void about_pair(std::size_t index, int num_slices, const Check& check) {
  try {
    check();
  } catch (const Error& e) {
    throw Error(e.kind(), concat(e.what(), " (adapter ", index / num_slices, ", slice ",
                                 index % num_slices, ")"));
  }
}

void check_layers(const ArgCheck& arg, const LoraTrainProblem& given) {
  const int slices = given.num_slices;
  check(slices >= 1 && slices <= kLoraMaxSlices, arg.op(), ": num_slices must be 1 to ",
        kLoraMaxSlices, ", got ", slices);
  check(!given.pairs.empty() && given.pairs.size() % slices == 0, arg.op(),
        ": pairs must have one entry per adapter and slice, got ", given.pairs.size(), " for ",
        slices, " slices");
  check(static_cast<std::int64_t>(given.pairs.size() / slices) <= kLoraMaxAdapters, arg.op(),
        ": pairs must hold at most ", kLoraMaxAdapters, " adapters, got ",
        given.pairs.size() / slices);
}

/// The matrices of every pair; `hidden` is K, or -1 to take it from the first of them.
void check_pairs(const ArgCheck& arg, const LoraTrainProblem& given, std::int64_t* hidden,
                 Device device, Problem* p) {
  for (std::size_t i = 0; i < given.pairs.size(); ++i) {
    const LoraTrainPair& pair = given.pairs[i];
    if (!pair.a.defined() && !pair.b.defined()) continue;
    const int slice = static_cast<int>(i % given.num_slices);
    about_pair(i, given.num_slices, [&] {
      arg.ndim(pair.a, "a", 2);
      const std::int64_t rank = pair.a.shape[0];
      if (*hidden < 0) *hidden = pair.a.shape[1];
      check(rank >= 1 && rank <= kLoraMaxRank, arg.op(), ": a must have 1 to ", kLoraMaxRank,
            " rows, got ", rank);
      check_matrix(arg, pair.a, "a", rank, *hidden, device);
      check_matrix(arg, pair.b, "b", given.widths[slice], rank, device);
      for (const Tensor* t : {&pair.a, &pair.b}) {
        check_type(t->dtype == given.weight_dtype, arg.op(), ": ", t == &pair.a ? "a" : "b",
                   " must have dtype ", dtype_name(given.weight_dtype),
                   ", that of all weights of the call, got ", dtype_name(t->dtype));
      }
      p->slices[slice].rank = std::max(p->slices[slice].rank, static_cast<int>(rank));
    });
  }
}

/// A plan on the host: one that something has written over since must not lead outside the batch.
void check_plan(const ArgCheck& arg, const std::int32_t* plan, std::int64_t num_rows,
                std::int64_t num_adapters) {
  const PlanLayout layout = PlanLayout::make(num_rows, num_adapters);
  const std::int32_t* group = plan + layout.groups;
  std::int64_t adapter = -1, end = 0;
  bool whole = plan[kPlanNumGroups] >= 0 && plan[kPlanNumGroups] <= layout.max_groups;
  for (std::int32_t g = 0; whole && g < plan[kPlanNumGroups]; ++g, group += kPlanEntryWords) {
    whole = group[0] > adapter && group[0] < num_adapters && group[1] == end && group[2] > 0 &&
            group[2] <= num_rows - end;
    adapter = group[0];
    end += group[2];
  }
  const std::int32_t* sorted = plan + layout.sorted;
  whole = whole && std::all_of(sorted, sorted + num_rows,
                               [&](std::int32_t row) { return row >= 0 && row < num_rows; });
  check(whole, arg.op(), ": plan must be as lora_plan made it, got one that was written over");
}

void check_rows(const ArgCheck& arg, const LoraTrainProblem& given, Device device, Problem* p) {
  const LoraTrainRows& rows = given.rows;
  check(!rows.offsets.defined() || !rows.plan.defined(), arg.op(),
        ": rows must be given by offsets or by a plan, got both");
  if (rows.plan.defined()) {
    const auto plan = LoraGroups::from_plan(rows.plan, p->num_rows, p->num_adapters);
    const GroupsView view = check_groups(arg, plan, p->num_rows, p->num_adapters, device);
    p->rows.plan = view.plan;
    if (device.type == DeviceType::kCPU) check_plan(arg, view.plan, p->num_rows, p->num_adapters);
    return;
  }
  if (rows.offsets.defined()) {
    arg.shape(rows.offsets, "offsets", {p->num_adapters + 1});
    arg.dtype(rows.offsets, "offsets", {DType::kInt32});
    arg.device(rows.offsets, "offsets", device);
    arg.contiguous(rows.offsets, "offsets");
    check_memory(arg, rows.offsets, "offsets");
    p->rows.offsets = rows.offsets.ptr<const std::int32_t>();
    if (device.type == DeviceType::kCPU) {
      check_segments(arg, p->rows.offsets, p->num_adapters, p->num_rows);
    }
    return;
  }
  check(p->num_adapters == 1, arg.op(), ": rows must be given by offsets or by a plan for ",
        p->num_adapters, " adapters, got neither");
}

void check_dropout(const ArgCheck& arg, const LoraDropout& dropout, Device device, Problem* p) {
  p->drop_on = dropout.on;
  check(dropout.p.empty() || static_cast<std::int64_t>(dropout.p.size()) == p->num_adapters,
        arg.op(), ": p must have one entry per adapter = ", p->num_adapters, ", got ",
        dropout.p.size());
  bool draws = false;
  for (const float q : dropout.p) {
    check(q >= 0 && q <= 1, arg.op(), ": p must be 0 to 1, got ", q);
    const std::uint32_t threshold = drop_threshold(q);
    p->drops |= threshold > 0;
    p->drops_whole |= threshold >= kDropAll;
    draws |= threshold > 0 && threshold < kDropAll;
  }
  if (!dropout.rng.defined()) {
    check(!draws, arg.op(), ": rng is required with dropout, got nothing");
    return;
  }
  arg.shape(dropout.rng, "rng", {2});
  arg.dtype(dropout.rng, "rng", {DType::kInt64});
  arg.device(dropout.rng, "rng", device);
  arg.contiguous(dropout.rng, "rng");
  p->rng = dropout.rng.ptr<const std::int64_t>();
}

void lay_out_slices(const LoraTrainProblem& given, Problem* p) {
  p->num_slices = given.num_slices;
  p->weight = given.weight_dtype;
  p->given = &given;
  for (int s = 0; s < p->num_slices; ++s) {
    SliceView& slice = p->slices[s];
    slice.width = given.widths[s];
    slice.first_column = p->total_width;
    slice.first_hidden = p->hidden_width;
    p->total_width += slice.width;
    p->hidden_width += round_up(slice.rank, kHiddenGranule);
  }
}

void* check_hidden(const ArgCheck& arg, const Tensor& h, const Problem& p, Device device) {
  arg.shape(h, "h", {p.num_rows, p.hidden_width});
  arg.dtype(h, "h", {p.weight});
  arg.device(h, "h", device);
  arg.contiguous(h, "h");
  arg.aligned(h, "h", kMemoryAlignment);
  return h.data;
}

void check_list(const ArgCheck& arg, std::span<const Tensor> list, const char* name, int slices) {
  check(list.size() == static_cast<std::size_t>(slices), arg.op(), ": ", name,
        " must have one tensor per slice = ", slices, ", got ", list.size());
}

bool same_view(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.strides[0] == b.strides[0] &&
         a.strides[1] == b.strides[1];
}

/// One gradient, of the shape of `like`, or undefined.
void check_grad(const ArgCheck& arg, const Tensor& out, const char* name, const Tensor& like,
                const LoraTrainPair& pair, const LoraTrainBackward& backward, Device device) {
  if (!out.defined()) return;
  check_matrix(arg, out, name, like.shape[0], like.shape[1], device);
  arg.no_self_overlap(out, name);
  arg.disjoint(out, name, pair.a, "a");
  arg.disjoint(out, name, pair.b, "b");
  arg.disjoint(out, name, backward.x, "x");
  arg.disjoint(out, name, backward.h, "h");
  arg.disjoint(out, name, backward.dx, "dx");
  for (std::size_t s = 0; s < backward.dy.size(); ++s) {
    arg.disjoint(out, name, backward.dy[s], kDyNames[s]);
  }
}

/// A view that a call reads, or a gradient that it writes.
struct Use {
  const Tensor* tensor;
  const char* name;
  bool written;
  ByteSpan span;
};

/// Gradients share no memory with each other, nor with what the call reads beside x, h and dy.
void check_grads_apart(const ArgCheck& arg, const LoraTrainProblem& given,
                       std::span<const LoraTrainGrads> grads) {
  std::vector<Use> uses;
  const auto add = [&](const Tensor& t, const char* name, bool written) {
    if (t.defined()) uses.push_back({&t, name, written, byte_span(t)});
  };
  for (const LoraTrainGrads& g : grads) {
    for (const Tensor* t : {&g.a, &g.b}) add(*t, "a gradient", true);
  }
  for (const LoraTrainPair& pair : given.pairs) {
    add(pair.a, "a", false);
    add(pair.b, "b", false);
  }
  add(given.dropout.rng, "rng", false);
  add(given.rows.offsets, "offsets", false);
  add(given.rows.plan, "plan", false);
  // In the order of their first bytes, only those that reach this far can overlap the next one.
  std::sort(uses.begin(), uses.end(),
            [](const Use& a, const Use& b) { return a.span.first < b.span.first; });
  std::vector<const Use*> open;
  for (const Use& use : uses) {
    std::erase_if(open, [&](const Use* o) { return o->span.last <= use.span.first; });
    for (const Use* o : open) {
      if (!o->written && !use.written) continue;
      const Use& grad = o->written ? *o : use;
      const Use& other = o->written ? use : *o;
      arg.disjoint(*grad.tensor, grad.name, *other.tensor,
                   other.written ? "another gradient" : other.name);
    }
    open.push_back(&use);
  }
}

void check_grads(const ArgCheck& arg, const LoraTrainProblem& given,
                 const LoraTrainBackward& backward, Device device, Problem* p) {
  if (backward.grads.empty()) return;
  check(backward.grads.size() == given.pairs.size(), arg.op(),
        ": grads must have one entry per pair = ", given.pairs.size(), ", got ",
        backward.grads.size());
  p->grads = backward.grads.data();
  for (std::size_t i = 0; i < given.pairs.size(); ++i) {
    const LoraTrainPair& pair = given.pairs[i];
    const LoraTrainGrads& grads = backward.grads[i];
    if (!grads.a.defined() && !grads.b.defined()) continue;
    about_pair(i, given.num_slices, [&] {
      check(pair.a.defined(), arg.op(), ": grads must be undefined where the pair is, got some");
      check_grad(arg, grads.a, "da", pair.a, pair, backward, device);
      check_grad(arg, grads.b, "db", pair.b, pair, backward, device);
      arg.disjoint(grads.a, "da", grads.b, "db");
      p->wants_da |= grads.a.defined();
      p->wants_db |= grads.b.defined();
    });
  }
  check_grads_apart(arg, given, backward.grads);
}

void check_num_rows(const ArgCheck& arg, std::int64_t rows) {
  check(rows <= std::numeric_limits<std::int32_t>::max(), arg.op(),
        ": matrices must have fewer than 2^31 rows, got ", rows);
}

}  // namespace

void check_apart(const ArgCheck& arg, const Tensor& out, const char* name,
                 const LoraTrainProblem& given) {
  arg.no_self_overlap(out, name);
  for (std::size_t i = 0; i < given.pairs.size(); ++i) {
    about_pair(i, given.num_slices, [&] {
      arg.disjoint(out, name, given.pairs[i].a, "a");
      arg.disjoint(out, name, given.pairs[i].b, "b");
    });
  }
  arg.disjoint(out, name, given.dropout.rng, "rng");
  arg.disjoint(out, name, given.rows.offsets, "offsets");
  arg.disjoint(out, name, given.rows.plan, "plan");
}

void check_segments(const ArgCheck& arg, const std::int32_t* offsets, std::int64_t num_adapters,
                    std::int64_t num_rows) {
  check(offsets[0] == 0, arg.op(), ": offsets must start at 0, got ", offsets[0]);
  for (std::int64_t l = 0; l < num_adapters; ++l) {
    check(offsets[l + 1] >= offsets[l], arg.op(), ": offsets must not decrease, got ",
          offsets[l + 1], " after ", offsets[l], " at ", l + 1);
  }
  check(offsets[num_adapters] == num_rows, arg.op(),
        ": offsets must cover all rows and end at M = ", num_rows, ", got ", offsets[num_adapters]);
}

Checked check_forward(const ArgCheck& arg, const LoraTrainProblem& given,
                      const LoraTrainForward& forward) {
  Checked checked;
  Problem& p = checked.problem;
  check_layers(arg, given);
  arg.ndim(forward.x, "x", 2);
  const Device device = checked.device = forward.x.device;
  p.num_rows = forward.x.shape[0];
  p.hidden = forward.x.shape[1];
  p.num_adapters = static_cast<std::int64_t>(given.pairs.size()) / given.num_slices;
  check_num_rows(arg, p.num_rows);
  check_matrix(arg, forward.x, "x", p.num_rows, p.hidden, device);
  check_pairs(arg, given, &p.hidden, device, &p);
  lay_out_slices(given, &p);
  check_rows(arg, given, device, &p);
  check_dropout(arg, given.dropout, device, &p);
  check_list(arg, forward.y, "y", p.num_slices);
  if (!forward.base.empty()) check_list(arg, forward.base, "base", p.num_slices);
  if (forward.h.defined()) p.h = check_hidden(arg, forward.h, p, device);
  check_apart(arg, forward.h, "h", given);
  arg.disjoint(forward.h, "h", forward.x, "x");
  p.x = matrix(forward.x);
  for (int s = 0; s < p.num_slices; ++s) {
    const Tensor& y = forward.y[s];
    check_matrix(arg, y, kYNames[s], p.num_rows, p.slices[s].width, device);
    check_apart(arg, y, kYNames[s], given);
    arg.disjoint(y, kYNames[s], forward.x, "x");
    arg.disjoint(y, kYNames[s], forward.h, "h");
    for (int t = 0; t < s; ++t) arg.disjoint(y, kYNames[s], forward.y[t], kYNames[t]);
    p.slices[s].y = matrix(y);
  }
  for (int s = 0; s < p.num_slices && !forward.base.empty(); ++s) {
    const Tensor& base = forward.base[s];
    if (!base.defined()) continue;
    arg.shape(base, kBaseNames[s], {p.num_rows, p.slices[s].width});
    arg.dtype(base, kBaseNames[s], {forward.y[s].dtype});
    arg.device(base, kBaseNames[s], device);
    arg.disjoint(base, kBaseNames[s], forward.h, "h");
    for (int t = 0; t < p.num_slices; ++t) {
      if (t == s && same_view(base, forward.y[t])) continue;
      arg.disjoint(forward.y[t], kYNames[t], base, kBaseNames[s]);
    }
    p.slices[s].base = matrix(base);
  }
  return checked;
}

Checked check_backward(const ArgCheck& arg, const LoraTrainProblem& given,
                       const LoraTrainBackward& backward) {
  Checked checked;
  Problem& p = checked.problem;
  check_layers(arg, given);
  check_list(arg, backward.dy, "dy", given.num_slices);
  arg.ndim(backward.dy[0], "dy[0]", 2);
  const Device device = checked.device = backward.dy[0].device;
  p.num_rows = backward.dy[0].shape[0];
  check_num_rows(arg, p.num_rows);
  p.num_adapters = static_cast<std::int64_t>(given.pairs.size()) / given.num_slices;
  std::int64_t hidden = -1;
  for (const Tensor* t : {&backward.x, &backward.dx}) {
    if (!t->defined()) continue;
    const char* name = t == &backward.x ? "x" : "dx";
    arg.ndim(*t, name, 2);
    if (hidden < 0) hidden = t->shape[1];
    check_matrix(arg, *t, name, p.num_rows, hidden, device);
  }
  check_pairs(arg, given, &hidden, device, &p);
  p.hidden = std::max<std::int64_t>(hidden, 0);
  lay_out_slices(given, &p);
  check_rows(arg, given, device, &p);
  check_dropout(arg, given.dropout, device, &p);
  for (int s = 0; s < p.num_slices; ++s) {
    const Tensor& dy = backward.dy[s];
    check_matrix(arg, dy, kDyNames[s], p.num_rows, p.slices[s].width, device);
    arg.disjoint(backward.dx, "dx", dy, kDyNames[s]);
    p.slices[s].dy = matrix(dy);
  }
  check_apart(arg, backward.dx, "dx", given);
  arg.disjoint(backward.dx, "dx", backward.x, "x");
  arg.disjoint(backward.dx, "dx", backward.h, "h");
  if (backward.h.defined()) p.h = check_hidden(arg, backward.h, p, device);
  check_grads(arg, given, backward, device, &p);
  const bool needs_x = p.wants_da || (p.wants_db && !backward.h.defined());
  check(!needs_x || backward.x.defined(), arg.op(),
        ": x is required for da, and for db without h, got nothing");
  if (needs_x) p.x = matrix(backward.x);
  p.dx = matrix(backward.dx);
  p.add_dx = backward.add_dx;
  return checked;
}

}  // namespace mortar::lora::train
