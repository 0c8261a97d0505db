#!/usr/bin/env bash
# Prints the path of a Python that JAX runs on (3.12 or newer), or says what to install.
set -u

good() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

for python in "${PYTHON:-}" python3 python3.12 python3.13 python3.14 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    path=$(command -v "$python" 2>/dev/null) || continue
    if good "$path"; then echo "$path"; exit 0; fi
done
if command -v uv >/dev/null; then
    path=$(uv python find '>=3.12' 2>/dev/null || { uv python install 3.12 >&2 && uv python find 3.12; })
    if [ -n "$path" ] && good "$path"; then echo "$path"; exit 0; fi
fi
cat >&2 <<'TEXT'
pallas_loss needs Python 3.12 or newer with venv, and none was found.
Install one, for example:
    apt-get install python3.12 python3.12-venv     (Debian, Ubuntu)
    brew install python@3.12                       (macOS)
    pyenv install 3.12   or   uv python install 3.12
or name one: make PYTHON=/path/to/python3.12 ...
TEXT
exit 1
