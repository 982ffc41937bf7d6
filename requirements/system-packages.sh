#!/usr/bin/env bash
# Install the Debian packages that some tests use, where that is possible. What is
# missing afterwards is said, and the tests that need it are skipped.
set -uo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
[[ ${#missing[@]} -eq 0 ]] && exit 0

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    as_root=(sudo -n)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT

install() {
    command -v apt-get >/dev/null || { echo "no apt-get on this machine" >"$log"; return 1; }
    "${as_root[@]}" true 2>"$log" || return 1
    "${as_root[@]}" apt-get update -qq >"$log" 2>&1 &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >"$log" 2>&1
}

echo "Installing the Debian packages ${missing[*]}"
if ! install; then
    echo "*** SKIPPED: ${missing[*]} could not be installed ($(tail -n 1 "$log"))." >&2
    echo "*** The tests that need them are skipped." >&2
fi
exit 0
