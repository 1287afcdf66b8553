"""The training load of ``fxsafe dflash stress``, from a checkout: see ``python benchmarks/stress.py --help``.

python benchmarks/stress.py --seconds 60                                   # two cores, half a minute of imports
python benchmarks/stress.py --threads 3 --starts 2 --seconds 300 --json stress.json --png stress.png   # one GPU
python benchmarks/stress.py --threads 2 --devices cuda:0,cuda:1            # a device for each drafter
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fxsafe.dflash.cli import main

if __name__ == "__main__":
    sys.exit(main(["stress", *sys.argv[1:]]))
