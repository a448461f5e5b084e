#!/usr/bin/env bash
# Builds the C++ tests of the comm core and of the emulated clusters' switch with ThreadSanitizer,
# and with AddressSanitizer and UndefinedBehaviorSanitizer, and runs them:
# scripts/sanitize.sh [.venv]
# Takes about 3 minutes to build and 10 to run on 2 cores. The first finding ends it with an error.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/shared.sh
source scripts/shared.sh
venv=$(environment "${1:-}")
PATH="$venv/bin:$PATH"
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
export ASAN_OPTIONS="detect_stack_use_after_return=1"
export UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1"

for sanitizer in thread address,undefined; do
  dir="build/sanitize-${sanitizer%%,*}"
  echo "== $sanitizer"
  cmake -S common/comm_core -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=None -DCOMM_CORE_TESTS=ON \
    -DCOMM_CORE_SANITIZE="$sanitizer" > /dev/null
  cmake --build "$dir" | tail -n 1
  for test in "engine_alone_test" "collectives_alone_test" "messages_alone_test" "callback_order_test" "sha256_test" \
      "settings_test" "kernels_test" "messages_test" "windows_test" "group_test" "regimes_test" \
      "collectives_test 4" "collectives_test random 20000" "model_test 40000" "fuzz_test 300000"; do
    read -r -a command <<< "$test"
    timeout 1800 "$dir/${command[0]}" "${command[@]:1}"
  done
  cmake -S common/emulation/links/link_switch -B "$dir/link_switch" -G Ninja -DCMAKE_BUILD_TYPE=None \
    -DLINK_SWITCH_TESTS=ON -DLINK_SWITCH_SANITIZE="$sanitizer" > /dev/null
  cmake --build "$dir/link_switch" --target fabric_test | tail -n 1
  timeout 600 "$dir/link_switch/fabric_test"
done
