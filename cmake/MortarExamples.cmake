# SPDX-License-Identifier: Apache-2.0
# The example outside the tree runs against an installed copy, the one in README.md as it stands.
if(MORTAR_SANITIZE)
  return()  # the sanitizers' run time does not load into a program built without them
endif()
if(NOT lora IN_LIST MORTAR_FAMILIES)
  return()  # both are of LoRA
endif()
if(MORTAR_INSTALL)
  add_test(NAME installed_example COMMAND ${CMAKE_COMMAND} -DBUILD=${PROJECT_BINARY_DIR}
    -DSOURCE=${PROJECT_SOURCE_DIR} -DCOMPILER=${CMAKE_CXX_COMPILER}
    -P ${PROJECT_SOURCE_DIR}/cmake/test_installed_example.cmake)
endif()

find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(extract ${PROJECT_SOURCE_DIR}/tools/readme_example.py)
add_custom_command(OUTPUT readme_example.cpp
  COMMAND ${Python3_EXECUTABLE} ${extract} cpp readme_example.cpp
  DEPENDS ${extract} README.md VERBATIM)
add_executable(readme_example readme_example.cpp)
target_link_libraries(readme_example PRIVATE mortar)
add_test(NAME readme_example COMMAND readme_example)
