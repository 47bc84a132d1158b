import sys

from numpy_sdpa.cli import main

if __name__ == "__main__":
    sys.exit(main())
