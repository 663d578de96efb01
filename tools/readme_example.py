# SPDX-License-Identifier: Apache-2.0
"""Writes the code block of one language in README.md to a file."""

import argparse
import re
from pathlib import Path

_README = Path(__file__).resolve().parent.parent / "README.md"


def code_block(language: str) -> str:
    """The one block of README.md fenced as `language`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", _README.read_text(), re.M | re.S)
    if len(blocks) != 1:
        raise ValueError(f"README.md: expected one {language} block, found {len(blocks)}")
    return blocks[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("language", choices=("cpp", "python"))
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    arguments.output.write_text(code_block(arguments.language))
