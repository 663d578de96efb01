// SPDX-License-Identifier: Apache-2.0
// The one exception type that Mortar throws.
#pragma once

#include <stdexcept>
#include <string>

namespace mortar {

/// What kind of mistake an Error reports; bindings map it to their language's exception.
enum class ErrorKind {
  kValue,    ///< a shape, size, stride, alignment or content is wrong  -> ValueError
  kType,     ///< a dtype or device is wrong                            -> TypeError
  kRuntime,  ///< the machine failed: a CUDA call, a file read          -> RuntimeError
};

/// Thrown by every op before it touches any output. The message is one sentence that names
/// the op, the argument, what was expected and what came.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace mortar
