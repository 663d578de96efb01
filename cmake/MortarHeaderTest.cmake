# SPDX-License-Identifier: Apache-2.0
# Compiles every public header alone: each must include what it uses.
file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include include/mortar/*.h)
set(header_sources)
foreach(header IN LISTS headers)
  string(MAKE_C_IDENTIFIER ${header} name)
  set(source ${PROJECT_BINARY_DIR}/header_test/${name}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
  list(APPEND header_sources ${source})
endforeach()
add_library(mortar_header_test OBJECT ${header_sources})
target_include_directories(mortar_header_test PRIVATE include)
mortar_enable_warnings(mortar_header_test)
target_compile_options(mortar_header_test PRIVATE -Wconversion -Wpedantic)  # users may have these
