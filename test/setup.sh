#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright Authors of Cilium
#
# Install the few Debian packages that building and testing need and that are missing here. The race detector needs a
# C compiler; the lab fetches what it needs itself.
set -euo pipefail

missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need gcc gcc
need git git
need mke2fs e2fsprogs
need cpio cpio
[ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "please install: ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
# A third-party source that cannot be reached must not stop the installation of what Debian has.
apt-get update -qq || true
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
