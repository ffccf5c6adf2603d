#!/usr/bin/env bash
# Installs the real harnesses that tests/e2e/test_clients.py runs, and published chat templates, at pinned versions, into
# git-ignored folders.
# About 20 s and 1 GB; does nothing where they are already there.
set -euo pipefail
cd "$(dirname "$0")/clients"
PYTHON=${PYTHON:-python3.11}

claude=node_modules/@anthropic-ai/claude-code-linux-x64/claude
if [ ! -x "$claude" ] || [ ! -x node_modules/.bin/codex ]; then
  npm install --no-package-lock --no-audit --no-fund
fi
"$claude" --version
node_modules/.bin/codex --version

if [ ! -x .venv/bin/mini ] || ! compgen -G ".venv/lib/*/site-packages/trl" >/dev/null; then
  "$PYTHON" -m venv .venv
  .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
  # Only for the chat templates it ships, as models publish them.
  .venv/bin/pip install --quiet --disable-pip-version-check --no-deps trl==1.16.0
fi
.venv/bin/pip list --disable-pip-version-check 2>/dev/null | grep -i mini-swe-agent
