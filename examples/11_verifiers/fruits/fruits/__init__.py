"""A taskset for verifiers 0.4: the user asks for a fruit, and then for another one; one word each is best."""

from fruits.taskset import FruitsEnvironment, FruitsTaskset

__all__ = ["FruitsEnvironment", "FruitsTaskset"]
