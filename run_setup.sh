# shellcheck shell=bash
# Makes .venv what the locks say. `run` sources this file when something is missing.

# A project without NeMo has other values of these four.
SIZE="5.5 GB" # of all packages
LOWEST=3.11   # the first Python; the last is 3.13
# What a lender's environment needs to have, as the beginnings of NAME==VERSION, and in words.
NEEDED=(nemo-toolkit==2.7. megatron-core==0.15. torchvision==)
IN_WORDS="NeMo 2.7, Megatron-Core 0.15 and torchvision"

PYTHONS="3.1[${LOWEST#3.1}-3]" # as a pattern
LOCKS=(requirements.lock requirements-dev.lock)
# A project made by `new` carries megakit's wheel.
[[ ! -d $root/wheels ]] || links+=(--find-links "$root/wheels")

setup_usage() {
  cat <<'END'
usage: ./run setup [--dev | --download DIR | --wheels DIR | --venv DIR]

Sets up .venv with the packages of requirements.lock, which the tutorial needs.

  --dev           add requirements-dev.lock: for tests and work on the project
  --download DIR  download the wheels of both locks into a folder
  --wheels DIR    install both from this folder, on a machine without a network
  --venv DIR      use the packages of an existing environment
END
}

setup_verb() { # ARGUMENT...
  case "$# ${1:-}" in
    "0 ") set_up requirements.lock ;;
    "1 --dev") set_up "${LOCKS[@]}" ;;
    "1 --help" | "1 -h") setup_usage && return ;;
    "2 --download") download "$2" ;;
    "2 --wheels")
      compgen -G "$2/*.whl" >/dev/null || refuse "setup --wheels: no wheels in $2; where there is" \
        "a network, ./run setup --download DIR fills a folder with them"
      links+=(--no-index --find-links "$(realpath -m "$2")")
      set_up "${LOCKS[@]}" # later there may be no folder
      ;;
    "2 --venv")
      lender=$(realpath -m "$2")/bin/python
      fits "$lender" || refuse "--venv $2: is no environment of Python $LOWEST to 3.13 with" \
        "$IN_WORDS; name another, or leave --venv out"
      [[ ! -e $venv/bin/python || $(cat "$installed/lender" 2>/dev/null) == "$lender" ]] ||
        refuse "setup --venv: $venv is set up already; remove it first"
      set_up requirements.lock
      ;;
    *) refuse "setup takes --dev, --download DIR, --wheels DIR or --venv DIR, not '$*'" ;;
  esac
  say "$venv is set up."
}

download() { # DIR
  local lock
  set_up "${LOCKS[@]}" # has pip, and setuptools, which looks into the packages that come as source
  for lock in "${LOCKS[@]}"; do
    "$venv/bin/python" -I -m pip download --no-build-isolation --no-deps --require-hashes \
      "${links[@]}" --dest "$1" --requirement "$root/$lock" >&2
  done
  say "$1 is for $("$venv/bin/python" --version | cut -d . -f 1,2) on $(uname -sm)." \
    "There: ./run setup --wheels DIR"
}

