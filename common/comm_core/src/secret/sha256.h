// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), for the handshake between ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace comm_core {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view message);
Digest hmac_sha256(std::string_view key, std::string_view message);

// Compares two digests. The time that it takes does not depend on where they differ.
bool equal_constant_time(const Digest& a, const Digest& b);

}  // namespace comm_core
