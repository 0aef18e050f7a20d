"""`python -m groupwise.core.processes.run_tied PARENT MARK NICENESS WORD…` becomes the program that the words name.

The program ends when `PARENT` does, and with it all that it starts, however its parent ended; see
`groupwise.core.processes.family.tie_to_parent`.
"""

from __future__ import annotations

import os
import sys

from groupwise.core.processes.family import tie_to_parent

if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]), sys.argv[2])
    os.nice(int(sys.argv[3]))
    os.execvp(sys.argv[4], sys.argv[4:])
