#!/usr/bin/env bash
# Installs a pinned requirements file, and optionally this project, into a virtual environment; makes the environment
# first where there is none. Says in one message what is missing on the machine.
#
# install.sh --python PYTHON --venv FOLDER --requirements FILE [--project FOLDER] [-- PIP_ARGUMENTS...]
set -euo pipefail

python= venv= requirements= project=
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=$2 ;;
        --venv) venv=$2 ;;
        --requirements) requirements=$2 ;;
        --project) project=$2 ;;
        --) shift && break ;;
        *) echo "install.sh: unknown argument $1" >&2 && exit 2 ;;
    esac
    shift 2
done

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

# TileLang compiles its CPU kernels with the C++ compiler that these two variables or these names lead to.
compiler=${CXX:-${CC:-}}
if [ -z "$compiler" ]; then
    for name in g++ clang++ c++; do
        if command -v "$name" >/dev/null; then compiler=$name && break; fi
    done
fi
command -v "${compiler:-no compiler}" >/dev/null ||
    fail "C/C++ compiler: got ${compiler:-none}; TileLang needs g++, clang++ or c++. Install one (Debian: apt-get install g++), or set CXX."

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "Python: got no working '$python'; the pinned environment needs Python 3.11. Install it, or run make PYTHON=/path/to/python3.11."
[ "$version" = 3.11 ] ||
    fail "Python: got $version ('$python'); the pinned environment needs 3.11. Run make PYTHON=/path/to/python3.11."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "Python: '$python' cannot make virtual environments. Install its venv module (Debian: apt-get install python3.11-venv)."

if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

# pip prints a line for each package that it collects, and none while it unpacks them all.
log=$venv/install.log
total=$(grep -c '==' "$requirements")
started=$SECONDS
echo "Installing $total pinned packages from $requirements (a few minutes the first time)"
"$venv/bin/python" -m pip install --no-deps --disable-pip-version-check --progress-bar off "$@" -r "$requirements" 2>&1 | tee "$log" |
    awk -v total="$total" '
        /^Collecting|^Processing|^Requirement already satisfied/ {
            name = $1 == "Requirement" ? $4 : $2
            sub(".*/", "", name)  # a wheel found on disk
            printf "  [%3d/%d] %s\n", ++seen, total, name; fflush()
        }
        /^Installing collected packages/ { print "  unpacking"; fflush() }' ||
    fail "pip could not install $requirements; the end of $log:" "$(tail -n 15 "$log")"

if [ -n "$project" ]; then
    "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -e "$project"
    problem=$("$venv/bin/python" -c 'import torch' 2>&1) ||
        fail "torch does not import. If pip took its CUDA build, give it PyTorch's CPU wheels (README.md, \"The CPU build of torch\"), remove $venv and try again." "${problem##*$'\n'}"
fi
echo "Installed in $((SECONDS - started)) s"
