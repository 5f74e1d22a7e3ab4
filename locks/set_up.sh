# Makes .venv what the locks say. `run` sources this file when something is missing.

# ---- What it needs -----------------------------------------------------------------------------

check_machine() {
  local machine libc
  machine="$(uname -sm), $(getconf LONG_BIT) bits"
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc="no glibc"
  [[ $machine =~ ^Linux\ (x86_64|aarch64),\ 64 && $libc == glibc* ]] &&
    sort -VC <<<"glibc 2.28"$'\n'"$libc" ||
    refuse "this is $machine, $libc. The wheels are for Linux on x86_64 or aarch64, 64 bits, glibc" \
      "2.28 or later. On Windows use WSL2; elsewhere such a Linux, or a container: the Dockerfile."
}

# Sets `cache` to the folder of uv's cache, and `above` to the deepest folder on its path that exists.
# If the user's cache can't be written, the cache is inside .venv.
find_cache() {
  cache=$(realpath -m "${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-$venv/.uv}/.cache}/uv}") above=$cache
  until [[ -e $above ]]; do above=$(dirname "$above"); done
  [[ -d $above && -w $above ]] || cache=$venv/.uv/cache above=$venv
}

# GB: refuses unless there is that much room for .venv and for uv's cache. Measured: 5.5 GB; .venv
# only links to the cache where both are on one disk.
check_space() {
  local folder free cache above
  [[ -z $lender ]] || return 0 # the packages added to a lender's are small
  find_cache
  for folder in "$venv" "$above"; do
    free=$(df -BGB --output=avail "$folder" | tail -n 1 | tr -dc '0-9')
    ((free >= $1)) || refuse "the disk of $folder has $free GB free, this needs $1 GB. Make room," \
      "or name folders on a larger disk: VENV=/large/venv UV_CACHE_DIR=/large/cache ./run ..."
  done
}

# PYTHON: what it is, as locks/lender.py or its own --version says.
describe() { "$1" -I "$root/locks/lender.py" 2>/dev/null || "$1" --version 2>&1 | head -n 1; }

