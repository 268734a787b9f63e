"""Command lines that all processes of a launch run together, one after the other: a file has them, a JSON list a line."""

import importlib
import json
import sys
from pathlib import Path

import loaded  # noqa: F401

if __name__ == "__main__":
    for line in Path(sys.argv[1]).read_text().splitlines():
        package, *words = json.loads(line)
        if status := importlib.import_module(f"{package}.__main__").main(words):
            sys.exit(f"{line}: status {status}")
