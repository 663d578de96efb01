# SPDX-License-Identifier: Apache-2.0
# mortar_enable_warnings(target): the warnings of every C++ and CUDA source of Mortar.
function(mortar_enable_warnings target)
  set(host -Wall -Wextra -Wshadow)
  if(MORTAR_WERROR)
    list(APPEND host -Werror)
  endif()
  list(JOIN host "," joined)
  set(device "-Xcompiler=${joined}")
  if(MORTAR_WERROR)
    # 177: a constant of a traits struct that not every instantiation uses.
    list(APPEND device -Werror=all-warnings -diag-suppress=177)
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${host}>" "$<$<COMPILE_LANGUAGE:CUDA>:${device}>")
endfunction()
