// Error types and check macros. A message states the expected and the actual value.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace rtp {

// Base class of all errors of a running ring; `rtp_ext.RotationError` in Python.
class RotationError : public std::runtime_error {
 public:
  explicit RotationError(const std::string& text) : std::runtime_error(text), text_(text) {}
  const char* what() const noexcept override { return text_.c_str(); }
  void add(const std::string& more) { text_ += more; }

 private:
  std::string text_;
};

// A neighbour died, hung or closed its ring; `rtp_ext.RingTimeout`.
class RingTimeout : public RotationError {
 public:
  using RotationError::RotationError;
};

// A CUDA runtime call failed; `rtp_ext.CudaError`.
class CudaError : public RotationError {
 public:
  using RotationError::RotationError;
};

// An NCCL call failed; `rtp_ext.NcclError`.
class NcclError : public RotationError {
 public:
  using RotationError::RotationError;
};

// An argument has the wrong type, dtype or device; `TypeError` in Python. A wrong value throws std::invalid_argument,
// which becomes `ValueError`.
class TypeMismatch : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace rtp

// Checks a value that the caller passed; failure becomes ValueError.
#define RTP_CHECK_VALUE(condition, ...)                                        \
  do {                                                                         \
    if (!(condition)) throw std::invalid_argument(::rtp::concat(__VA_ARGS__)); \
  } while (false)

// Checks a type, dtype or device that the caller passed; failure becomes TypeError.
#define RTP_CHECK_TYPE(condition, ...)                                       \
  do {                                                                       \
    if (!(condition)) throw ::rtp::TypeMismatch(::rtp::concat(__VA_ARGS__)); \
  } while (false)

// Checks an internal invariant; failure becomes RotationError.
#define RTP_ASSERT(condition, ...)                                                                           \
  do {                                                                                                       \
    if (!(condition))                                                                                        \
      throw ::rtp::RotationError(::rtp::concat("internal error, expected ", #condition, ": ", __VA_ARGS__)); \
  } while (false)
