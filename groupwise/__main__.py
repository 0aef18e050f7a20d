"""The program `groupwise`, also as `python -m groupwise`."""

import gc
import sys


def main() -> int:
    """Run the command of the command line; returns its exit code.

    Garbage is collected only once the command begins: what is imported until then leaves hardly any, and looking for it takes time.
    Nor does Python look for it among all modules when it exits, which takes a fifth of a dry run. It must if triton is loaded, as newer
    releases of transformers do, since triton would report everything that was not collected on the terminal.
    """
    gc.disable()
    from groupwise.cli.main import main as run

    code = run()
    if "triton" not in sys.modules:
        gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(main())
