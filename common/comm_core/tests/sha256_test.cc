// SHA-256 against FIPS 180-4 (and lengths around the padding), HMAC against RFC 4231.
#include "base/sha256.h"

#include <cstdio>
#include <string>

using namespace comm_core;

namespace {

int failures = 0;

std::string hex(const Digest& digest) {
  std::string text;
  char pair[3];
  for (uint8_t byte : digest) {
    std::snprintf(pair, sizeof(pair), "%02x", byte);
    text += pair;
  }
  return text;
}

void expect(const char* what, const std::string& got, const std::string& wanted) {
  if (got.substr(0, wanted.size()) == wanted && !wanted.empty()) return;
  ++failures;
  std::printf("%s: got %s, wanted %s\n", what, got.c_str(), wanted.c_str());
}

void test_sha256() {
  expect("empty", hex(sha256("")),
         "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  expect("abc", hex(sha256("abc")),
         "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  expect("448 bits", hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  expect("896 bits",
         hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                    "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")),
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  expect("a million a", hex(sha256(std::string(1000000, 'a'))),
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// The lengths at which the padding changes shape, as one digest of digests (made with hashlib).
void test_padding() {
  std::string digests;
  for (size_t length = 0; length <= 130; ++length) digests += hex(sha256(std::string(length, 'x')));
  expect("lengths 0 to 130", hex(sha256(digests)),
         "87aca1c44bc7ba8897768170211f0a02063de70801131ff86c7edb9ce32c6a50");
}

void test_hmac() {
  const std::string long_key(131, '\xaa');
  std::string counting_key;
  for (char c = 1; c <= 25; ++c) counting_key += c;

  expect("RFC 4231 case 1", hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
         "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  expect("RFC 4231 case 2", hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  expect("RFC 4231 case 3", hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
         "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  expect("RFC 4231 case 4", hex(hmac_sha256(counting_key, std::string(50, '\xcd'))),
         "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  expect("RFC 4231 case 5 (truncated)",
         hex(hmac_sha256(std::string(20, '\x0c'), "Test With Truncation")),
         "a3b6167473100ee06e0c796c2955552b");
  expect("RFC 4231 case 6",
         hex(hmac_sha256(long_key, "Test Using Larger Than Block-Size Key - Hash Key First")),
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  expect("RFC 4231 case 7",
         hex(hmac_sha256(long_key,
                         "This is a test using a larger than block-size key and a larger than "
                         "block-size data. The key needs to be hashed before being used by the "
                         "HMAC algorithm.")),
         "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

void test_equal() {
  const Digest a = sha256("a");
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= 1;
    if (equal_constant_time(a, b)) {
      ++failures;
      std::printf("equal_constant_time: byte %zu does not count\n", i);
    }
  }
  if (!equal_constant_time(a, Digest(a))) {
    ++failures;
    std::printf("equal_constant_time: equal digests differ\n");
  }
}

}  // namespace

int main() {
  test_sha256();
  test_padding();
  test_hmac();
  test_equal();
  std::printf("sha256_test: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
