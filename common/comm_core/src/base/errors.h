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
};

// An operation did not end within its time-out.
class TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

// A peer died, closed its connection, or left the group while it was needed.
class PeerLostError : public CommError {
 public:
  using CommError::CommError;
};

// Two ranks called different operations, or the same with different shapes or types.
class MismatchError : public CommError {
 public:
  using CommError::CommError;
};

// The group was aborted or destroyed, here or by a peer.
class AbortedError : public CommError {
 public:
  using CommError::CommError;
};

// The caller asked for what cannot be done; nothing was sent, the group is unharmed.
class InvalidRequestError : public CommError {
 public:
  using CommError::CommError;
};

// The machine refused something: no such interface, shared memory full.
class SystemError : public CommError {
 public:
  using CommError::CommError;
};

// "<what>: <text of errno>".
[[noreturn]] void throw_errno(const std::string& what);

// The same kind of error as `error` with `prefix` before its text.
std::exception_ptr with_context(const std::exception_ptr& error, const std::string& prefix);
std::string message_of(const std::exception_ptr& error);

}  // namespace comm_core
