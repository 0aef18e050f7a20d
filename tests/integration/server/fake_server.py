"""`groupwise serve` with the fake engine in place of the real one, which begins in a quarter of a second: OUTPUT_DIR PORT [key=value …]."""

from __future__ import annotations

import sys
from functools import partial

from groupwise.dashboard.mounted import mount_dashboard
from groupwise.server.serve import build_service, serve
from groupwise.server.settings import read_settings

FACTORY = "tests.fake_engine:make"

if __name__ == "__main__":
    options = {"output_dir": sys.argv[1], "port": int(sys.argv[2])}
    settings = read_settings(None, {}, options, sys.argv[3:])
    build = partial(build_service, factory=FACTORY)
    sys.exit(serve(settings, None, build=build, in_front=mount_dashboard(settings, None)))
