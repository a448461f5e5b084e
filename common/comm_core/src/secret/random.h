// Random bytes from the kernel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace comm_core {

using Bytes16 = std::array<uint8_t, 16>;

// Fills `bytes` bytes at `data`. Throws SystemError.
void random_bytes(void* data, size_t bytes);

}  // namespace comm_core
