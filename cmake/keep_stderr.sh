#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a compile command and keeps a copy of its stderr in OBJECT.stderr (OBJECT is what -o names).
object=
previous=
for argument; do
  if [[ $previous == -o ]]; then object=$argument; fi
  previous=$argument
done
[[ -n $object ]] || exec "$@"
exec 3>&1
"$@" 2>&1 >&3 | tee "$object.stderr" >&2
exit "${PIPESTATUS[0]}"
