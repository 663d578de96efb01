// SPDX-License-Identifier: Apache-2.0
// LoRA training as TVM-FFI functions. Optional tensors may be None; the stream is the framework's
// current one on the device of the tensors, and a workspace of None is taken from the framework's
// allocator for the call. Packed calls, in this order:
//
//   lora_train_forward   SIZES, x, h, workspace, ROWS, *y [S], *base [S], PAIRS
//   lora_train_backward  SIZES, add_dx, x, h, dx, workspace, ROWS, *dy [S], PAIRS, GRADS
//   lora_train_forward_workspace, lora_train_backward_workspace: the same -> bytes
//   lora_train_check     offsets, num_adapters, num_rows
//
//   SIZES  num_slices S, num_adapters L, drops_delta
//   ROWS   rng, offsets, plan, *p [L]
//   PAIRS  a, b, scale for each of the L * S pairs, slices of an adapter together
//   GRADS  da, db, add_a, add_b for each of them
//
// and torch_lora_train_forward, torch_lora_train_backward (packed_call.h). base is None where
// nothing is added. All weights have the dtype of the first that is there. x, dx, y, base and dy
// may have any leading dimensions that one stride steps through.
#include "mortar/lora_train.h"

#include <tvm/ffi/container/array.h>

#include <vector>

#include "call_workspace.h"
#include "convert.h"
#include "packed_call.h"

