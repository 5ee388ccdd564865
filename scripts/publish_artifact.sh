#!/bin/bash
# Converts a model, verifies the artifact, publishes it, downloads it again and verifies the download (docs/ci.md):
#
#   scripts/publish_artifact.sh SRC ORG/NAME SCHEMA [options of hqconv convert]
#   scripts/publish_artifact.sh Qwen/Qwen3-30B-A3B org/qwen3-mxfp4 mxfp4 --target sm90 --tp 2 --max-error 0.15
#
# All that is made lies in WORK (./publish): the artifact, the download, and of every step its JSON document. It ends with
# the exit code of the step that failed. The same command once more goes on where it was. HF_TOKEN says who publishes.
set -euo pipefail

SRC=$1 REPO=$2 SCHEMA=$3
shift 3
WORK=${WORK:-publish}
HQCONV=${HQCONV:-hqconv}
mkdir -p "$WORK"

value() { # FILE KEY …: a value in a JSON document; empty where it is null
    "${PYTHON:-python3}" -c 'import functools, json, sys
found = functools.reduce(dict.__getitem__, sys.argv[2:], json.load(open(sys.argv[1])))
print("" if found is None else found)' "$@"
}

step() { # NAME COMMAND …: its document in WORK/NAME.json
    local name=$1 code=0
    shift
    echo "+ hqconv $*"
    $HQCONV "$@" --json >"$WORK/$name.json" || code=$?
    if [ "$code" -ne 0 ]; then
        echo "$name ended with $code; $WORK/$name.json says why"
        exit "$code"
    fi
}

# What is fetched of the source is kept, since it is read once more to verify against it.
step convert convert "$SRC" -o "$WORK/artifact" --schema "$SCHEMA" --keep-source --resume "$@"
digest=$(value "$WORK/convert.json" manifest_sha256)
revision=$(value "$WORK/convert.json" source revision)
echo "source commit ${revision:-none: a folder}"
echo "manifest sha256 $digest"

step verify verify "$WORK/artifact" --source "$SRC" ${revision:+--revision "$revision"}

step push push "$WORK/artifact" "$REPO"
commit=$(value "$WORK/push.json" commit)
echo "published $REPO at commit $commit"

echo "+ hf download $REPO --revision $commit"
"${HF:-hf}" download "$REPO" --revision "$commit" --local-dir "$WORK/download" --quiet >/dev/null
step download verify "$WORK/download"

found=$(value "$WORK/download.json" manifest_sha256)
if [ "$found" != "$digest" ]; then
    echo "The download has another manifest: sha256 $found"
    exit 1
fi
echo "verified: the download is the artifact, byte for byte"
