// What can go wrong in the core. Every message says which operation, peer and sizes were involved.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace comm_core {

// Root of all. After one of the first four, the group it names can no longer be used.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  // The same kind of error with `prefix` before its text.
  virtual std::exception_ptr with(const std::string& prefix) const;
};

template <typename Error>
struct KindOfError : CommError {
  using CommError::CommError;
  std::exception_ptr with(const std::string& prefix) const override {
    return std::make_exception_ptr(Error(prefix + what()));
  }
};

// An operation did not end within its time-out.
struct TimeoutError : KindOfError<TimeoutError> {
  using KindOfError::KindOfError;
};
// A peer died, closed its connection, or left the group while it was needed.
struct PeerLostError : KindOfError<PeerLostError> {
  using KindOfError::KindOfError;
};
// Two ranks called different operations, or the same with different shapes or types.
struct MismatchError : KindOfError<MismatchError> {
  using KindOfError::KindOfError;
};
// The group was aborted or destroyed, here or by a peer.
struct AbortedError : KindOfError<AbortedError> {
  using KindOfError::KindOfError;
};
// The caller asked for what cannot be done; nothing was sent, the group is unharmed.
struct InvalidRequestError : KindOfError<InvalidRequestError> {
  using KindOfError::KindOfError;
};
// The machine refused something: no such interface, shared memory full.
struct SystemError : KindOfError<SystemError> {
  using KindOfError::KindOfError;
};

// "<what>: <text of errno>".
[[noreturn]] void throw_errno(const std::string& what);

// As CommError::with; an error that is none of ours becomes a SystemError.
std::exception_ptr with_context(const std::exception_ptr& error, const std::string& prefix);
std::string message_of(const std::exception_ptr& error);

}  // namespace comm_core
