#include "tcp/handshake.h"

#include "base/errors.h"

namespace comm_core {

namespace {

// The send buffer of a new connection has room for these few bytes. Otherwise it is no peer.
void send(Lane& lane, const void* data, size_t bytes) {
  if (lane.write(data, bytes) != bytes) throw CommError("no room to answer");
}

bool is_for(const Hello& hello, const Door& door) {
  return hello.magic == kHelloMagic && hello.from >= 0 && hello.from < door.size &&
         hello.to == door.rank && hello.from != hello.to && int(hello.kind) < kNumLaneKinds;
}

}  // namespace

Digest proof(const std::string& secret, char side, const Hello& hello, const Bytes16& challenge) {
  std::string text(1, side);
  text.append(reinterpret_cast<const char*>(&hello), sizeof hello);
  text.append(reinterpret_cast<const char*>(challenge.data()), challenge.size());
  return hmac_sha256(secret, text);
}

bool Acceptance::advance(Lane& lane, const Doors& doors) {
  if (!greeted_) {
    if (!lane.fill(&hello_, sizeof hello_, have_)) return false;
    const Door* door = doors(hello_.group);
    if (door == nullptr || !is_for(hello_, *door)) throw CommError("unknown group or rank");
    random_bytes(challenge_.data(), challenge_.size());
    send(lane, challenge_.data(), challenge_.size());
    greeted_ = true;
  }
  if (!lane.fill(proof_.data(), proof_.size(), have_)) return false;
  const Door* door = doors(hello_.group);
  if (door == nullptr) throw CommError("the group is gone");
  if (!equal_constant_time(proof_, proof(door->secret, 'c', hello_, challenge_))) {
    throw CommError("wrong secret");
  }
  const Digest answer = proof(door->secret, 's', hello_, challenge_);
  send(lane, answer.data(), answer.size());
  return true;
}

}  // namespace comm_core