# PYTHON: whether it has what is needed. Sets `held` to its packages, one NAME==VERSION a line.
fits() {
  local package
  held=$("$1" -I -c '
import sys
from importlib.metadata import distributions
print(f"python==3.{sys.version_info[1]}")
for package in distributions():
    print("{}=={}".format(package.metadata["Name"], package.version))
' 2>/dev/null | tr A-Z_ a-z-) || return
  for package in "python==$PYTHONS" "${NEEDED[@]}"; do [[ $held == *$package* ]] || return; done
}

# Sets `lender` if the Python that is asked for, or one on the PATH, has what is needed, as in
# NVIDIA's containers. A .venv that a `run` made is no container.
find_lender() {
  local path
  while read -r path; do
    if [[ ! -e ${path%/bin/*}/.locks ]] && fits "$path"; then lender=$path && return; fi
  done < <(type -aP "${PYTHON:-python3}" "${PYTHON:-python}")
}

# uv as requirements-dev.lock pins it, in .venv/.uv: from the lender, or installed by another uv, by
# any Python's pip, or by that of a virtual environment.
get_uv() {
  local pin=$installed/uv.txt own=$venv/.uv theirs=${lender%/bin/*}/.uv path pip
  local fits_uv='import sys; sys.exit(sys.version_info < (3, 8))'
  # Without its marker, because a later Python can install it, too.
  sed -n '/^uv==/,/[^\\]$/ { s/ ;[^\\]*/ /; p }' "$root/requirements-dev.lock" >"$pin"
  if cmp -s "$pin" "$own/uv.txt"; then return; fi
  rm -rf "$own"
  if cmp -s "$pin" "$theirs/uv.txt"; then
    mkdir -p "$own/bin" && cp "$theirs/bin/uv" "$own/bin" && cp "$pin" "$own" && return
  fi
  say "Installing uv, which installs all else."
  while read -r path; do
    if [[ $path == */uv ]] && "$path" venv --quiet --python "$python" "$own"; then
      pip=("$path" pip install --python "$own")
    elif "$path" -I -c "import pip; $fits_uv" 2>/dev/null; then
      pip=("$path" -I -m pip install --target "$own")
    elif "$path" -I -c "import ensurepip; $fits_uv" 2>/dev/null && "$path" -I -m venv "$own"; then
      pip=("$own/bin/python" -I -m pip install)
    else
      continue
    fi
    "${pip[@]}" --quiet --require-hashes "${links[@]}" --requirement "$pin" >&2 || stopped
    cp "$pin" "$own"
    return
  done < <(type -aP uv ${PYTHON:+"$PYTHON"} python3 python)
  refuse "uv is needed, and no Python with pip or venv is here to install it. Install the package" \
    "python3-venv (Debian, Ubuntu) or python3-pip (Fedora, Red Hat), or uv, and start again."
}

uv() { "$venv/.uv/bin/uv" "$@" >&2; }

# What clusters' modules and NVIDIA's images set must not reach pip or uv. uv finds pyenv's Pythons,
# too, and uses the certificates and the index that pip would use.
prepare_environment() {
  local path
  unset PIP_CONSTRAINT PIP_PREFIX UV_CONSTRAINT UV_OVERRIDE UV_SYSTEM_PYTHON UV_TORCH_BACKEND
  export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore
  for path in "${HOME:-}"/.pyenv/versions/$PYTHONS*/bin; do PATH+=:$path; done
  for path in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [[ ! -s $path ]] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
  done
  [[ -z ${PIP_INDEX_URL:-} ]] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
  [[ -w ${HOME:-} ]] || export HOME=$venv/.uv # then uv's cache is there
  # Python compiles what it first imports, unless it may not keep the result.
  [[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || export UV_COMPILE_BYTECODE=1
  [[ ${PYTHON:-} != */* ]] || PYTHON=$(realpath -s "$PYTHON")
  python=${PYTHON:->=$LOWEST,<3.14} # what uv is to look for, or to fetch
  cd / # where no project's settings count
}

stopped() {
  fail "set-up stopped, for the reason above. The same command tries again, and keeps what was" \
    "downloaded. Where there is no network: ./run setup --wheels DIR"
}

install() { # LOCK...
  local lock packages
  [[ $(uname -sm) =~ ^Linux\ (x86_64|aarch64)$ ]] || refuse "this is $(uname -sm). The wheels are" \
    "for Linux on x86_64 or aarch64. On Windows use WSL2; elsewhere a container: the Dockerfile."
  [[ -z ${PYTHON:-} || $PYTHON =~ ^$PYTHONS(\.[0-9]+)?$ ||
    $("$PYTHON" --version 2>/dev/null) == *\ $PYTHONS.* ]] ||
    refuse "PYTHON=$PYTHON: name a Python from $LOWEST to 3.13, or the path of one"
  [[ -z $(ls -A "$venv" 2>/dev/null) || -e $installed ]] ||
    refuse "$venv was not made by ./run; move it away, or name another place: VENV=/path ./run ..."
  mkdir -p "$installed" 2>/dev/null && [[ -w $installed ]] || {
    [[ ! -L $venv/bin/python || -x $venv/bin/python ]] ||
      refuse "$venv uses $(readlink "$venv/bin/python"), which is gone or closed to you; let its" \
        "owner make it readable, or name a place for another: VENV=/path ./run ..."
    refuse "$venv can't be written; name a place that can: VENV=/path ./run ..."
  }
  trap 'say "Interrupted. The same command resumes the set-up." && exit 130' INT
  exec 9>>"$installed/lock" # uv inherits it, should only this script be killed
  flock -n 9 || { say "Another ./run is setting up $venv: waiting for it." && flock 9; }
  if is_ready "$@"; then return; fi

  [[ -n $lender || ! -e $installed/lender ]] || lender=$(<"$installed/lender")
  prepare_environment
  get_uv
  if [[ ! -x $venv/bin/python || -e $installed/unfinished ]] || ! python_is_as_asked; then
    make_venv
  fi
  say "Installing $* in $venv${lender:+, which uses the packages of ${lender%/bin/*}}."
  packages=$(echo "$venv"/lib/python3*/site-packages)
  touch "$installed/unfinished"
  if ! install_packages "$@"; then
    # What could not be downloaded leaves all as it was.
    [[ ! $installed/unfinished -nt $packages ]] || rm "$installed/unfinished"
    stopped
  fi
  for lock; do cp "$root/$lock" "$installed"; done
  rm "$installed/unfinished"
}

make_venv() {
  [[ -n $lender ]] || find_lender
  [[ -n $lender ]] ||
    say "Setting up $venv: $SIZE, of which uv downloads what its cache lacks, in a few minutes."
  touch "$installed/unfinished"
  rm -rf "${venv:?}"/{bin,etc,include,lib,lib64,share,pyvenv.cfg} "$installed"/*.lock
  uv venv --quiet --allow-existing --python "${lender:-$python}" "$venv" ||
    refuse "uv neither found nor fetched Python ${PYTHON:-$LOWEST to 3.13}. Install one, or name" \
      "the one to use: PYTHON=/path/to/python3.12 ./run ..."
  [[ -n $lender ]] || return 0
  # Not by --system-site-packages: that reaches past a virtual environment to its base.
  "$lender" -I -c 'import site
print("import site", *(f"site.addsitedir({path!r})" for path in site.getsitepackages()), sep="; ")
' >"$(echo "$venv"/lib/python3*/site-packages)/borrowed.pth"
  printf '%s\n' "$lender" >"$installed/lender"
}

install_packages() { # LOCK...
  local lock options=(--python "$venv" --no-deps --require-hashes "${links[@]}")
  options+=(--build-constraints "$root/requirements.lock")
  for lock; do options+=(--requirements "$root/$lock"); done
  if [[ -n $lender ]]; then
    fits "$lender" || fail "${lender%/bin/*} lacks $IN_WORDS now, and $venv uses its" \
      "packages. Restore it, or remove $venv, and start again."
    # megakit may be another version, and a project that needs it carries its wheel. What torch
    # brings, the lender's torch has brought.
    grep -v '^megakit==' <<<"$held" >"$installed/held"
    grep -oE '^(nvidia-|cuda-|triton)[^=]*' "$root/requirements.lock" >>"$installed/held"
    options+=(--excludes "$installed/held")
  fi
  # What uv's cache or the project has needs no network. Not by the function: a trap would print to
  # its standard error.
  "$venv/.uv/bin/uv" pip install --quiet --offline "${options[@]}" >/dev/null 2>&1 ||
    uv pip install "${options[@]}"
}
