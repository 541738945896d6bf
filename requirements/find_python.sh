#!/usr/bin/env bash
# Prints a Python of one minor version (find_python.sh 3.12): from PATH, from pyenv's folders, from uv, or fetched with uv.
set -euo pipefail
version=$1

# A shim of pyenv is on PATH, but fails where no such version is selected: only a run tells.
is_it() { [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; }

for python in "python$version" python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python; do
    if is_it "$python"; then
        command -v "$python"
        exit
    fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
uv=$(command -v uv || true)
if [ -z "$uv" ] && python3 -m venv "$scratch/uv" >&2 &&
    "$scratch/uv/bin/python" -m pip --disable-pip-version-check --retries 1 --timeout 15 install --quiet uv >&2; then
    uv=$scratch/uv/bin/uv
fi
if [ -n "$uv" ]; then
    echo "== no Python $version on PATH or in pyenv's folders: uv fetches one" >&2
    UV_HTTP_TIMEOUT=30 "$uv" python install "$version" >&2 || true
    python=$("$uv" python find --no-project "$version" 2>/dev/null || true)
    if [ -n "$python" ] && is_it "$python"; then
        echo "$python"
        exit
    fi
fi
echo "No Python $version was found or could be fetched. Install it, or name it: make envs PYTHON=/path/to/python$version" >&2
exit 1
