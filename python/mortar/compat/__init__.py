# SPDX-License-Identifier: Apache-2.0
"""Drop-in replacements for ops of other projects, one module per project."""
