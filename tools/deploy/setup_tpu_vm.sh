#!/usr/bin/env bash
# Sets up jserve on one TPU VM from a fresh image, as a systemd service.  Running it again changes only what differs.
#
#   sudo tools/deploy/setup_tpu_vm.sh [--source DIR|SPEC] [--extra tpu] [--config FILE] [--dry-run] [--no-start]
#
#   --source   what pip installs: a checkout (default: the one this script lies in) or a requirement such as jserve==0.1.0
#   --extra    the extra to install with it: tpu (default), cuda13, cuda12, or none
#   --config   the TOML file that becomes /etc/jserve/jserve.toml; without it an existing one is left alone
#   --root     work below this directory instead of / (for images and tests)
#   --dry-run  say what would be done, and do nothing
#   --no-start install, but neither enable nor start the service

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source_spec=$(cd "$here/../.." && pwd)
extra=tpu
config=
root=
dry_run=false
start=true
changed=false

usage() {
  sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --source | --extra | --config | --root)
      [[ $# -ge 2 ]] || { echo "$1 needs a value" >&2; exit 2; }
      case $1 in
        --source) source_spec=$2 ;;
        --extra) extra=$2 ;;
        --config) config=$2 ;;
        --root) root=${2%/} ;;
      esac
      shift 2
      ;;
    --dry-run) dry_run=true; shift ;;
    --no-start) start=false; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument $1" >&2; usage >&2; exit 2 ;;
  esac
done

case $extra in
  tpu | cuda12 | cuda13 | none) ;;
  *) echo "--extra $extra: must be tpu, cuda13, cuda12 or none" >&2; exit 2 ;;
esac
if [[ -n $config && ! -r $config ]]; then
  echo "--config $config: cannot read it" >&2
  exit 2
fi
if [[ $dry_run == false && -z $root && $(id -u) -ne 0 ]]; then
  echo "run it with sudo, or with --dry-run" >&2
  exit 1
fi

say() { printf '%s\n' "$*"; }

# Runs a command, or says it.
act() {
  if $dry_run; then
    printf '+'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# put SOURCE TARGET MODE: copies a file where the target differs.
put() {
  if cmp -s "$1" "$root$2"; then
    say "$2: as it should be"
    return
  fi
  say "$2: installing"
  act install -D -m "$3" "$1" "$root$2"
  changed=true
}

have_python() {
  local python
  for python in python3.13 python3.12 python3.11 python3; do
    if command -v "$python" >/dev/null && "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

# 1. Python 3.11 or newer with venv
if python=$(have_python); then
  say "python: $python"
else
  say "python: installing 3.11 with venv"
  act apt-get update -q
  act apt-get install -q -y python3.11 python3.11-venv
  python=python3.11
fi

# 2. The user that serves
if id jserve >/dev/null 2>&1; then
  say "user jserve: there"
else
  say "user jserve: creating"
  act useradd --system --home-dir /var/cache/jserve --shell /usr/sbin/nologin jserve
fi

# 3. The package, in an environment of its own; a stamp says of what it was made
venv=$root/opt/jserve/venv
wanted=$source_spec
[[ $extra == none ]] || wanted="${source_spec}[$extra]"
stamp=$wanted
if [[ -d $source_spec ]]; then
  # A checkout is its content: what git knows of it, or the newest file.
  stamp+=" $(git -C "$source_spec" describe --always --dirty 2>/dev/null || find "$source_spec" -name '*.py' -printf '%T@\n' | sort -n | tail -1)"
fi
if [[ -x $venv/bin/jserve && $(cat "$venv/installed" 2>/dev/null) == "$stamp" ]]; then
  say "package: $stamp is installed"
else
  say "package: installing $wanted"
  [[ -x $venv/bin/python ]] || act "$python" -m venv "$venv"
  act "$venv/bin/pip" install --quiet --upgrade "$wanted"
  if ! $dry_run; then
    printf '%s\n' "$stamp" >"$venv/installed"
  fi
  changed=true
fi

# 4. Settings and the unit
if [[ -n $config ]]; then
  put "$config" /etc/jserve/jserve.toml 0644
elif [[ -e $root/etc/jserve/jserve.toml ]]; then
  say "/etc/jserve/jserve.toml: left as it is"
else
  put "$here/jserve.toml" /etc/jserve/jserve.toml 0644
fi
unit=/etc/systemd/system/jserve.service
if ! cmp -s "$here/jserve.service" "$root$unit"; then
  put "$here/jserve.service" "$unit" 0644
  act systemctl daemon-reload
else
  say "$unit: as it should be"
fi

# 5. The service
if ! $start; then
  say "service: not started (--no-start)"
elif ! systemctl is-enabled --quiet jserve 2>/dev/null; then
  say "service: enabling and starting"
  act systemctl enable --now jserve
elif $changed || ! systemctl is-active --quiet jserve; then
  say "service: restarting (a drain comes first)"
  act systemctl restart jserve
else
  say "service: running"
fi
say "done; follow the start with: journalctl -fu jserve"
