"""``python -m fxsafe``."""

import sys

from fxsafe.cli import main

if __name__ == "__main__":
    sys.exit(main())
