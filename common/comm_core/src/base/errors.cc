#include "base/errors.h"

#include <cerrno>
#include <cstring>

namespace comm_core {

namespace {

template <typename E>
bool prefixed(const std::exception& error, const std::string& prefix, std::exception_ptr& result) {
  if (dynamic_cast<const E*>(&error) == nullptr) return false;
  result = std::make_exception_ptr(E(prefix + error.what()));
  return true;
}

}  // namespace

void throw_errno(const std::string& what) { throw SystemError(what + ": " + strerror(errno)); }

std::exception_ptr with_context(const std::exception_ptr& error, const std::string& prefix) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    std::exception_ptr result;
    if (prefixed<TimeoutError>(e, prefix, result) || prefixed<PeerLostError>(e, prefix, result) ||
        prefixed<MismatchError>(e, prefix, result) || prefixed<AbortedError>(e, prefix, result) ||
        prefixed<InvalidRequestError>(e, prefix, result)) {
      return result;
    }
    return std::make_exception_ptr(SystemError(prefix + e.what()));
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

// A connection of collectives and where the engine watches it.

}  // namespace comm_core
