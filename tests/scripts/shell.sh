#!/bin/sh
# for --no-python: a program that is not Python hands over to one that is
exec "${PYTHON_FOR_TEST:-python3}" "$(dirname "$0")/dump.py" "$@"