namespace mortar::ffi {
namespace {

using tvm::ffi::Any;

/// A problem together with what its spans show.
struct OwnedProblem {
  LoraTrainProblem problem;
  std::vector<float> p;
  std::vector<LoraTrainPair> pairs;
  std::vector<LoraTrainGrads> grads;
  std::vector<Tensor> y, base, dy;
  std::int64_t num_adapters = 0;
  Tensor workspace;
};

template <class Source>
void read_sizes(ArgReader<Source>& args, OwnedProblem* owned) {
  const std::int64_t slices = args.integer("num_slices");
  owned->num_adapters = args.integer("num_adapters");
  check(slices >= 1 && slices <= kLoraMaxSlices, args.op(), ": num_slices must be 1 to ",
        kLoraMaxSlices, ", got ", slices);
  check(owned->num_adapters >= 1 && owned->num_adapters <= kLoraMaxAdapters, args.op(),
        ": num_adapters must be 1 to ", kLoraMaxAdapters, ", got ", owned->num_adapters);
  owned->problem.num_slices = static_cast<int>(slices);
  owned->problem.dropout.on =
      args.template value<bool>("drops_delta") ? LoraDropoutOn::kDelta : LoraDropoutOn::kInput;
}

template <class Source>
void read_rows(ArgReader<Source>& args, OwnedProblem* owned) {
  LoraTrainProblem& problem = owned->problem;
  problem.dropout.rng = args.tensor("rng");
  problem.rows.offsets = args.tensor("offsets");
  problem.rows.plan = args.tensor("plan");
  for (std::int64_t l = 0; l < owned->num_adapters; ++l) {
    owned->p.push_back(static_cast<float>(args.template value<double>("p")));
  }
  problem.dropout.p = owned->p;
}

template <class Source>
Tensor read_matrix(ArgReader<Source>& args, const char* name) {
  Tensor t = args.tensor(name);
  fold_rows(t, args.op(), name);
  return t;
}

template <class Source>
void read_list(ArgReader<Source>& args, const char* name, int count, std::vector<Tensor>* to) {
  for (int s = 0; s < count; ++s) to->push_back(read_matrix(args, name));
}

template <class Source>
void read_pairs(ArgReader<Source>& args, const std::vector<Tensor>& wide, OwnedProblem* owned) {
  LoraTrainProblem& problem = owned->problem;
  for (std::size_t s = 0; s < wide.size(); ++s) {
    problem.widths[s] = wide[s].ndim == 2 ? wide[s].shape[1] : 0;
  }
  bool first = true;
  for (std::int64_t i = 0; i < owned->num_adapters * problem.num_slices; ++i) {
    LoraTrainPair pair;
    pair.a = args.tensor("a");
    pair.b = args.tensor("b");
    pair.scale = static_cast<float>(args.template value<double>("scale"));
    if (first && pair.a.defined()) {
      problem.weight_dtype = pair.a.dtype;
      first = false;
    }
    owned->pairs.push_back(pair);
  }
  problem.pairs = owned->pairs;
}

template <class Source>
LoraTrainForward read_forward(ArgReader<Source>& args, OwnedProblem* owned) {
  read_sizes(args, owned);
  LoraTrainForward forward;
  forward.x = read_matrix(args, "x");
  forward.h = args.tensor("h");
  owned->workspace = args.tensor("workspace");
  read_rows(args, owned);
  read_list(args, "y", owned->problem.num_slices, &owned->y);
  read_list(args, "base", owned->problem.num_slices, &owned->base);
  read_pairs(args, owned->y, owned);
  forward.y = owned->y;
  forward.base = owned->base;
  return forward;
}

template <class Source>
LoraTrainBackward read_backward(ArgReader<Source>& args, OwnedProblem* owned) {
  read_sizes(args, owned);
  LoraTrainBackward backward;
  backward.add_dx = args.template value<bool>("add_dx");
  backward.x = read_matrix(args, "x");
  backward.h = args.tensor("h");
  backward.dx = read_matrix(args, "dx");
  owned->workspace = args.tensor("workspace");
  read_rows(args, owned);
  read_list(args, "dy", owned->problem.num_slices, &owned->dy);
  read_pairs(args, owned->dy, owned);
  for (std::size_t i = 0; i < owned->pairs.size(); ++i) {
    LoraTrainGrads grads;
    grads.a = args.tensor("da");
    grads.b = args.tensor("db");
    grads.add_a = args.template value<bool>("add_a");
    grads.add_b = args.template value<bool>("add_b");
    owned->grads.push_back(grads);
  }
  backward.dy = owned->dy;
  backward.grads = owned->grads;
  return backward;
}

template <class Source>
void forward(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "lora_train_forward");
  OwnedProblem owned;
  const LoraTrainForward call_args = read_forward(args, &owned);
  const LoraTrainProblem& problem = owned.problem;
  const Device device = call_args.x.device;
  const typename Source::Call call(device);
  const std::int64_t bytes =
      bytes_of(owned.workspace, [&] { return lora_train_forward_workspace(problem, call_args); });
  const Workspace<Source> workspace(owned.workspace, bytes, device);
  lora_train_forward(problem, call_args, workspace, call.stream);
}

template <class Source>
void backward(PackedArgs packed, Any*) {
  ArgReader<Source> args(packed, "lora_train_backward");
  OwnedProblem owned;
  const LoraTrainBackward call_args = read_backward(args, &owned);
  const LoraTrainProblem& problem = owned.problem;
  const Device device = owned.dy[0].device;
  const typename Source::Call call(device);
  const std::int64_t bytes =
      bytes_of(owned.workspace, [&] { return lora_train_backward_workspace(problem, call_args); });
  const Workspace<Source> workspace(owned.workspace, bytes, device);
  lora_train_backward(problem, call_args, workspace, call.stream);
}

void forward_workspace(PackedArgs packed, Any* result) {
  ArgReader<FfiObjects> args(packed, "lora_train_forward_workspace");
  OwnedProblem owned;
  const LoraTrainForward call_args = read_forward(args, &owned);
  *result = lora_train_forward_workspace(owned.problem, call_args);
}

void backward_workspace(PackedArgs packed, Any* result) {
  ArgReader<FfiObjects> args(packed, "lora_train_backward_workspace");
  OwnedProblem owned;
  const LoraTrainBackward call_args = read_backward(args, &owned);
  *result = lora_train_backward_workspace(owned.problem, call_args);
}

void check_offsets(PackedArgs packed, Any*) {
  ArgReader<FfiObjects> args(packed, "lora_train_check");
  const Tensor offsets = args.tensor("offsets");
  const std::int64_t num_adapters = args.integer("num_adapters");
  const std::int64_t num_rows = args.integer("num_rows");
  const FfiObjects::Call call(offsets.device);
  lora_train_check(offsets, num_adapters, num_rows, call.stream);
}

/// [forward bytes, backward bytes, forward operations, backward operations].
tvm::ffi::Array<std::int64_t> traffic(std::int64_t rows, std::int64_t hidden, std::int64_t width,
                                      std::int64_t rank, DLDataType activation, DLDataType weight,
                                      bool base) {
  const char* op = "lora_train_traffic";
  const LoraTrainTraffic t = lora_train_traffic(rows, hidden, width, static_cast<int>(rank),
                                                to_dtype(activation, op, "activation"),
                                                to_dtype(weight, op, "weight"), base);
  return {t.forward_bytes, t.backward_bytes, t.forward_flops, t.backward_flops};
}

}  // namespace
}  // namespace mortar::ffi

MORTAR_EXPORT_PACKED(lora_train_forward, mortar::ffi::forward<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(lora_train_backward, mortar::ffi::backward<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(lora_train_forward_workspace, mortar::ffi::forward_workspace);
MORTAR_EXPORT_PACKED(lora_train_backward_workspace, mortar::ffi::backward_workspace);
MORTAR_EXPORT_PACKED(lora_train_check, mortar::ffi::check_offsets);
MORTAR_EXPORT_TORCH(torch_lora_train_forward, forward, TorchObjects);
MORTAR_EXPORT_TORCH(torch_lora_train_backward, backward, TorchObjects);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_train_traffic, mortar::ffi::wrapped<mortar::ffi::traffic>)
