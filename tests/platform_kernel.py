"""Kernels as Colab and Kaggle have them, run as a program: `python -m tests.platform_kernel colab -f CONNECTION_FILE`.

Colab's shell is of a class of its own, and the package google.colab has secrets; Kaggle's is the usual one, beside kaggle_secrets. Both
raise errors of their own for secrets that are not there.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from traitlets import Type

SECRETS = {"HF_TOKEN": "hf_alike_of_a_secret", "WANDB_API_KEY": "wandb_alike_of_a_secret"}


class Shell(ZMQInteractiveShell):
    """As `google.colab._shell.Shell`."""


class ColabKernel(IPythonKernel):
    """Has that shell."""

    shell_class = Type(Shell)


class SecretNotFoundError(Exception):
    """As both services have one."""


def secret(name: str) -> str:
    if name not in SECRETS:
        raise SecretNotFoundError(name)
    return SECRETS[name]


class UserSecretsClient:
    """As `kaggle_secrets` has it."""

    def get_secret(self, name: str) -> str:
        return secret(name)


def module(name: str, **content: Any) -> None:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    sys.modules[name] = made


def main() -> None:
    platform = sys.argv.pop(1)
    if platform == "colab":
        with suppress(ImportError):  # other packages are in that name, too
            import google  # noqa: F401
        if "google" not in sys.modules:
            module("google", __path__=[])
        module("google.colab", __path__=[])
        module("google.colab.userdata", get=secret)
        IPKernelApp.launch_instance(kernel_class=ColabKernel)
    else:
        module("kaggle_secrets", UserSecretsClient=UserSecretsClient)
        IPKernelApp.launch_instance()


if __name__ == "__main__":
    main()
