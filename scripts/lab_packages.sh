#!/usr/bin/env bash
# Debian packages without which tests are skipped: a real etcd, a real Slurm, real containers, an
# sshd, a browser, and what makes network namespaces.
set -euo pipefail
declare -A package=(
  [etcd]=etcd-server [etcdctl]=etcd-client
  [munged]=munge [slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client
  [runc]=runc
  [chromium-headless-shell]=chromium-headless-shell
  [sshd]=openssh-server [ssh]=openssh-client
  [ip]=iproute2 [tc]=iproute2 [nft]=nftables [iptables]=iptables
)
wanted=()
for program in "${!package[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || wanted+=("${package[$program]}")
done
[ ${#wanted[@]} -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "not there: ${wanted[*]}" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d  # no service of theirs begins to run here: tests start their own
[ -e "$policy" ] || { printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && trap 'rm "$policy"' EXIT; }
timeout 120 apt-get update -qq || true
timeout 240 apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
