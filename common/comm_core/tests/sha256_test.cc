// Checks SHA-256 with FIPS 180-4 (and lengths around the padding), and HMAC with RFC 4231.
#include "secret/sha256.h"

#include "check.h"

using namespace comm_core;
using namespace comm_core::testing;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  char pair[3];
  for (uint8_t byte : digest) {
    snprintf(pair, sizeof(pair), "%02x", byte);
    text += pair;
  }
  return text;
}

void digests() {
  expect_text(hex(sha256("abc")),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  expect_text(hex(sha256(std::string(1000000, 'a'))),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // Lengths at which the padding changes, as one digest of their digests (computed with hashlib).
  std::string all;
  for (size_t length = 0; length <= 130; ++length) all += hex(sha256(std::string(length, 'x')));
  expect_text(hex(sha256(all)), "87aca1c44bc7ba8897768170211f0a02063de70801131ff86c7edb9ce32c6a50");
}

void authentication() {
  expect_text(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),  // RFC 4231, case 2
              "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  expect_text(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),  // case 3
              "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  expect_text(hex(hmac_sha256(std::string(131, '\xaa'),  // case 6
                              "Test Using Larger Than Block-Size Key - Hash Key First")),
              "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

void every_byte_counts() {
  const Digest a = sha256("a");
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= 1;
    expect(!equal_constant_time(a, b), "byte " + std::to_string(i) + " is not compared");
  }
  expect(equal_constant_time(a, Digest(a)), "equal digests differ");
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests(argc, argv,
                   {{"digests", digests},
                    {"authentication", authentication},
                    {"every byte counts", every_byte_counts}});
}
