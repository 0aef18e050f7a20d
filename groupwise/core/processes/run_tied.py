"""`python -m groupwise.core.processes.run_tied PARENT MARK NICENESS WORD…` replaces itself with the program `WORD…`.

The program, and everything that it starts, ends when process `PARENT` does, even if that is killed; see
`groupwise.core.processes.process_tree.tie_to_parent`.
"""

from __future__ import annotations

import os
import sys

from groupwise.core.processes.process_tree import tie_to_parent

if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]), sys.argv[2])
    os.nice(int(sys.argv[3]))
    os.execvp(sys.argv[4], sys.argv[4:])
