#include "secret/random.h"

#include <sys/random.h>

#include "base/errors.h"

namespace comm_core {

void random_bytes(void* data, size_t bytes) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(next, bytes, 0);
    if (got < 0) throw_errno("getrandom");
    next += got;
    bytes -= size_t(got);
  }
}

}  // namespace comm_core
