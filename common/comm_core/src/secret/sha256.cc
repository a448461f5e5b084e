#include "secret/sha256.h"

#include <bit>
#include <string>

namespace comm_core {
namespace {

constexpr size_t kBlock = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void compress(std::array<uint32_t, 8>& state, const char* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = 0;
    for (int k = 0; k < 4; ++k) w[i] = w[i] << 8 | uint8_t(block[4 * i + k]);
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t x = w[i - 15];
    const uint32_t y = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) + w[i - 7] +
           (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (int i = 0; i < 64; ++i) {
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t t1 =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice + kRound[i] + w[i];
    const uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const uint32_t mixed[8] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += mixed[i];
}

}  // namespace

Digest sha256(std::string_view message) {
  std::string padded(message);
  padded += '\x80';
  padded.resize((padded.size() + 8 + kBlock - 1) / kBlock * kBlock - 8);
  const uint64_t bits = message.size() * 8;
  for (int shift = 56; shift >= 0; shift -= 8) padded += char(bits >> shift);

  // The first 32 bits of the fractional parts of the square roots of the first 8 primes.
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  for (size_t at = 0; at < padded.size(); at += kBlock) compress(state, padded.data() + at);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view message) {
  const auto text = [](const Digest& digest) { return std::string(digest.begin(), digest.end()); };
  std::string inner = key.size() > kBlock ? text(sha256(key)) : std::string(key);
  inner.resize(kBlock);
  std::string outer = inner;
  for (char& byte : inner) byte ^= 0x36;
  for (char& byte : outer) byte ^= 0x5c;
  return sha256(outer + text(sha256(inner.append(message))));
}

bool equal_constant_time(const Digest& a, const Digest& b) {
  // volatile, so that the compiler cannot leave the loop at the first difference.
  volatile uint8_t different = 0;
  for (size_t i = 0; i < a.size(); ++i) different = different | (a[i] ^ b[i]);
  return different == 0;
}

}  // namespace comm_core
