# SPDX-License-Identifier: Apache-2.0
"""Checks of the sources: each function yields one line per problem."""
