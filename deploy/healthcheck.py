"""Whether the server in this container lives: exit code 0 where `GET /healthz` answers 200.

It reads the settings that the server reads. The certificate is not checked: it names the server as others reach it, not as we do here.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request

PREFIX = "GROUPWISE_SERVE_"
SECONDS = 4.0


def main() -> int:
    """Ask once."""
    port = os.environ.get(f"{PREFIX}PORT", "8000")
    secure = bool(os.environ.get(f"{PREFIX}TLS_CERTIFICATE"))
    url = f"{'https' if secure else 'http'}://127.0.0.1:{port}/healthz"
    unchecked = ssl._create_unverified_context() if secure else None
    try:
        with urllib.request.urlopen(url, timeout=SECONDS, context=unchecked) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
