"""`turns.py host` under its old name."""

import sys

from turns import main

if __name__ == "__main__":
    sys.exit(main(kind="host"))
