#!/usr/bin/env bash
# unpack.sh PARTS INTO [SOURCE]: unpacks the files part.* as they arrive in the folder PARTS, each by its checksum, into INTO.
# A part that has not arrived whole within WAIT_S (1500) seconds ends it. Needs the Python of the environments, and xz. See bundle.py.
set -euo pipefail
parts=$1 into=$2 source=${3:-} here=$(cd "$(dirname "$0")" && pwd)
# NAMES
mkdir -p "$into"
arrive() {
    while read -r sum name; do
        for ((waited = 0; ; waited++)); do
            [ -e "$parts/$name" ] && echo "$sum  $parts/$name" | sha256sum --check --status && break
            [ $waited -lt "${WAIT_S:-1500}" ] || { echo "$name did not arrive whole in $parts" >&2; exit 1; }
            sleep 1
        done
        cat "$parts/$name"
    done <"$here/parts.sha256"
}
arrive | xz -dc -T0 | tar -C "$into" -xf -
for name in $names; do
    python3 -m venv --without-pip "$into/$name"
    scripts=$(grep -lI '^#!.*/bin/python' "$into/$name"/bin/*) || true
    [ -z "$scripts" ] || sed -i "1s|^#!.*|#!$into/$name/bin/python|" $scripts
    for path in "$into/$name"/lib/python*/site-packages/__editable__*.pth; do
        [ -z "$source" ] || [ ! -e "$path" ] || echo "$source" >"$path"
    done
done
touch "$into/whole"
