// SPDX-License-Identifier: Apache-2.0
// A store with one adapter open, which no failing call may change.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "adapter_store_files.h"
#include "mortar/adapter_store.h"
#include "mortar/error.h"

namespace mortar::testing {

/// The tensors of one module, "m.q_proj", of rank 4, K 6 and N 10.
inline std::vector<FileTensor> one_module(const std::string& dtype = "F32") {
  return make_module("m.q_proj", dtype, 4, 6, 10);
}

inline std::vector<FileTensor> operator+(std::vector<FileTensor> x,
                                         const std::vector<FileTensor>& y) {
  x.insert(x.end(), y.begin(), y.end());
  return x;
}

class AdapterStoreTest : public ::testing::Test {
 protected:
  AdapterStoreTest() {
    folder_.write_adapter(peft_config(), safetensors(one_module()));
    store_.open("first", folder_.string());
  }

  /// Expects an error that contains `part`, and a store that is as it was.
  void expect_refused(const std::string& config, const std::string& model, const std::string& part,
                      ErrorKind kind = ErrorKind::kValue) {
    TemporaryFolder folder;
    folder.write_adapter(config, model);
    expect_refused_folder(folder.string(), part, kind);
  }
  void expect_refused_folder(const std::string& folder, const std::string& part,
                             ErrorKind kind = ErrorKind::kValue) {
    try {
      store_.open("second", folder);
      ADD_FAILURE() << "opened; expected an error with: " << part;
    } catch (const Error& e) {
      const std::string message = e.what();
      EXPECT_NE(message.find(part), std::string::npos) << message;
      EXPECT_EQ(message.rfind("AdapterStore.open: ", 0), 0u) << message;
      EXPECT_LT(message.size(), 1000u) << message;
      EXPECT_EQ(e.kind(), kind) << message;
    }
    EXPECT_EQ(store_.names(), std::vector<std::string>{"first"});
    EXPECT_EQ(store_.id("first"), 0);
    EXPECT_EQ(store_.get("first")->modules.size(), 1u);
  }

  TemporaryFolder folder_;
  AdapterStore store_;
};

}  // namespace mortar::testing
