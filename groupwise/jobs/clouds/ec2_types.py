"""Facts about instance types that need no call to AWS: number of GPUs, price, and quota.

They are used for plans without credentials, or without permission for the Price List Service. Prices are of `PRICES_OF`: on demand,
Linux, us-east-1.
"""

from __future__ import annotations

import re

PRICES_OF = "June 2025"
HOME = "us-east-1"
"""The region of these prices."""

GPUS = {
    "g4dn": {"12xlarge": 4, "metal": 8},
    "g5": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6e": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "p3": {"8xlarge": 4, "16xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"48xlarge": 8},
    "p5e": {"48xlarge": 8},
    "p5en": {"48xlarge": 8},
}
"""Number of GPUs by family and size; sizes that are not listed have one."""
PRICES = {
    "g4dn": {
        "xlarge": 0.526,
        "2xlarge": 0.752,
        "4xlarge": 1.204,
        "8xlarge": 2.176,
        "12xlarge": 3.912,
        "16xlarge": 4.352,
        "metal": 7.824,
    },
    "g5": {
        "xlarge": 1.006,
        "2xlarge": 1.212,
        "4xlarge": 1.624,
        "8xlarge": 2.448,
        "12xlarge": 5.672,
        "16xlarge": 4.096,
        "24xlarge": 8.144,
        "48xlarge": 16.288,
    },
    "g6": {
        "xlarge": 0.8048,
        "2xlarge": 0.9776,
        "4xlarge": 1.3232,
        "8xlarge": 2.0144,
        "12xlarge": 4.6016,
        "16xlarge": 3.3968,
        "24xlarge": 6.6752,
        "48xlarge": 13.3504,
    },
    "g6e": {
        "xlarge": 1.861,
        "2xlarge": 2.24208,
        "4xlarge": 3.00424,
        "8xlarge": 4.52856,
        "12xlarge": 10.49264,
        "16xlarge": 7.57719,
        "24xlarge": 15.06559,
        "48xlarge": 30.13118,
    },
    "p3": {"2xlarge": 3.06, "8xlarge": 12.24, "16xlarge": 24.48},
}
"""Dollars per hour."""
QUOTAS = {
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "vt": ("L-DB2E81BA", "L-3819A6DF"),
    "p": ("L-417A185B", "L-7212CCBC"),
    **dict.fromkeys("acdhimrtz", ("L-1216C47A", "L-34B43A08")),
}
"""Codes of Service Quotas (on demand, spot) by the first letters of a family. Quotas count virtual cores."""
SPOT_QUOTA_OF_P5 = "L-C4BD4855"


def gpus_of(kind: str) -> int:
    """Number of GPUs of an instance type; 0 if the type is not known here."""
    family, _, size = kind.partition(".")
    return GPUS[family].get(size, 1) if family in GPUS else 0


def list_price(kind: str, region: str) -> float | None:
    """Dollars per hour; None: not known here."""
    family, _, size = kind.partition(".")
    return PRICES.get(family, {}).get(size) if region == HOME else None


def quota_code(kind: str, *, spot: bool) -> str | None:
    """The code of the quota that counts this type; None: not known here."""
    family = kind.partition(".")[0]
    if spot and family.startswith("p5"):
        return SPOT_QUOTA_OF_P5
    letters = re.match("[a-z]*", family)
    codes = QUOTAS.get(letters[0]) if letters else None
    return None if codes is None else codes[1 if spot else 0]
