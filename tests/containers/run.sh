#!/bin/bash
# Builds the images and runs Compose, on an engine that it installs and starts if there is none: `make
# test-containers`. Needs root on Debian, or DOCKER_HOST and the commands below.
#
# DOCKER_HOST       an engine on this machine; default: one of its own, ended with the test
# ATOLL_CACHE       keeps the base image and Compose 2.x; default: ~/.cache/atoll
# SKIP_CONTAINERS   1: do not run, where no engine can be had
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ "${SKIP_CONTAINERS:-}" = 1 ]; then
    echo "test-containers: SKIPPED, as SKIP_CONTAINERS=1 asks for: no image was built, no container ran"
    exit 0
fi

PATH=/usr/bin:/usr/sbin:$PATH # Debian's own commands first
CACHE=${ATOLL_CACHE:-$HOME/.cache/atoll}
WHEELS=deploy/docker/wheels
mkdir -p "$CACHE"

fail() {
    echo "test-containers: $1; set SKIP_CONTAINERS=1 to leave this test out" >&2
    exit 1
}

install_engine() {
    local packages=(docker.io docker-compose debootstrap iptables)
    dpkg-query --show "${packages[@]}" >/dev/null 2>&1 && return
    [ "$(id -u)" = 0 ] || fail "got user $(id -un), expected root: it installs ${packages[*]}"
    { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends "${packages[@]}"; } \
        >"$CACHE/apt.log" 2>&1 ||
        fail "could not install ${packages[*]}: $CACHE/apt.log says why"
}

# Of Debian 13, whose one file runs on Debian 12, too.
install_compose_2() {
    [ -x "$CACHE/docker-compose-2" ] && return
    local folder sources mirror
    folder=$(mktemp -d)
    mirror=$(apt-get indextargets --format '$(SITE)' | head --lines 1)
    sources="deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main"
    echo "$sources" >"$folder/sources.list"
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    local options=(-o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::State::lists="$folder/lists" -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root)
    (cd "$folder" && apt-get "${options[@]}" update && apt-get "${options[@]}" download docker-compose &&
        dpkg-deb --extract docker-compose_*.deb files) >"$CACHE/compose.log" 2>&1 ||
        fail "could not get Compose 2.x: $CACHE/compose.log says why"
    mv "$folder/files/usr/libexec/docker/cli-plugins/docker-compose" "$CACHE/docker-compose-2"
    rm -r "$folder"
}

# A Debian with Python, and with the certificates of this machine, whose proxy may have one of its own.
make_base() {
    [ -e "$CACHE/base.tar.gz" ] && return
    local root=$CACHE/base
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$root" \
        >"$CACHE/debootstrap.log" 2>&1 || fail "debootstrap failed: $CACHE/debootstrap.log says why"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    rm -rf "$root"/usr/share/{doc,locale,man}/* "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*
    tar --create --gzip --file "$CACHE/base.new" --directory "$root" .
    mv "$CACHE/base.new" "$CACHE/base.tar.gz"
    rm -rf "$root"
}

# torch for the CPU, where pip is set up to find it; else the index's, which is larger.
get_torch() {
    ls "$WHEELS"/torch-*.whl >/dev/null 2>&1 && return
    .venv/bin/pip download --quiet --no-deps --dest "$WHEELS" "$(grep '^torch==' constraints.txt)"
}

start_engine() {
    [ -n "${DOCKER_HOST:-}" ] && return
    [ "$(id -u)" = 0 ] || fail "got user $(id -un), expected root: it starts a Docker engine"
    local folder
    folder=$(mktemp -d "${TMPDIR:-/tmp}/atoll-docker.XXXXXX")
    export DOCKER_HOST=unix://$folder/docker.sock
    : >"$CACHE/dockerd.log"
    dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/pid" --host "$DOCKER_HOST" \
        >"$CACHE/dockerd.log" 2>&1 &
    ENGINE=$!
    trap "kill $ENGINE; wait $ENGINE || true; rm -rf $folder" EXIT
    grep --quiet --max-count 1 "API listen on" \
        <(tail --lines +1 --follow --pid $ENGINE "$CACHE/dockerd.log") ||
        fail "the Docker engine does not start: $CACHE/dockerd.log says why"
}

install_engine
install_compose_2
make_base
get_torch
start_engine
docker import "$CACHE/base.tar.gz" atoll-test/base >/dev/null || fail "the engine at $DOCKER_HOST does not answer"
export COMPOSE_1=/usr/bin/docker-compose COMPOSE_2=$CACHE/docker-compose-2
.venv/bin/pytest -v -x -p no:cacheprovider tests/containers/compose_files.py tests/containers/runs.py "$@"
