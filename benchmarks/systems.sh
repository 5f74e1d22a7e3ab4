#!/usr/bin/env bash
# README's command on a bare Debian 12 and a bare Debian 13, each with its own Python, and the
# Dockerfile's image on Debian 12, without network, as a user whom the image does not know.
#
#   sudo [DATA_DIR=data] benchmarks/systems.sh [bookworm] [trixie] [container]
#
# Needs Linux, root, mmdebstrap, and buildah for the container. All is made in a temporary folder,
# about 25 GB for the container. The exit status is 1 if one of them failed.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
((EUID == 0)) || { echo "systems.sh: only root can make a system. Start it with sudo." >&2; exit 2; }

repository=$PWD data=$(readlink -f "${DATA_DIR:-data}")
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
failed=0

debian() { # SUITE ROOT: a bare Debian, with what this machine needs for its network
  local file
  mmdebstrap --quiet --variant=minbase --mode=root \
    --include=python3,python3-venv,git,ca-certificates "$1" "$2" || return
  for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt /etc/pip.conf /etc/uv/uv.toml; do
    [[ ! -f $file ]] || install -D -m 644 "$file" "$2$file" || return
  done
}

tutorial_on() { # SUITE: git clone and ./run tutorial, by an ordinary user
  local root=$work/$1
  debian "$1" "$root" || return
  useradd --root "$root" --create-home --uid 1000 somebody || return
  git clone -q --bare "$repository" "$root/srv/repository" || return
  cp -r "$data" "$root/srv/data" && chmod -R a+rX "$root/srv" || return
  # Namespaces of its own: mounts and processes end with the command.
  unshare --mount --pid --fork --kill-child bash -ec "
    mount --rbind /dev '$root/dev'
    mount -t tmpfs tmpfs '$root/dev/shm'
    mount -t proc proc '$root/proc'
    exec chroot --userspec=1000:1000 --groups= '$root' env HOME=/home/somebody USER=somebody \
      LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin bash -ec '
        git config --global --add safe.directory /srv/repository
        git clone -q /srv/repository ~/clone
        cd ~/clone
        ./run tutorial --data-dir /srv/data'" || return
  result "$root/home/somebody/clone/runs"
}

tutorial_in_container() {
  local storage=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)
  local base name root
  base=$("${storage[@]}" from scratch) && root=$("${storage[@]}" mount "$base") || return
  debian bookworm "$root" || return
  "${storage[@]}" config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "$base" && "${storage[@]}" commit --rm "$base" localhost/base || return
  git clone -q "$repository" "$work/context" || return
  "${storage[@]}" bud --isolation chroot --layers=false --network host \
    --build-arg BASE=localhost/base --tag localhost/megakit "$work/context" || return
  mkdir -m 777 "$work/workspace" || return
  name=$("${storage[@]}" from localhost/megakit) || return
  unshare --mount --net bash -ec 'ip link set lo up; mount -t tmpfs -o size=64m tmpfs /dev/shm
    exec "$@"' bash "${storage[@]}" run --isolation chroot --user 4242:4242 \
    --volume "$work/workspace:/workspace" --volume "$data:/data:ro" "$name" -- \
    /opt/megakit/run tutorial --data-dir /data || return
  "${storage[@]}" rm --all
  result "$work/workspace/runs"
}

result() { # RUNS: what the prediction wrote
  grep -E '"(accuracy|num_samples|python)"' "$1/predict/summary.json"
}

(($#)) || set -- bookworm trixie container
for system; do
  began=$SECONDS
  case $system in
    container) told=$(tutorial_in_container 2>"$work/log") ;;
    bookworm | trixie) told=$(tutorial_on "$system" 2>"$work/log") ;;
    *) echo "systems.sh: $system: bookworm, trixie or container." >&2; exit 2 ;;
  esac || { tail -n 20 "$work/log" >&2; told=FAILED failed=1; }
  printf '%-9s %4d s  %s\n' "$system" $((SECONDS - began)) "$(tail -n 3 <<<"$told" | tr -s ' \n' ' ')"
done
exit "$failed"
