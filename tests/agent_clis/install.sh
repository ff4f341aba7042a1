#!/bin/sh
# Installs coding agents from npm into the folder $1, each with a prefix of its own: about 1 GB, with Node 20.
# Those that SKIP_CLIS names are left out; one that cannot be installed fails, with npm's reason.
set -eu
folder=$1
mkdir -p "$folder"

install() {
    case " ${SKIP_CLIS:-} " in *" $1 "*) echo "skipped: $1"; return ;; esac
    test "$(cat "$folder/$1/package" 2>/dev/null)" = "$2" && return
    npm install --loglevel error --no-audit --no-fund --prefix "$folder/$1" "$2" ||
        { echo "$2 cannot be installed: see above, or leave it out with SKIP_CLIS=\"$1\"" >&2; exit 1; }
    echo "$2" > "$folder/$1/package"
}

install claude @anthropic-ai/claude-code@2.1.332
install codex @openai/codex@0.169.0
install qwen @qwen-code/qwen-code@0.15.10
install opencode opencode-ai@1.18.33
