#!/usr/bin/env bash
# Makes one environment from a lock file: make_env.sh PYTHON VENV LOCK. Run again, it installs only what is missing.
set -euo pipefail
python=$1 venv=$2 lock=$3
here=$(cd "$(dirname "$0")" && pwd)
torch_index=${SPLICE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

if [ -z "$python" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "splice needs Python 3.11 or newer; found ${python:+$python, }$("${python:-false}" --version 2>&1 || echo none)." >&2
    echo "Install one, or name it: make envs PYTHON=/path/to/python3.12" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)." >&2
    exit 1
fi

echo "== $venv: $("$python" --version), $(grep -c == "$lock") packages from $(basename "$lock"), and torch"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# --no-compile: of vLLM's and transformers' thousands of files most are never imported.
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile)
if ! "${pip[@]}" -r "$here/torch-cpu.lock" 2>/dev/null; then
    "${pip[@]}" --extra-index-url "$torch_index" -r "$here/torch-cpu.lock"
fi
"${pip[@]}" -r "$lock"
# The project itself, in place; the lock's setuptools builds it.
"${pip[@]}" --no-build-isolation --editable "$here/.."
