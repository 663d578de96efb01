// SPDX-License-Identifier: Apache-2.0
#include "mortar/adapter_store.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/string.h>

#include <memory>
#include <string>
#include <utility>

#include "convert.h"

namespace mortar::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::ObjectRef;
using tvm::ffi::String;
using tvm::ffi::Tuple;

/// Handles that Python keeps.
class StoreObj : public tvm::ffi::Object {
 public:
  AdapterStore store;
  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("mortar.AdapterStore", StoreObj, tvm::ffi::Object);
};
class StoreRef : public ObjectRef {
 public:
  explicit StoreRef(tvm::ffi::ObjectPtr<StoreObj> object) : ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(StoreRef, ObjectRef, StoreObj);
};

class AdapterObj : public tvm::ffi::Object {
 public:
  explicit AdapterObj(std::shared_ptr<const Adapter> a) : adapter(std::move(a)) {}
  std::shared_ptr<const Adapter> adapter;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("mortar.Adapter", AdapterObj, tvm::ffi::Object);
};
class AdapterRef : public ObjectRef {
 public:
  explicit AdapterRef(tvm::ffi::ObjectPtr<AdapterObj> object) : ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(AdapterRef, ObjectRef, AdapterObj);
};

StoreRef new_store() { return StoreRef(tvm::ffi::make_object<StoreObj>()); }

std::int64_t open(const StoreRef& store, const String& name, const String& folder, bool mapped) {
  return store->store.open(name, folder, mapped ? AdapterMemory::kMapped : AdapterMemory::kCopied);
}
void close(const StoreRef& store, const String& name) { store->store.close(name); }
std::int64_t id(const StoreRef& store, const String& name) { return store->store.id(name); }
bool contains(const StoreRef& store, const String& name) { return store->store.contains(name); }
std::int64_t size(const StoreRef& store) { return store->store.size(); }

Array<String> names(const StoreRef& store) {
  Array<String> out;
  for (const std::string& name : store->store.names()) out.push_back(name);
  return out;
}

AdapterRef get(const StoreRef& store, const String& name) {
  return AdapterRef(tvm::ffi::make_object<AdapterObj>(store->store.get(name)));
}

/// Path, base model, fan_in_fan_out; then name, rank and scale of every module.
using Description = Tuple<String, String, bool, Array<String>, Array<std::int64_t>, Array<double>>;

Description describe(const AdapterRef& ref) {
  const Adapter& adapter = *ref->adapter;
  Array<String> module_names;
  Array<std::int64_t> ranks;
  Array<double> scales;
  for (const AdapterModule& m : adapter.modules) {
    module_names.push_back(m.name);
    ranks.push_back(m.rank);
    scales.push_back(m.scale);
  }
  return Description(adapter.path, adapter.base_model, adapter.fan_in_fan_out, module_names, ranks,
                     scales);
}

/// Lends an adapter's bytes to a tensor and keeps the adapter alive as long as the tensor.
struct Lend {
  std::shared_ptr<const Adapter> owner;
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) { owner.reset(); }
};

tvm::ffi::Tensor factor(const AdapterRef& ref, std::int64_t index, bool is_b) {
  const std::shared_ptr<const Adapter>& adapter = ref->adapter;
  const AdapterModule& module = adapter->modules.at(static_cast<std::size_t>(index));
  const Tensor& t = is_b ? module.b : module.a;
  const DLDataType dtype{
      static_cast<std::uint8_t>(t.dtype == DType::kBFloat16 ? kDLBfloat : kDLFloat),
      static_cast<std::uint8_t>(8 * dtype_size(t.dtype)), 1};
  return tvm::ffi::Tensor::FromNDAlloc(Lend{adapter, t.data},
                                       tvm::ffi::ShapeView(t.shape.data(), t.ndim), dtype,
                                       DLDevice{kDLCPU, 0});
}

}  // namespace
}  // namespace mortar::ffi

using mortar::ffi::wrapped;

TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_new, wrapped<mortar::ffi::new_store>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_open, wrapped<mortar::ffi::open>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_close, wrapped<mortar::ffi::close>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_names, wrapped<mortar::ffi::names>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_id, wrapped<mortar::ffi::id>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_contains, wrapped<mortar::ffi::contains>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_size, wrapped<mortar::ffi::size>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_store_get, wrapped<mortar::ffi::get>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_describe, wrapped<mortar::ffi::describe>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(adapter_factor, wrapped<mortar::ffi::factor>)
