// SPDX-License-Identifier: Apache-2.0
#include "mortar/adapter_store.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "adapter_store/diagnostics.h"
#include "adapter_store/peft_adapter.h"

namespace mortar {

using adapter_store::Quoted;

struct AdapterStore::Impl {
  struct Slot {
    std::int64_t id;
    std::shared_ptr<const Adapter> adapter;
  };

  mutable std::mutex mutex;  ///< held for look-ups and changes, never while files are read
  std::unordered_map<std::string, Slot> slots;
  std::int64_t next_id = 0;

  void check_new(const std::string& name) const {
    check(slots.count(name) == 0, "AdapterStore.open: name must be new, got ", Quoted{name},
          ", which is open already");
  }
  const Slot& find(const char* op, const std::string& name) const {
    const auto slot = slots.find(name);
    check(slot != slots.end(), "AdapterStore.", op, ": name must be that of an open adapter, got ",
          Quoted{name});
    return slot->second;
  }
};

AdapterStore::AdapterStore() : impl_(std::make_unique<Impl>()) {}
AdapterStore::~AdapterStore() = default;
AdapterStore::AdapterStore(AdapterStore&&) noexcept = default;
AdapterStore& AdapterStore::operator=(AdapterStore&&) noexcept = default;

std::int64_t AdapterStore::open(const std::string& name, const std::string& folder,
                                AdapterMemory memory) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->check_new(name);
  }
  auto adapter =
      std::make_shared<const Adapter>(adapter_store::read_peft_adapter(name, folder, memory));
  const std::lock_guard lock(impl_->mutex);
  impl_->check_new(name);  // another thread may have been faster
  impl_->slots.emplace(name, Impl::Slot{impl_->next_id, std::move(adapter)});
  return impl_->next_id++;
}

void AdapterStore::close(const std::string& name) {
  const std::lock_guard lock(impl_->mutex);
  impl_->find("close", name);
  impl_->slots.erase(name);
}

std::int64_t AdapterStore::size() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<std::int64_t>(impl_->slots.size());
}

bool AdapterStore::contains(const std::string& name) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->slots.count(name) != 0;
}

std::vector<std::string> AdapterStore::names() const {
  std::vector<std::pair<std::int64_t, std::string>> by_id;
  {
    const std::lock_guard lock(impl_->mutex);
    for (const auto& [name, slot] : impl_->slots) by_id.emplace_back(slot.id, name);
  }
  std::sort(by_id.begin(), by_id.end());
  std::vector<std::string> names;
  for (auto& [id, name] : by_id) names.push_back(std::move(name));
  return names;
}

std::int64_t AdapterStore::id(const std::string& name) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->find("id", name).id;
}

std::shared_ptr<const Adapter> AdapterStore::get(const std::string& name) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->find("get", name).adapter;
}

}  // namespace mortar
