# SPDX-License-Identifier: Apache-2.0
# mortar_ffi: one library for every Python and every PyTorch, bound with TVM-FFI. It holds all of
# Mortar, so that a wheel needs no second file.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python3_EXECUTABLE} -m tvm_ffi.config --cmakedir
  OUTPUT_VARIABLE tvm_ffi_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE status ERROR_QUIET)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "Mortar: ${Python3_EXECUTABLE} lacks the package apache-tvm-ffi, which the "
    "Python binding needs: name a Python that has it (-DPython3_EXECUTABLE=...; ./run setup makes "
    ".venv/bin/python), or build the C++ library alone (-DMORTAR_FFI=OFF)")
endif()
set(Python_EXECUTABLE ${Python3_EXECUTABLE})  # which tvm_ffi's package file asks for its paths
find_package(tvm_ffi CONFIG REQUIRED)

list(TRANSFORM MORTAR_FAMILIES REPLACE "(.+)"
  "bindings/tvm_ffi/\\1.cpp;bindings/tvm_ffi/\\1_train.cpp" OUTPUT_VARIABLE patterns)
file(GLOB binding_sources CONFIGURE_DEPENDS bindings/tvm_ffi/library.cpp ${patterns})
if(binding_sources)
  add_library(mortar_ffi MODULE ${binding_sources})
  mortar_link_objects(mortar_ffi ${PROJECT_SOURCE_DIR}/cmake/mortar_ffi.map)
  target_include_directories(mortar_ffi PRIVATE include src)
  target_link_libraries(mortar_ffi PRIVATE tvm_ffi::header tvm_ffi::shared)
  mortar_enable_warnings(mortar_ffi)
  target_compile_options(mortar_ffi PRIVATE -ffile-prefix-map=${PROJECT_SOURCE_DIR}/=)
  # Python has libtvm_ffi.so loaded before it loads this library.
  set_target_properties(mortar_ffi PROPERTIES PREFIX "" LINKER_LANGUAGE CXX)
  install(TARGETS mortar_ffi LIBRARY DESTINATION mortar/_lib COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES ${MORTAR_HIGHWAY_LIBRARY} DESTINATION mortar/_lib COMPONENT python EXCLUDE_FROM_ALL)
endif()