# Sets `python` to what uv is to look for; and `lender`, to a Python on the PATH whose NeMo fits, as
# in NVIDIA's containers.
find_python() {
  local path found
  python=${PYTHON:->=3.11,<3.14}
  if [[ $python =~ ^3\.1[123](\.[0-9]+)?$ ]]; then return; fi # uv finds it, or fetches it
  [[ -z ${PYTHON:-} ]] || python=$(type -P "$PYTHON") ||
    refuse "PYTHON=$PYTHON: is no program here; name 3.11, 3.12 or 3.13, or the path of one"
  while read -r path; do
    found=$(describe "$path") || found="no Python that runs"
    if [[ -n ${PYTHON:-} ]]; then
      [[ $found =~ Python\ 3\.1[123]\. ]] ||
        refuse "PYTHON=$PYTHON: is $found; name 3.11, 3.12 or 3.13, or the path of one"
      python=$(realpath -s "$path")
    fi
    [[ ! -e ${path%/bin/*}/.setup-lock ]] || continue # a .venv that a `run` made is no container
    if [[ $found == fits* ]]; then
      say "$path is ${found#fits: }: $venv uses its packages, and gets what is missing."
      lender=$path
      return
    fi
    [[ $found != *nemo-toolkit* ]] || say "$path is $found. NeMo 2.7, Megatron-Core 0.15 and" \
      "torchvision are needed: $venv gets its own."
  done < <(if [[ -n ${PYTHON:-} ]]; then echo "$python"; else type -aP python3 python; fi)
}

# ---- uv ----------------------------------------------------------------------------------------

# COMMAND...: in the background, because bash delays traps during a command in the foreground. It is
# killed when this script ends, even by SIGKILL.
tied() {
  local tie=(setpriv --pdeathsig KILL)
  "${tie[@]}" true 2>/dev/null || tie=()
  "${tie[@]}" "$@" >&2 &
  wait $!
}

interrupt() { # STATUS
  trap '' INT TERM HUP
  jobs -p | xargs -r kill 2>/dev/null || true
  wait
  say "Interrupted. The same command resumes the set-up." || true
  exit "$1"
}

stopped() {
  fail "set-up stopped, for the reason above. The same command tries again; what was downloaded is" \
    "in uv's cache. Where there is no network: setup --wheels, see ./run --help"
}

# uv as locks/uv.lock pins it, in .venv/.uv; installed by another uv, or by any Python's pip.
get_uv() {
  local pin=$root/locks/uv.lock own=$venv/.uv theirs=${lender%/bin/*}/.uv path pip
  local fits='import sys; sys.exit(sys.version_info < (3, 8))' # uv's wheel needs 3.8
  local pythons="${HOME:-}/.pyenv/versions/3.*/bin/python"
  if cmp -s "$pin" "$own/uv.lock"; then return; fi
  if cmp -s "$pin" "$theirs/uv.lock"; then
    mkdir -p "$own" && cp -r "$theirs/bin" "$pin" "$own" && return
  fi
  say "Installing uv, which installs all else."
  while read -r path; do
    pip=("$path" -I -m pip install)
    if [[ $path == */uv ]]; then
      tied "$path" --directory / venv --quiet --clear ${PYTHON:+--python "$PYTHON"} \
        "$own/python" || continue
      pip=("$path" --directory / pip install --python "$own/python")
    elif ! "$path" -I -c "$fits" 2>/dev/null; then
      continue
    elif ! "$path" -I -m pip --version &>/dev/null; then
      tied "$path" -I -m venv --clear "$own/python" &>/dev/null || continue
      pip[0]=$own/python/bin/python
    fi
    tied env -u PIP_CONSTRAINT -u PIP_PREFIX -u UV_CONSTRAINT PIP_REQUIRE_VIRTUALENV=0 \
      PIP_USER=0 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
      "${pip[@]}" --quiet --upgrade --require-hashes "${wheels[@]}" --target "$own" \
      --requirement "$pin" || stopped
    cp "$pin" "$own"
    return
  done < <(type -aP uv ${PYTHON:+"$PYTHON"} python3 python || true; compgen -G "$pythons")
  refuse "uv is needed, and no Python with pip or venv is here to install it. Type one of these, and" \
    "start again:
  apt install python3-venv      Debian, Ubuntu
  dnf install python3-pip       Fedora, Red Hat
  uv python install 3.12        where uv is"
}

# uv has the certificates and the index that pip would have. It runs from /, where no project's
# settings count; nor do those that a cluster's modules may set.
uv() {
  local folder bundle cache above home=${HOME:-} index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
  local certificates=${SSL_CERT_FILE:-${PIP_CERT:-}} settings=("PATH=$PATH")
  find_cache
  settings+=("UV_CACHE_DIR=$cache")
  for folder in "$home"/.pyenv/versions/3.1[123]*/bin; do settings[0]+=:$folder; done
  [[ -w $home ]] || settings+=("HOME=$venv/.uv")
  for bundle in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [[ ! -s $bundle || -n ${UV_SYSTEM_CERTS:-} ]] || settings+=(UV_SYSTEM_CERTS=1)
  done
  [[ -z $certificates ]] || settings+=("SSL_CERT_FILE=$certificates")
  [[ -z $index ]] || settings+=("UV_DEFAULT_INDEX=$index")
  # Python compiles what it first imports, unless it may not keep the result.
  [[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || settings+=(UV_COMPILE_BYTECODE=1)
  tied env -u UV_CONSTRAINT -u UV_OVERRIDE -u UV_SYSTEM_PYTHON -u UV_TORCH_BACKEND \
    -u UV_EXCLUDE_NEWER "${settings[@]}" \
    "$venv/.uv/bin/uv" --directory / "$@"
}

# ---- .venv -------------------------------------------------------------------------------------

set_up_now() { # LOCK...
  local lock
  for lock; do [[ -f $lock ]] || refuse "$lock is missing; git has it"; done
  check_machine
  mkdir -p "$venv" 2>/dev/null && [[ -w $venv ]] ||
    refuse "$venv can't be written; name a place that can: VENV=/path ./run ..."
  # .setup-lock is the first file that set-up writes. A virtual environment without it was made by
  # somebody else: it is filled, and never emptied.
  if [[ -n $(ls -A "$venv") && ! -e $venv/.setup-lock ]]; then
    [[ -e $venv/pyvenv.cfg && -z $lender ]] && python_is_as_asked ||
      refuse "$venv was not made by ./run, and is no virtual environment of Python 3.11 to 3.13;" \
        "move it away, or name another place: VENV=/path ./run ..."
    mkdir -p "$installed"
    touch "$installed/foreign"
  fi
  trap 'rmdir "$venv" 2>/dev/null || [[ $(ls -A "$venv") != .setup-lock ]] || rm -r "$venv"' EXIT
  trap 'interrupt 130' INT
  trap 'interrupt 143' TERM
  trap 'interrupt 129' HUP
  exec 9>>"$venv/.setup-lock"
  flock -n 9 || { say "Another ./run is setting up $venv: waiting for it." && tied flock 9; }
  is_ready "$@" || fill "$@"
  exec 9>&- # or the script would hold the lock as long as it runs
}

fill() { # LOCK...
  local lock locks=("$@") packages
  if [[ -z $lender && -f $venv/lender ]]; then
    lender=$(<"$venv/lender")
    say "$venv uses the packages of ${lender%/bin/*}. To have its own, remove $venv."
    [[ $(describe "$lender") == fits* ]] || refuse "${lender%/bin/*} has no NeMo that fits any more"
  fi
  # What was added once is renewed with the rest.
  for lock in "$installed"/*.lock; do
    lock=$root/locks/${lock##*/}
    [[ ! -f $lock || " ${locks[*]} " == *" $lock "* ]] || locks+=("$lock")
  done
  if [[ -d $installed && -x $venv/bin/python ]] && python_is_as_asked &&
    [[ ! -e $installed/unfinished || -e $installed/foreign ]]; then
    check_space 3
    get_uv
  elif [[ -e $installed/foreign ]]; then
    refuse "$venv was made by somebody else, for another Python; move it away, or name another" \
      "place: VENV=/path ./run ..."
  else
    make_venv
  fi
  say "Installing ${locks[*]#"$root/"} in $venv."
  packages=$(echo "$venv"/lib/python3*/site-packages)
  touch "$installed/unfinished"
  if ! install "${locks[@]}"; then
    # An index that can't be reached leaves all as it was.
    [[ $packages -nt $installed/unfinished ]] || rm "$installed/unfinished"
    stopped
  fi
  cp "${locks[@]}" "$installed"
  rm "$installed/unfinished"
}

make_venv() {
  [[ -n $lender ]] || find_python
  check_space 6
  [[ -n $lender ]] || say "Setting up $venv: 5.5 GB, of which uv downloads what its cache lacks." \
    "That takes a few minutes at most."
  get_uv
  find "$venv/" -mindepth 1 -maxdepth 1 ! -name .setup-lock ! -name .uv -exec rm -rf {} +
  uv venv --quiet --allow-existing --python "${lender:-$python}" "$venv" ||
    refuse "uv neither found nor fetched Python ${PYTHON:-3.11, 3.12 or 3.13}. Get one, and start" \
      "again:
  apt install python3     Debian 12 and later, Ubuntu 24.04 and later
  dnf install python3.12  Fedora, Red Hat
  pyenv install 3.12      without root
Or name the one to use: PYTHON=/path/to/python3.12 ./run ..."
  mkdir -p "$installed"
  [[ -z $lender ]] || printf '%s\n' "$lender" >"$venv/lender"
}

# LOCK-OR-FOLDER...: the names of the packages that are pinned there.
pins() { grep -rhoE '^[A-Za-z0-9._-]+(\[.*\])?==' "$@" | sed 's/[=[].*//' | sort -u; }

install() { # LOCK...
  local lock dropped options=(--python "$venv" --require-hashes "${wheels[@]}")
  # A project made by `new` carries a wheel of megakit.
  ! ls "$root"/wheels/megakit-*.whl &>/dev/null || options+=(--find-links "$root/wheels")
  if [[ -z $lender ]]; then
    for lock; do options+=(--requirements "$lock"); done
    uv pip install --no-deps --build-constraints "$root/locks/build.lock" "${options[@]}" || return
    dropped=$(comm -23 <(pins "$installed") <(pins "$@"))
    # shellcheck disable=SC2086  # one word for each package
    [[ -z $dropped ]] || uv pip uninstall --quiet --python "$venv" $dropped
  else
    "$lender" -I "$root/locks/lender.py" "$packages" >"$installed/held"
    for lock; do
      options+=(--constraints "$lock")
      [[ $lock != */locks/* ]] || options+=(--group "$root/pyproject.toml:$(basename "$lock" .lock)")
    done
    options+=(--excludes "$installed/held" --requirements "$root/pyproject.toml")
    # What a project carries itself needs no network.
    uv pip install --quiet --offline "${options[@]}" 2>/dev/null || uv pip install "${options[@]}"
  fi
}

# FOLDER: sets `lender` to the Python of that virtual environment.
find_lender() {
  local found
  [[ -x $1/bin/python ]] ||
    refuse "--venv $1: has no bin/python; name the folder of a virtual environment"
  found=$(describe "$1/bin/python") || found="no Python that runs"
  [[ $found == fits* ]] ||
    refuse "--venv $1: is $found. Python 3.11 to 3.13 with NeMo 2.7, Megatron-Core 0.15 and" \
      "torchvision is needed; name another, or leave --venv out"
  lender=$(realpath "$1")/bin/python
  [[ ! -d $installed || $(cat "$venv/lender" 2>/dev/null) == "$lender" ]] ||
    refuse "setup --venv: $venv is set up already; remove it first"
}

# DIR: fills it with all that set-up needs on a machine of this kind, with this Python.
download() {
  local lock pip=("$venv/bin/python" -I -m pip download --no-build-isolation --no-deps)
  set_up build # has pip and setuptools, which look into the two packages that come as source
  mkdir -p "$1" 2>/dev/null && [[ -w $1 ]] || refuse "--download: $1 can't be written"
  for lock in "$root"/requirements.lock "$root"/locks/*.lock; do
    "${pip[@]}" --require-hashes --dest "$1" --requirement "$lock" >&2 ||
      fail "pip stopped, for the reason above; the same command keeps what it finds in $1"
  done
  say "$1 is for $("$venv/bin/python" --version | cut -d. -f1,2) on $(uname -sm)." \
    "There: ./run setup --wheels DIR"
}
