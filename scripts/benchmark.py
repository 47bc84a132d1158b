"""The table of docs/performance.md: the same as ``numpy-sdpa bench``, from a checkout.

python scripts/benchmark.py                         # every row; a quarter of an hour on two cores
python scripts/benchmark.py --only decode --pairs 9
python scripts/benchmark.py --json > table.json
python scripts/benchmark.py --plot docs/performance.png
"""

import sys

from numpy_sdpa.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
