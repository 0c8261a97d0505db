"""``python -m pallas_loss info`` and ``python -m pallas_loss bench``."""

import sys

from pallas_loss.cli import main

if __name__ == "__main__":
    sys.exit(main())
