// SPDX-License-Identifier: Apache-2.0
#include "adapter_store/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace mortar::adapter_store {
namespace {

using nlohmann::json;

struct DTypeInfo {
  std::string_view name;
  std::uint64_t bits;
  std::optional<DType> dtype;
};

constexpr DTypeInfo kDTypes[] = {
    {"F32", 32, DType::kFloat32}, {"F16", 16, DType::kFloat16}, {"BF16", 16, DType::kBFloat16},
    {"F64", 64, DType::kFloat64}, {"I64", 64, DType::kInt64},   {"I32", 32, DType::kInt32},
    {"U8", 8, DType::kUInt8},     {"I8", 8, std::nullopt},      {"BOOL", 8, std::nullopt},
    {"I16", 16, std::nullopt},    {"U16", 16, std::nullopt},    {"U32", 32, std::nullopt},
    {"U64", 64, std::nullopt},    {"C64", 64, std::nullopt},    {"F8_E4M3", 8, std::nullopt},
    {"F8_E5M2", 8, std::nullopt}, {"F8_E8M0", 8, std::nullopt}, {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt}, {"F4", 4, std::nullopt},
};

/// Takes the header token by token: nothing but the entries themselves is ever kept, so a header
/// of nested or useless JSON fails at its first wrong token.
class HeaderReader : public nlohmann::json_sax<json> {
 public:
  HeaderReader(std::size_t data_start, std::size_t data_bytes, const FileCheck& check)
      : data_start_(data_start), data_bytes_(data_bytes), check_(check) {}

  std::vector<SafetensorsEntry> take() { return std::move(entries_); }

  bool start_object(std::size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kHeader;
    } else if (place_ == Place::kHeader) {
      place_ = key_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
      keys_.clear();
      entry_ = {};
      offsets_ = {};
      num_offsets_ = 0;
    } else {
      wrong("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    auto& seen = place_ == Place::kHeader ? names_ : keys_;
    check_.require(seen.insert(key).second, "the header must name everything once, got ",
                   Quoted{key}, " twice");
    if (place_ == Place::kTensor) {
      check_.require(key == "dtype" || key == "shape" || key == "data_offsets", "tensor ",
                     Quoted{key_}, " must have dtype, shape and data_offsets only, got ",
                     Quoted{key});
      field_ = key;
    } else {
      (place_ == Place::kHeader ? key_ : field_) = key;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) finish_tensor();
    place_ = place_ == Place::kHeader ? Place::kOutside : Place::kHeader;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || field_ == "dtype") wrong("an array");
    place_ = field_ == "shape" ? Place::kShape : Place::kOffsets;
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ == Place::kShape) {
      check_.require(entry_.shape.size() < kMaxTensorDims, "tensor ", Quoted{key_},
                     " must have at most ", kMaxTensorDims, " dimensions, got more");
      check_.require(value <= std::numeric_limits<std::int64_t>::max(), "tensor ", Quoted{key_},
                     " must have sizes below 2^63, got ", value);
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::kOffsets) {
      check_.require(num_offsets_ < 2, "tensor ", Quoted{key_},
                     " must have two data_offsets, got more");
      offsets_[num_offsets_++] = value;
    } else {
      wrong("a number");
    }
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) return true;
    if (place_ != Place::kTensor || field_ != "dtype") wrong("a string");
    const auto* info = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                    [&](const DTypeInfo& d) { return d.name == value; });
    check_.require_type(info != std::end(kDTypes), "tensor ", Quoted{key_},
                        " must have a dtype of the safetensors format, got ", Quoted{value});
    entry_.dtype_name = info->name;
    entry_.dtype = info->dtype;
    bits_ = info->bits;
    return true;
  }

  bool null() override { wrong("null"); }
  bool boolean(bool) override { wrong("a boolean"); }
  bool number_integer(std::int64_t value) override { wrong(value); }
  bool number_float(double, const std::string&) override {
    wrong("a fraction or too large number");
  }
  bool binary(json::binary_t&) override { wrong("binary data"); }

  /// The library's own text is not repeated: it quotes bytes that may be no valid UTF-8.
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    check_.refuse("the header must be valid JSON in UTF-8, got an error at its byte ", position);
  }

 private:
  enum class Place { kOutside, kHeader, kMetadata, kTensor, kShape, kOffsets };

  template <class T>
  [[noreturn]] void wrong(const T& got) const {
    check_.require(place_ != Place::kOutside, "the header must be a JSON object, got ", got);
    check_.require(place_ != Place::kHeader, Quoted{key_}, " must be an object in the header, got ",
                   got);
    check_.require(place_ != Place::kMetadata, "__metadata__ must map text to text, got ", got,
                   " in ", Quoted{field_});
    check_.require(place_ != Place::kTensor, "tensor ", Quoted{key_}, " must have ",
                   field_ == "dtype" ? "a string" : "a list", " as ", field_, ", got ", got);
    check_.refuse("tensor ", Quoted{key_}, " must have whole numbers from 0 in ", field_, ", got ",
                  got);
  }

  void finish_tensor() {
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      check_.require(keys_.count(field) != 0, "tensor ", Quoted{key_}, " must have a ", field,
                     ", got none");
    }
    const auto [begin, end] = offsets_;
    check_.require(num_offsets_ == 2, "tensor ", Quoted{key_}, " must have two data_offsets, got ",
                   num_offsets_);
    check_.require(begin <= end && end <= data_bytes_, "tensor ", Quoted{key_},
                   " must have data_offsets in order and within the ", data_bytes_,
                   " bytes of data, got [", begin, ", ", end, "]");
    std::uint64_t bits = bits_;
    bool overflow = false;
    for (std::int64_t extent : entry_.shape) {
      overflow |= __builtin_mul_overflow(bits, static_cast<std::uint64_t>(extent), &bits);
    }
    check_.require(!overflow, "tensor ", Quoted{key_},
                   " must have fewer than 2^61 bytes, got a shape of more");
    check_.require(bits % 8 == 0 && bits / 8 == end - begin, "tensor ", Quoted{key_},
                   " must have as many bytes as its shape and dtype ", entry_.dtype_name, " need (",
                   bits / 8, "), got ", end - begin);
    entry_.name = key_;
    entry_.offset = data_start_ + begin;
    entry_.bytes = end - begin;
    entries_.push_back(std::move(entry_));
  }

  std::size_t data_start_, data_bytes_;
  const FileCheck& check_;
  Place place_ = Place::kOutside;
  std::unordered_set<std::string> names_, keys_;  ///< seen in the header, in the current object
  std::string key_, field_;                       ///< the current tensor, and its current field
  SafetensorsEntry entry_;
  std::uint64_t bits_ = 0;
  std::array<std::uint64_t, 2> offsets_{};
  std::size_t num_offsets_ = 0;
  std::vector<SafetensorsEntry> entries_;
};

