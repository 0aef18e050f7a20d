"""The tool server: one is shared by all attempts, because it has no state."""

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """The model sees its tool as `calculator_add`."""

    TOOL_PREFIX = "calculator"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


if __name__ == "__main__":
    Calculator.run()
