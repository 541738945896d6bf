#!/usr/bin/env bash
# Makes one environment from a lock file: make_env.sh PYTHON VENV LOCK LEAST [BELOW], versions of Python as 3.12. Run again, it installs
# only what is missing.
set -euo pipefail
python=$1 venv=$2 lock=$3 least=$4 below=${5:-4.0}
here=$(cd "$(dirname "$0")" && pwd)
torch_index=${SPLICE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

fits='import sys; low, high = (tuple(map(int, v.split("."))) for v in sys.argv[1:]); sys.exit(not low <= sys.version_info[:2] < high)'
if [ -z "$python" ] || ! "$python" -c "$fits" "$least" "$below" 2>/dev/null; then
    wanted="Python $least"
    [ "$below" = 4.0 ] && wanted+=" or newer" || wanted+=", below $below"
    echo "$venv needs $wanted; found ${python:+$python, }$("${python:-false}" --version 2>&1 || echo none)." >&2
    echo "Install one, or name it: make envs PYTHON=/path/to/python$least" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)." >&2
    exit 1
fi

echo "== $venv: $("$python" --version), $(grep -c == "$lock") packages from $(basename "$lock")"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# --no-compile: of vLLM's and transformers' thousands of files most are never imported.
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
# CPU and CUDA builds of torch in one folder would be neither.
if [ -f "$venv/.lock" ] && [ "$(cat "$venv/.lock")" != "$(basename "$lock")" ]; then
    echo "$venv was made from $(cat "$venv/.lock"), not from $(basename "$lock"). Remove it (rm -r $venv), then run this again." >&2
    exit 1
fi
basename "$lock" >"$venv/.lock"
if ! grep -q '^torch==' "$lock"; then # a CUDA lock names torch itself
    # An index that cannot be reached must cost seconds. The ordinary wheel brings CUDA's libraries, in the versions that it declares.
    short=(--no-deps --retries 1 --timeout 15)
    if ! "${pip[@]}" "${short[@]}" -r "$here/torch-cpu.lock" 2>/dev/null &&
        ! "${pip[@]}" "${short[@]}" --extra-index-url "$torch_index" -r "$here/torch-cpu.lock" 2>/dev/null; then
        torch=$(sed -n 's/^\(torch==[^+]*\)+cpu$/\1/p' "$here/torch-cpu.lock")
        echo "== $venv: no CPU wheel of $torch in $torch_index: the ordinary one takes about 5 GB"
        "${pip[@]}" "$torch"
    fi
fi
"${pip[@]}" --no-deps -r "$lock"
# Source distributions: TransformerEngine's extension compiles against the torch just installed, with the same lock's headers. Its setup
# asks nvcc for a version, and compiles on all cores if it finds ninja.
if [ -f "${lock%.lock}-build.lock" ]; then
    nvidia=$("$venv/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
    bin=$(cd "$venv/bin" && pwd)
    headers=$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH}
    NVTE_PYTORCH_FORCE_BUILD=TRUE CUDA_HOME=$nvidia/cu13 PATH=$bin:$nvidia/cu13/bin:$PATH CPATH=$headers \
        "${pip[@]}" --no-deps --no-build-isolation -r "${lock%.lock}-build.lock"
fi
# The project itself, in place; the lock's setuptools builds it.
# A path entry, not a finder: beside the clone, its folder `splice` would hide the package.
"${pip[@]}" --no-deps --no-build-isolation --config-settings editable_mode=compat --editable "$here/.."
