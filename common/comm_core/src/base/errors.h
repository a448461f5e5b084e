// The exceptions of the core. Every message names the operation, the peer and the sizes involved.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace comm_core {

// Base class of all errors of the core. A group cannot be used any more after one of the first four
// errors below. The message names the group.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  // Returns an error of the same class whose text is `prefix` followed by this error's text.
  virtual std::exception_ptr with(const std::string& prefix) const;
};

// Base class that implements `with` for the error class `Error`.
template <typename Error>
struct KindOfError : CommError {
  using CommError::CommError;
  std::exception_ptr with(const std::string& prefix) const override {
    return std::make_exception_ptr(Error(prefix + what()));
  }
};

// An operation did not finish within its timeout.
struct TimeoutError : KindOfError<TimeoutError> {
  using KindOfError::KindOfError;
};
// A peer died, closed its connection, or left the group before an operation that needs it.
struct PeerLostError : KindOfError<PeerLostError> {
  using KindOfError::KindOfError;
};
// Two ranks called different operations, or the same operation with different sizes or dtypes.
struct MismatchError : KindOfError<MismatchError> {
  using KindOfError::KindOfError;
};
// The group was aborted or destroyed, on this rank or on a peer.
struct AbortedError : KindOfError<AbortedError> {
  using KindOfError::KindOfError;
};
// The request is invalid. It had no effect, and the group can still be used.
struct InvalidRequestError : KindOfError<InvalidRequestError> {
  using KindOfError::KindOfError;
};
// The operating system refused a request: for example, shared memory is full.
struct SystemError : KindOfError<SystemError> {
  using KindOfError::KindOfError;
};

// The store did not answer in time: mostly, another rank has not written what this one awaits.
struct StoreError : KindOfError<StoreError> {
  using KindOfError::KindOfError;
};

// Throws SystemError with the text "<what>: <text of errno>".
[[noreturn]] void throw_errno(const std::string& what);

// Calls CommError::with on `error`. Any other std::exception becomes a SystemError.
std::exception_ptr with_context(const std::exception_ptr& error, const std::string& prefix);
// Returns whether `error` is an `Error`.
template <typename Error>
bool holds(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return true;
  } catch (const std::exception&) {
    return false;
  }
}
// Returns the text of `error`, which must be a std::exception.
std::string message_of(const std::exception_ptr& error);

}  // namespace comm_core
