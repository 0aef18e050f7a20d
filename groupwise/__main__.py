"""`python -m groupwise` is `groupwise`."""

import sys

from groupwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