void check_coverage(const std::vector<SafetensorsEntry>& sorted, std::size_t data_start,
                    std::size_t file_bytes, const FileCheck& check) {
  std::size_t covered = data_start;
  for (const SafetensorsEntry& e : sorted) {
    check.require(e.offset == covered, "tensor ", Quoted{e.name},
                  " must start where the one before it ends (byte ", covered - data_start,
                  " of the data), got ", e.offset - data_start,
                  e.offset < covered ? ": they overlap" : ": a gap");
    covered += e.bytes;
  }
  check.require(covered == file_bytes, "the tensors must cover all ", file_bytes - data_start,
                " bytes of data, got ", covered - data_start);
}

std::uint64_t header_length(std::span<const std::byte> file) {
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(file[i]) << (8 * i);
  }
  return length;
}

}  // namespace

std::size_t safetensors_header_end(std::span<const std::byte> file) {
  if (file.size() < kLengthBytes) return file.size();
  const std::uint64_t rest = file.size() - kLengthBytes;
  return kLengthBytes + std::min<std::uint64_t>({header_length(file), rest, kMaxHeaderBytes});
}

std::vector<SafetensorsEntry> parse_safetensors(std::span<const std::byte> file,
                                                const FileCheck& check) {
  check.require(file.size() >= kLengthBytes,
                "must start with 8 bytes of header length, got a file of ", file.size(), " bytes");
  const std::uint64_t length = header_length(file);
  check.require(length <= kMaxHeaderBytes, "the header length must be at most ", kMaxHeaderBytes,
                ", got ", length);
  check.require(length <= file.size() - kLengthBytes, "the header length must be at most ",
                file.size() - kLengthBytes, " (what follows it in the file), got ", length);
  const char* header = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  check.require(length > 0 && header[0] == '{', "the header must start with '{', got ",
                length > 0 ? "another byte" : "an empty header");
  // The JSON library takes a zero byte for the end of the text.
  check.require(std::memchr(header, 0, length) == nullptr,
                "the header must be valid JSON in UTF-8, got a zero byte in it");

  const std::size_t data_start = kLengthBytes + length;
  HeaderReader reader(data_start, file.size() - data_start, check);
  json::sax_parse(header, header + length, &reader);
  std::vector<SafetensorsEntry> entries = reader.take();
  std::sort(entries.begin(), entries.end(), [](const auto& x, const auto& y) {
    return std::tie(x.offset, x.bytes, x.name) < std::tie(y.offset, y.bytes, y.name);
  });
  check_coverage(entries, data_start, file.size(), check);
  return entries;
}

}  // namespace mortar::adapter_store
