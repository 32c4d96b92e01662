"""`python -m mneme` is `mneme`."""

import sys

from mneme.cluster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
