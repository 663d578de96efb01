# SPDX-License-Identifier: Apache-2.0
"""Formats the C++, CUDA and Python sources in place; ends with status 1 if a complaint remains."""

import sys

from checks import form

problems = [*form.clang_format(fix=True), *form.ruff(fix=True)]
print("\n".join(problems) or "formatted")
sys.exit(bool(problems))
